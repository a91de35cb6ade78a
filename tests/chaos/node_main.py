"""``saltern serve node`` with two additions: it may be aimed at (:mod:`tests.chaos.aim`), and it tells its books.

Run as ``python -m tests.chaos.node_main BOOKS_FILE AIM MODE ARGUMENTS...``, AIM is ``-`` for none. MODE says from when
on calls count: ``at-once`` or ``at-signal``, which is SIGUSR2. On SIGUSR1 it checks its invariants and writes
BOOKS_FILE whole: what the process believes, to be compared with what can be seen from outside.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dataplane import commands, serving
from dataplane.core.partition import split_storage_uid
from dataplane.io.ssd_places import place_of
from dataplane.node import Node, NodeEndpoints
from saltern.names import TenantId
from tests.chaos.aim import Aim, Trigger

_books_file = Path()
_trigger: Trigger | None = None


class TellingNode(Node):
    """A node that answers SIGUSR1."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[NodeEndpoints]:
        async with super().serving() as endpoints:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, self._tell)
            loop.add_signal_handler(signal.SIGUSR2, _turn_trigger)
            yield endpoints

    def _tell(self) -> None:
        partial = _books_file.with_suffix(".partial")
        partial.write_text(json.dumps(self._books()))
        partial.replace(_books_file)

    def _books(self) -> dict[str, Any]:
        fault = ""
        try:
            self.check_invariants()
        except AssertionError as error:  # told, not raised: a signal handler's exception would go nowhere
            fault = f"check_invariants: {error}"
        usage = self.usage()
        status = self.ssd_status
        return {
            "fault": fault,
            "sessions": self.session_count,
            "ssd_state": status.state.value if status else "",
            "ssd_reason": status.reason if status else "",
            "segments": self._segment_files(),
            "shared": self._shared(list(usage.tenants)),
            "tenants": {
                tenant: {
                    "used_bytes": books.used_bytes,
                    "limit_bytes": books.limit_bytes,
                    "in_flight_bytes": books.in_flight_bytes,
                    "held_bytes": books.held_bytes,
                    "entries": books.entries,
                    "ssd_used_bytes": books.ssd.used_bytes if books.ssd else 0,
                    "ssd_limit_bytes": books.ssd.limit_bytes if books.ssd else 0,
                    "ssd_entries": books.ssd.entries if books.ssd else 0,
                    "readable": len(self._readable(tenant)),
                }
                for tenant, books in usage.tenants.items()
            },
        }

    def _readable(self, tenant: str) -> set[tuple[str, int, bytes]]:
        """Everything of a tenant's own, outside of sharing groups, that is on either tier, once."""
        return {copy for copy in self._copies(tenant) if not split_storage_uid(copy[0])[1]}

    def _shared(self, tenants: list[str]) -> dict[str, int]:
        """Different keys that members hold in sharing groups, by the group's epoch."""
        copies = {copy for tenant in tenants for copy in self._copies(tenant) if split_storage_uid(copy[0])[1]}
        return Counter(str(epoch) for epoch, _ in {(epoch, key) for _, epoch, key in copies})

    def _copies(self, tenant: str) -> set[tuple[str, int, bytes]]:
        found: set[tuple[str, int, bytes]] = set()
        for owner, index in self._pool_indexes():
            if owner == tenant:
                found.update((index.partition.storage_uid, index.partition.epoch, key) for key in index.entries)
        below = self._tier.tenants.get(TenantId(tenant)) if self._tier else None
        for books in below.partitions.values() if below else ():
            found.update((books.storage_uid, books.epoch, key) for key in books.entries)
        return found

    def _pool_indexes(self) -> list[tuple[str, Any]]:
        owners = self._core._pool.tenants.values()
        return [(owner.tenant, index) for owner in owners for index in owner.partitions.values()]

    def _segment_files(self) -> dict[str, int]:
        """Files that the books name, with the bytes that are charged for each."""
        store = self._state.blocks.ssd
        if store is None:
            return {}
        return {
            str(store._disk.path(place_of(segment))): segment.charged_bytes
            for owner in store.tier.tenants.values()
            for segment in owner.segments.values()
        }


def _turn_trigger() -> None:
    """Arm what waits for the signal; disarm what has not come to pass."""
    if _trigger is not None:
        _trigger.is_armed = not _trigger.is_armed


def main() -> None:
    global _books_file, _trigger
    _books_file = Path(sys.argv[1])
    if sys.argv[2] != "-":
        _trigger = Trigger(Aim.parse(sys.argv[2]), is_armed=sys.argv[3] == "at-once")
    setattr(serving, "Node", TellingNode)  # noqa: B010  # what the command serves
    commands.serve_node.main(sys.argv[4:], prog_name="saltern serve node")


if __name__ == "__main__":
    main()
