"""What the node says that it holds, against what can be seen from outside: keys that it answers for, files (I4, I8)."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from saltern.client import Client
from saltern.errors import SalternError
from saltern.keys import BlockKey
from tests.chaos.content import content_of, key_of
from tests.chaos.deployment import TURNING, Deployment, NodeDiedError, NodeProcess
from tests.chaos.disk_view import Place, readable_places
from tests.chaos.epochs import Turning
from tests.chaos.sharing import PAIR, Pair
from tests.support.live_files import live_sizes

#: Keys that each tenant uses: more than its tiers hold together.
KEYS = 2500
SETTLE_S = 20.0


class Truth:
    """The harness's own eyes: a client of each tenant, which waits as long as it takes."""

    def __init__(self, deployment: Deployment, turning: Turning, pair: Pair, resources: ExitStack) -> None:
        self._deployment = deployment
        self._turning = turning
        self._pair = pair
        self._resources = resources
        self._readers: dict[str, Client] = {}

    def reader(self, tenant: str) -> Client:
        if tenant not in self._readers:
            self._readers[tenant] = self._resources.enter_context(self._deployment.reader(tenant))
        return self._readers[tenant]

    def forget(self, tenant: str) -> None:
        """Its salt, or all of it, is another one from now on."""
        if tenant in self._readers:
            self._readers.pop(tenant).close()

    def own_readers_of_pair(self) -> dict[str, Client]:
        """Clients of the two outside of their group."""
        return {tenant: self.reader(tenant) for tenant in PAIR}

    def there(self, tenant: str, node: NodeProcess) -> dict[BlockKey, bool]:
        """Which keys the node answers for. A client whose grant is from while the node was away soon has another."""
        keys = [key_of(tenant, number) for number in range(KEYS)]
        end_s = time.monotonic() + SETTLE_S
        while (answer := self.reader(tenant).lookup(keys)).error is not None:
            require_alive(node)
            if time.monotonic() > end_s:
                raise answer.error
            time.sleep(0.05)
        return dict(zip(keys, answer.found, strict=True))

    def disagreements(self, node: NodeProcess) -> list[str]:
        """What does not agree. While files are still being written this may be something for a moment."""
        books = node.books()
        told = [books["fault"]] if books["fault"] else []
        if books["ssd_state"] not in ("", "ok"):
            told.append(f"the SSD tier is {books['ssd_state']}: {books['ssd_reason']}")
        try:
            for tenant, row in books["tenants"].items():
                told += self._disagreements_of(tenant, row, node, with_ssd=bool(books["ssd_state"]))
            told += self._pair.disagreements(books, self.own_readers_of_pair())
            told += [f"I12: epoch {epoch}, which ended, is served" for epoch in self._turning.served()]
        except SalternError as error:
            told.append(f"no answer: {error!r}, {error.reason}")
        return told + self._disagreements_with_files(books)

    def _disagreements_of(self, tenant: str, row: dict[str, Any], node: NodeProcess, *, with_ssd: bool) -> list[str]:
        told = []
        if tenant == TURNING:
            found = self._turning.copies()
        else:
            found = [key for key, is_there in self.there(tenant, node).items() if is_there]
        if len(found) != row["readable"]:
            told.append(f"{tenant}: {row['readable']} entries in the books, {len(found)} answered for")
        if row["in_flight_bytes"] or row["held_bytes"]:
            told.append(f"{tenant} holds bytes that nobody uses: {row}")
        if row["used_bytes"] > row["limit_bytes"] or row["ssd_used_bytes"] > row["ssd_limit_bytes"]:
            told.append(f"I4: {tenant} is above a limit: {row}")
        # Who has copies of a peer's entries is not to be told from outside.
        if not with_ssd and tenant not in PAIR:
            truth_bytes = sum(-(-len(content_of(key)) // 4096) * 4096 for key in found)
            if truth_bytes != row["used_bytes"]:
                told.append(f"{tenant} is charged {row['used_bytes']} for {truth_bytes}")
        return told

    def _disagreements_with_files(self, books: dict[str, Any]) -> list[str]:
        if not books["ssd_state"]:
            return []
        charged: dict[str, int] = books["segments"]
        there = {str(path): size for path, size in live_sizes(self._deployment.ssd_dir, ".seg").items()}
        told = [f"an orphan file: {path}" for path in there.keys() - charged.keys()]
        told += [
            f"{path} is longer than charged" for path in there.keys() & charged.keys() if there[path] > charged[path]
        ]
        for tenant, row in books["tenants"].items():
            total = sum(size for path, size in charged.items() if f"/{tenant}/" in path)
            if total != row["ssd_used_bytes"]:
                told.append(f"{tenant} is charged {row['ssd_used_bytes']} on SSD for segments of {total}")
        places = readable_places(self._deployment.ssd_dir, self._deployment.state_dir)
        told += [f"I12: the data key of {place} is still there" for place in places if self._is_over(place)]
        return told

    def _is_over(self, place: Place) -> bool:
        """Whether it is of an epoch that has ended."""
        if place.tenant in PAIR:
            return place.is_shared and place.epoch != self._pair.epoch
        return place.tenant == TURNING and place.epoch in self._turning.ended


def require_alive(node: NodeProcess) -> None:
    """Raises NodeDiedError. A process that kills itself may answer a moment longer than its files say."""
    time.sleep(0.02)
    if not node.is_alive:
        raise NodeDiedError
