"""What carries bytes one batch after the other: one direction of a node's network link, or of its SSD."""

from __future__ import annotations


class Link:
    """Batches one after the other, at a fixed rate.

    Attributes:
        free_s: when the last byte of all that was put on it arrives.
        busy_s: how long it has carried.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.busy_s = 0.0
        self.moved_bytes = 0

    def carry(self, size_bytes: int, now_s: float) -> float:
        """Put a batch on the link at ``now_s``; returns when its last byte has arrived."""
        takes_s = size_bytes / self._bytes_per_s
        self.free_s = max(self.free_s, now_s) + takes_s
        self.busy_s += takes_s
        self.moved_bytes += size_bytes
        return self.free_s
