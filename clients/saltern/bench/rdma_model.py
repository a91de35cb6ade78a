"""What of a device's bandwidth a put or get can reach by design, from costs that were measured apart.

One session has one chain of work requests under way, and the node does its own work between two chains. So the node's
time for a batch is what the device takes for the bytes, plus a cost for each block, plus, for a put, the sum over its
own copy, which is taken before anything is published (I7). Meanwhile the client sums what it sends next or got before.
The slower of both sets the pace::

    node   = bytes / device + blocks * block cost + (put: bytes / sum rate)
    client = bytes / sum rate
    expected ratio to the device = (bytes / device) / max(node, client)

Several sessions take turns at the device and fill each other's gaps: this is one session's share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Of this machine, without the device.

    Attributes:
        sum_gb_per_s: how fast one thread takes checksums of entries in memory.
        block_s: what a block costs whatever its length, by operation (``put``, ``get``) and length: calls of as many
            blocks of nearly no bytes as one frame holds of that length, and so with the round trip of the frame, which
            longer batches hide in part.
    """

    sum_gb_per_s: float
    block_s: dict[tuple[str, int], float]

    def expected_ratio(self, operation: str, device_gb_per_s: float, block_bytes: int) -> float:
        """Share of ``device_gb_per_s`` that blocks of this size can reach in one session; above 0, at most 1."""
        block_gb = block_bytes / 1e9
        on_the_wire_s, summed_s = block_gb / device_gb_per_s, block_gb / self.sum_gb_per_s
        node_s = on_the_wire_s + self.block_s[operation, block_bytes] + (summed_s if operation == "put" else 0.0)
        return on_the_wire_s / max(node_s, summed_s)
