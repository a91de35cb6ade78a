"""What only a measured replay can say of a column: seconds of CPUs and clocks, and what failed."""

from __future__ import annotations

import msgspec


class Measures(msgspec.Struct, rename="camel", kw_only=True):
    """Of one column that was served by real nodes.

    Attributes:
        wall_s: that driving took, without starting and stopping nodes.
        node_cpu_s: of all node processes together meanwhile.
        block_bytes: that stood for one block; what is charged to a tenant for it is that in whole granules.
        bytes_scale: bytes of the model's own block for each of these.
        read_calls, write_calls: prompts that were read from nodes, and stored there; each is one batch.
        failed_blocks: of reads and writes that a node or the network did not answer; each was a miss or was not stored.
        wrong_blocks: whose bytes were not those that had been stored; there is no reason for any.
        restart_s: from the first SIGTERM until every client reached every node again, the time away not counted; None
            where nothing was restarted.
        detection_s: from kill -9 until no client was sent to the node any more; None where none was killed, or traffic
            went on meanwhile.
    """

    wall_s: float = 0.0
    node_cpu_s: float = 0.0
    block_bytes: int = 0
    bytes_scale: float = 1.0
    read_calls: int = 0
    write_calls: int = 0
    failed_blocks: int = 0
    wrong_blocks: int = 0
    restart_s: float | None = None
    detection_s: float | None = None

    def driver_share(self, driver_cpu_s: float) -> float | None:
        """Of the CPU seconds of driver and nodes together."""
        all_s = driver_cpu_s + self.node_cpu_s
        return driver_cpu_s / all_s if all_s else None

    def driver_busy(self, driver_cpu_s: float) -> float | None:
        """Of the time: near 1 the driver has no more to give, and its own speed is what is measured."""
        return driver_cpu_s / self.wall_s if self.wall_s else None
