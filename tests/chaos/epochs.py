"""A tenant whose salt is rotated while its clients work: some epochs live on, the others must be gone (I12)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from saltern.client import Client
from saltern.grant import Grant
from saltern.keys import BlockKey
from tests.chaos.content import key_of
from tests.chaos.deployment import Deployment

#: A grace that outlives every run; one that is over within the next lives; none.
GRACES_S, GRACE_WEIGHTS = (24 * 3600, 1, 0), (4, 2, 3)
#: An epoch that is read for longer than this is there to the end.
_LIVES_ON_S = 3600
SHARE_OF_LIVES = 0.4
#: Of those that have ended, how many of the last ones are asked for.
_ASKED_MAX = 8
_FRESH_FOR_S = 120.0


class Turning:
    """Draws when the salt is rotated, and knows which epochs there are: from the control plane alone.

    Args:
        keys_max: how many keys the tenant has.

    Attributes:
        live: epochs whose entries must be there, the current one among them.
        ending: epochs in a grace that is nearly over: whether they are served depends on the moment.
        ended: epochs that no node may serve once it goes by the newest policy.
        refused: those of ``ended`` that the node has acknowledged to be over: from its next start on they are refused
            by its first answer, whatever it is that the control plane says then.
    """

    def __init__(self, deployment: Deployment, tenant: str, seed: int, keys_max: int) -> None:
        self.tenant = tenant
        self.live, self.ending, self.ended, self.refused = {1}, set[int](), set[int](), set[int]()
        self._deployment = deployment
        self._rng = Random(f"{seed}, and when salts are rotated")
        self._keys = [key_of(tenant, number) for number in range(keys_max)]
        self._clients: dict[int, Client] = {}
        self._grant: Grant | None = None
        self._grant_until_s = 0.0

    def draw(self) -> int | None:
        """The grace of a rotation in this life, in seconds; None: there is none."""
        if self._rng.random() >= SHARE_OF_LIVES:
            return None
        return self._rng.choices(GRACES_S, GRACE_WEIGHTS)[0]

    def rotate(self, grace_s: int) -> None:
        """Begin an epoch; what came before it ends after ``grace_s``. Wait, a little, until the node knows."""
        self._deployment.rotate_salt(self.tenant, grace_s)
        self.look()
        if self._deployment.settle():
            self.refused = set(self.ended)

    def look(self) -> None:
        """Ask the control plane which epochs there are."""
        epochs = self._deployment.salt_epochs(self.tenant)
        now_s = time.time()
        current = max(epochs)
        self.live = {epoch for epoch, until_s in epochs.items() if until_s is None or until_s > now_s + _LIVES_ON_S}
        self.ending = epochs.keys() - self.live
        self.ended = set(range(1, current)) - epochs.keys()
        for epoch in self.ended & self._clients.keys():
            self._clients.pop(epoch).close()

    def reader(self, epoch: int) -> Client:
        """A client that knows of that epoch alone."""
        if epoch not in self._clients:
            self._clients[epoch] = self._deployment.pinned_reader(self._fresh_grant(), epoch)
        return self._clients[epoch]

    def copies(self) -> list[BlockKey]:
        """What the node answers for in epochs that live: a key of two of them is there twice. Raises SalternError."""
        found: list[BlockKey] = []
        for epoch in sorted(self.live | self.ending):
            answer = self.reader(epoch).lookup(self._keys)
            if answer.error is not None and epoch in self.live:
                raise answer.error
            found += [key for key, is_there in zip(self._keys, answer.found, strict=True) if is_there]
        return found

    def served(self, epochs: set[int] | None = None) -> Iterator[int]:
        """Which of ``epochs``, or of all that ended, the node opens sessions under; asks for the last few only."""
        grant = self._fresh_grant()
        for epoch in sorted(self.ended if epochs is None else epochs)[-_ASKED_MAX:]:
            if self._deployment.opens_session(grant, epoch):
                yield epoch

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _fresh_grant(self) -> Grant:
        """Of a token that is good: only the epoch may be why a node refuses."""
        if self._grant is None or time.monotonic() > self._grant_until_s:
            self.close()  # they go by the token before
            self._grant = self._deployment.grant(self.tenant)
            self._grant_until_s = time.monotonic() + _FRESH_FOR_S
        return self._grant
