"""Two tenants that form a sharing group, read each other's entries and part again, while their node dies (I2, I12)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

from saltern.admin.v1 import sharing_groups_pb2 as groups
from saltern.client import Client
from saltern.grant import Grant
from saltern.keys import BlockKey
from saltern.results import Hit
from tests.chaos.content import content_of, is_right, key_of
from tests.chaos.deployment import LEFT, RIGHT, Deployment, namespace_name

GROUP = f"tenants/{LEFT}/sharingGroups/pair"
PAIR = (LEFT, RIGHT)
#: Entries that each side stores at a time, and how often at most before they part: far less than their tiers hold.
ENTRIES, VISITS_MAX = 16, 2
PART_SHARE = 0.5
#: Keys of groups that ended, of which none may be found: the last ones.
_ASKED_MAX = 1000
WRONG_BYTES = "wrong bytes of the other one"
#: They part, too, before the tokens that they share with come to an end.
_GRANT_LEFT_S = 240


class Pair:
    """Draws when the two form their group, use it and part; remembers what may and must not be found.

    Attributes:
        shared: keys that were stored in the group as it is now, each side's.
        gone: keys of groups that have ended.
        parted: grants of ended groups, with which nobody may open a session any more; ``refused``: those whose end the
            node has acknowledged.
    """

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.shared: dict[str, list[BlockKey]] = {tenant: [] for tenant in PAIR}
        self.gone: list[BlockKey] = []
        self.parted: list[Grant] = []
        self.refused: list[Grant] = []
        self.grants: dict[str, Grant] = {}
        self._deployment = deployment
        self._rng = Random(f"{seed}, and who shares")
        self._clients: dict[str, Client] = {}
        self._was_made = False
        self._visits = 0
        self._next = 0

    @property
    def epoch(self) -> int:
        """Of the group's salt; 0 while there is no group."""
        return self.grants[LEFT].epoch if self.grants else 0

    def act(self) -> Iterator[tuple[str, int]]:
        """One step of their common life: what was done, or found wrong, and how often."""
        if not self.grants:
            self._form()
            yield "groups formed", 1
        elif self._visits >= VISITS_MAX or self._rng.random() < PART_SHARE or self._grants_end_soon():
            self._part()
            yield "groups left", 1
            return
        if self._deployment.settle():
            yield from self._visit()

    def reader(self, tenant: str) -> Client:
        """A client of the group, as it is now."""
        if tenant not in self._clients:
            grant = self.grants[tenant]
            self._clients[tenant] = self._deployment.pinned_reader(grant, grant.epoch)
        return self._clients[tenant]

    def reader_of_the_other(self, tenant: str) -> Client:
        """Whom ``tenant`` shares with: it must find what that one has."""
        return self.reader(RIGHT if tenant == LEFT else LEFT)

    def found(self, tenant: str) -> set[BlockKey]:
        """What that side finds of what either has stored in the group. Raises SalternError."""
        keys = [key for side in PAIR for key in self.shared[side]]
        return self._found_by(self.reader(tenant), keys)

    def found_of_the_ended(self, own: dict[str, Client]) -> int:
        """How much of ended groups is found, by either side, in its own cache or in the group of now.

        Args:
            own: a client of each side outside of any group.
        """
        keys = self.gone[-_ASKED_MAX:]
        inside = [self.reader(tenant) for tenant in PAIR] if self.grants else []
        return sum(len(self._found_by(client, keys)) for client in (*own.values(), *inside))

    def served(self, grants: list[Grant]) -> int:
        """With how many of ``grants`` a session of the group is opened."""
        return sum(self._deployment.opens_session(grant, grant.epoch) for grant in grants[-6:])

    def disagreements(self, books: dict[str, Any], own: dict[str, Client]) -> list[str]:
        """What the node's books of the group say against what the two sides see."""
        told = [f"I2: {n} entries of a group that was left are found"] if (n := self.found_of_the_ended(own)) else []
        if served := self.served(self.parted):
            told.append(f"I2: {served} sessions of a group that was left are opened")
        there: dict[str, int] = books["shared"]
        if ended := {epoch: count for epoch, count in there.items() if int(epoch) != self.epoch and count}:
            told.append(f"I12: the node holds entries of ended epochs of the group: {ended}")
        if self.grants:
            left, right = self.found(LEFT), self.found(RIGHT)
            if left != right or len(left) != there.get(str(self.epoch), 0):
                told.append(f"the group: {there} in the books, {len(left)} and {len(right)} found by the two sides")
        return told

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _found_by(self, client: Client, keys: list[BlockKey]) -> set[BlockKey]:
        answer = client.lookup(keys)
        if answer.error is not None and keys:
            raise answer.error
        return {key for key, is_there in zip(keys, answer.found, strict=True) if is_there}

    def _grants_end_soon(self) -> bool:
        return min(grant.expires_at_s for grant in self.grants.values()) < time.time() + _GRANT_LEFT_S

    def _form(self) -> None:
        """Each side agrees for itself; the first one makes the group, the first time."""
        admin = self._deployment.admin
        service, ours, theirs = admin.sharing_groups, namespace_name(LEFT), namespace_name(RIGHT)
        if not self._was_made:
            create = groups.CreateSharingGroupRequest(parent=f"tenants/{LEFT}", sharing_group_id="pair", namespace=ours)
            admin.call(service.CreateSharingGroup, create)
            self._was_made = True
        admin.call(service.InviteMember, groups.InviteMemberRequest(name=GROUP, namespace=theirs))
        admin.call(service.AcceptInvitation, groups.AcceptInvitationRequest(name=GROUP, namespace=theirs))
        self.grants = {tenant: self._deployment.grant(tenant, GROUP) for tenant in PAIR}
        self._visits = 0

    def _visit(self) -> Iterator[tuple[str, int]]:
        """Each side stores something, and reads what the other one has."""
        self._visits += 1
        for tenant in PAIR:
            keys = [key_of(tenant, number) for number in range(self._next, self._next + ENTRIES)]
            self.shared[tenant] += keys  # before: what is not acknowledged may be there all the same
            self.reader(tenant).put_many([(key, content_of(key)) for key in keys])
        self._next += ENTRIES
        for tenant, peer in (PAIR, PAIR[::-1]):
            keys = self.shared[peer]
            for key, result in zip(keys, self.reader(tenant).get_many(keys), strict=True):
                if isinstance(result, Hit):
                    yield "entries read of the other one", 1
                    if not is_right(key, result.payload):
                        yield WRONG_BYTES, 1

    def _part(self) -> None:
        """The second one leaves: at once, and with the salt of both."""
        admin = self._deployment.admin
        request = groups.LeaveSharingGroupRequest(name=GROUP, namespace=namespace_name(RIGHT))
        admin.call(admin.sharing_groups.LeaveSharingGroup, request)
        self.close()
        self.parted += self.grants.values()
        self.grants = {}
        for tenant in PAIR:
            self.gone += self.shared[tenant]
            self.shared[tenant] = []
        if self._deployment.settle():
            self.refused = list(self.parted)
