"""Measures a store: one turn of one thing at a time, as the bench asks for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

from .store import Batch, Get, Put, Store

_MIB: Final = 1024 * 1024
_KEY_BYTES: Final = 8
_SMALL_BYTES: Final = 4096
#: Slow peers are asked fewer times.
_LOOKUPS_MAX_S: Final = 1.0
WayT = TypeVar("WayT", bound=Callable[[Batch], object])


class Measure:
    """Figures of one store. Every method returns what goes back over the line protocol."""

    def __init__(self, store: Store, batch_bytes: int) -> None:
        self._store = store
        self._area = memoryview(mmap.mmap(-1, batch_bytes))
        self._area[:] = os.urandom(_MIB) * (batch_bytes // _MIB)
        store.register(self._area)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self._batches: dict[int, Batch] = {}
        self._ways: dict[tuple[str, int], str] = {}
        self._known: list[str] = []

    def prepare(self, block_bytes: int) -> dict[str, Any]:
        """Choose the fastest way to put and to get blocks of one size, and check that the bytes come back."""
        if self._store.block_sizes_bytes and block_bytes not in self._store.block_sizes_bytes:
            raise RuntimeError(f"the adapter moves blocks of {self._store.block_sizes_bytes} bytes only")
        batch = self._batches[block_bytes] = self._make_batch(self._area.nbytes // block_bytes, block_bytes)
        for _ in range(2):  # the first round meets cold memory
            puts = {name: self._timed_put(put, batch)["seconds"] for name, put in self._store.put_ways().items()}
        for _ in range(2):
            gets = {name: self._timed_get(get, batch)["seconds"] for name, get in self._store.get_ways().items()}
        self._ways["put", block_bytes] = min(puts, key=puts.__getitem__)
        self._ways["get", block_bytes] = min(gets, key=gets.__getitem__)
        self._store.check(batch)
        return {"put": self._ways["put", block_bytes], "get": self._ways["get", block_bytes]}

    def put(self, block_bytes: int) -> dict[str, Any]:
        """Seconds and CPU seconds of storing one batch anew."""
        return self._timed_put(self._way("put", self._store.put_ways(), block_bytes), self._batches[block_bytes])

    def get(self, block_bytes: int) -> dict[str, Any]:
        """Seconds and CPU seconds of reading one batch."""
        return self._timed_get(self._way("get", self._store.get_ways(), block_bytes), self._batches[block_bytes])

    def exists(self, count: int, calls: int, hit: bool) -> dict[str, Any]:
        """Keys in a second, of up to ``calls`` questions for ``count`` keys each, all there or none."""
        keys = self._small(count) if hit else _new_keys(count)
        found = self._store.exists(keys)
        if found != (count if hit else 0):
            raise RuntimeError(f"{found} of {count} keys were found, which are {'all' if hit else 'not'} there")
        begin, done = time.perf_counter(), 0
        while done < calls and time.perf_counter() - begin < _LOOKUPS_MAX_S:
            self._store.exists(keys)
            done += 1
        return {"keys_per_s": count * done / (time.perf_counter() - begin)}

    def exists_one(self, calls: int) -> dict[str, Any]:
        """Median seconds of a question for one key that is not there."""
        [key] = _new_keys(1)
        return {"seconds": median(_seconds(lambda: self._store.exists_one(key)) for _ in range(calls))}

    def batch(self, count: int, block_bytes: int) -> dict[str, Any]:
        """Seconds to put, ask for and get ``count`` keys by the client's first way, which is its largest batch.

        Raises if one key fails, and where its protocol has no batches.
        """
        if not self._store.has_batches:
            raise RuntimeError("its protocol moves one key at a time")
        batch = self._make_batch(count, block_bytes)
        put, get = next(iter(self._store.put_ways().values())), next(iter(self._store.get_ways().values()))
        try:
            return {
                "put_seconds": _seconds(lambda: put(batch)),
                "exists_seconds": _seconds(lambda: self._require_found(batch.keys)),
                "get_seconds": _seconds(lambda: get(batch)),
            }
        finally:
            self._store.remove(batch.keys)

    def _make_batch(self, count: int, block_bytes: int) -> Batch:
        """Blocks that lie one behind the other; from the start again where the area ends."""
        places = self._area.nbytes // block_bytes
        starts = [index % places * block_bytes for index in range(count)]
        views = [self._area[start : start + block_bytes] for start in starts]
        return Batch(_new_keys(count), views, [self._address + start for start in starts])

    def _small(self, count: int) -> list[str]:
        """Keys of small blocks that are there."""
        if len(self._known) != count:
            batch = self._make_batch(count, _SMALL_BYTES)
            next(iter(self._store.put_ways().values()))(batch)
            self._known = batch.keys
        return self._known

    def _way(self, operation: str, ways: Mapping[str, WayT], block_bytes: int) -> WayT:
        return ways[self._ways[operation, block_bytes]]

    def _timed_put(self, put: Put, batch: Batch) -> dict[str, Any]:
        self._store.remove(batch.keys)
        return self._timed(lambda: put(batch))

    def _timed_get(self, get: Get, batch: Batch) -> dict[str, Any]:
        self._store.before_get(batch)
        return self._timed(lambda: get(batch))

    def _timed(self, operation: Callable[[], object]) -> dict[str, Any]:
        servers_before_s, client_before_s = self._servers_cpu_s(), time.process_time()
        seconds = _seconds(operation)
        return {
            "seconds": seconds,
            "client_cpu_s": time.process_time() - client_before_s,
            "server_cpu_s": self._servers_cpu_s() - servers_before_s,
        }

    def _servers_cpu_s(self) -> float:
        """CPU seconds of all servers so far (Linux Documentation/scheduler/sched-stats: nanoseconds on a CPU)."""
        tasks = [task for server in self._store.servers for task in Path(f"/proc/{server.pid}/task").iterdir()]
        return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def _require_found(self, keys: Sequence[str]) -> None:
        found = self._store.exists(keys)
        if found != len(keys):
            raise RuntimeError(f"{found} of {len(keys)} keys that were put are there")


def _new_keys(count: int) -> list[str]:
    return [os.urandom(_KEY_BYTES).hex() for _ in range(count)]


def _seconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin
