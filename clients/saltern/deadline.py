"""One budget of time for one call: connecting, token, transfer and retries all draw on it (I10)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from saltern.errors import DeadlineExceededError


class Deadline:
    """A point in monotonic time after which a call has no more time; can be cancelled from another thread.

    Args:
        timeout_ms: milliseconds from now; zero or less has expired already.
    """

    __slots__ = ("_cancelled", "_end_s", "_on_cancel", "_shares", "timeout_ms")

    def __init__(self, timeout_ms: float) -> None:
        self.timeout_ms = timeout_ms
        self._end_s = time.monotonic() + timeout_ms / 1000
        self._cancelled = False
        self._on_cancel: Callable[[], None] | None = None
        self._shares: list[Deadline] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def expired(self) -> bool:
        return self._cancelled or time.monotonic() >= self._end_s

    def remaining_s(self) -> float:
        """Seconds left, above zero; raises DeadlineExceededError when there are none."""
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0 or self._cancelled:
            raise self.error()
        return remaining_s

    def error(self) -> DeadlineExceededError:
        if self._cancelled:
            return DeadlineExceededError("the call was cancelled", reason="CANCELLED")
        return DeadlineExceededError(
            f"the node did not answer within {self.timeout_ms:g} ms",
            hint="go on without the cache, or give a longer deadline_ms",
            metadata={"deadline_ms": f"{self.timeout_ms:g}"},
        )

    def cancel(self) -> None:
        """End the call now, from another thread: whatever it waits for is interrupted."""
        self._cancelled = True
        interrupt = self._on_cancel
        if interrupt is not None:
            interrupt()
        for share in list(self._shares):
            share.cancel()

    def share(self, part: float = 1.0) -> Deadline:
        """A deadline for a piece of the call: another thread's, or one that leaves time for something else.

        Args:
            part: of the time that is left, up to 1. With none left it has expired already.

        Returns:
            A deadline that is cancelled with this one.
        """
        piece = Deadline(max(self._end_s - time.monotonic(), 0.0) * 1000 * part)
        self._shares.append(piece)
        if self._cancelled:
            piece.cancel()
        return piece

    def on_cancel(self, interrupt: Callable[[], None] | None) -> None:
        """Set what ``cancel`` calls to interrupt the wait in progress; at once if it was called already."""
        self._on_cancel = interrupt
        if self._cancelled and interrupt is not None:
            interrupt()


#: Milliseconds for the call, a deadline that runs already, or None for the client's default.
DeadlineMs: TypeAlias = float | Deadline | None
