"""What only a measured replay can say of a column: seconds of CPUs and clocks, and what failed."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Limit(StrEnum):
    """Whose CPU a measured replay waits for first."""

    NODES = "nodes"  #: each of them took more of it than the driver
    TOGETHER = "nodes, where they share CPUs"  #: all of them together did, and each less
    DRIVER = "driver"  #: it took more than all nodes: its own speed is what was measured


class Measures(msgspec.Struct, rename="camel", kw_only=True):
    """Of one column that was served by real nodes.

    Attributes:
        wall_s: that driving took, without starting and stopping nodes.
        node_cpu_s: of all node processes together meanwhile.
        nodes: how many there were.
        block_bytes: that stood for one block; what is charged to a tenant for it is that in whole granules.
        bytes_scale: bytes of the model's own block for each of these.
        read_calls, write_calls: prompts that were read from nodes, and stored there; each is one batch.
        failed_blocks: of reads and writes that a node or the network did not answer; each was a miss or was not stored.
        wrong_blocks: whose bytes were not those that had been stored; there is no reason for any.
        unfinished_calls: that were in flight when a column which was cut short was closed: neither they nor their bytes
            are counted, though nodes may have counted some.
        restart_s: from the first SIGTERM until every client reached every node again, the time away not counted; None
            where nothing was restarted.
        detection_s: from kill -9 until no client was sent to the node any more; None where none was killed, or traffic
            went on meanwhile.
    """

    wall_s: float = 0.0
    node_cpu_s: float = 0.0
    nodes: int = 0
    block_bytes: int = 0
    bytes_scale: float = 1.0
    read_calls: int = 0
    write_calls: int = 0
    failed_blocks: int = 0
    wrong_blocks: int = 0
    unfinished_calls: int = 0
    restart_s: float | None = None
    detection_s: float | None = None

    def driver_share(self, driver_cpu_s: float) -> float | None:
        """Of the CPU seconds of driver and nodes together."""
        all_s = driver_cpu_s + self.node_cpu_s
        return driver_cpu_s / all_s if all_s else None

    def limit(self, driver_cpu_s: float) -> Limit | None:
        """What would end a faster run first, by CPU seconds; None without nodes.

        With a CPU for each process it is whoever took most, the driver or a node; on fewer, such as nodes that share a
        machine, it is what nodes took together.
        """
        if not self.nodes:
            return None
        if driver_cpu_s >= self.node_cpu_s:
            return Limit.DRIVER
        return Limit.NODES if self.node_cpu_s / self.nodes > driver_cpu_s else Limit.TOGETHER

    def driver_busy(self, driver_cpu_s: float) -> float | None:
        """Of the time: near 1 the driver has no more to give, and its own speed is what is measured."""
        return driver_cpu_s / self.wall_s if self.wall_s else None
