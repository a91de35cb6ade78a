"""A store of objects in this process, for the engine that keeps records in one; tests read and spoil it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

from dataplane.io.engines.objects import OBJECT_MAX_BYTES, Fetched


class MemoryObjects:
    """Implements :class:`dataplane.io.engines.objects.ObjectStore`.

    Attributes:
        objects: by name; a test may change what it likes, as whoever reaches a real store may.
        is_reachable: while False every call fails.
        room_bytes: a put that would go beyond fails, and leaves what fitted.
        failing: names whose holder does not answer.
    """

    def __init__(self, room_bytes: int = 1 << 40) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_reachable = True
        self.room_bytes = room_bytes
        self.failing: set[str] = set()
        self.is_closed = False
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.objects.values()))

    def check(self) -> None:
        if not self.is_reachable:
            raise OSError(errno.EHOSTUNREACH, "the store cannot be reached")

    def put(self, objects: Sequence[tuple[str, memoryview]]) -> None:
        self.check()
        with self._lock:
            for name, data in objects:
                assert 0 < len(data) <= OBJECT_MAX_BYTES
                if self.used_bytes + len(data) > self.room_bytes:
                    raise OSError(errno.ENOSPC, "the store is full")
                self.objects.setdefault(name, bytes(data))  # as Mooncake does: who comes first

    def get(self, objects: Sequence[tuple[str, Sequence[memoryview]]]) -> list[Fetched]:
        self.check()
        with self._lock:
            return [self._get(name, views) for name, views in objects]

    def _get(self, name: str, views: Sequence[memoryview]) -> Fetched:
        data = self.objects.get(name)
        if name in self.failing:
            return Fetched.FAILED
        if data is None:
            return Fetched.GONE
        if len(data) != sum(map(len, views)):
            return Fetched.RESIZED
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        return Fetched.WHOLE

    def remove(self, names: Sequence[str]) -> None:
        self.check()
        with self._lock:
            for name in names:
                self.objects.pop(name, None)

    def remove_below(self, folder: str) -> None:
        self.check()
        with self._lock:
            for name in [name for name in self.objects if name.startswith(f"{folder}/")]:
                del self.objects[name]

    def close(self) -> None:
        self.is_closed = True
