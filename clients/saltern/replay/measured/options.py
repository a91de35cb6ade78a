"""How a replay is measured: what stands for a block, how many calls are in flight, how fast time runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from saltern.demo.plan import available_bytes
from saltern.errors import InvalidArgumentError, ResourceExhaustedError
from saltern.replay.room import Room, rounded_up
from saltern.sizes import format_size

BLOCK_BYTES_DEFAULT: Final = 64 * 1024
IN_FLIGHT_DEFAULT: Final = 8
#: The least that a node takes as its memory.
_NODE_MIN_BYTES: Final = 2**20
#: Of the memory that is free, for the nodes; they take it as they start.
_MEMORY_PART: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOptions:
    """Beside the setup, which holds for every engine.

    Attributes:
        block_bytes: that are moved and kept for one block; the model's own if that is less.
        in_flight: calls at once, each of a whole prompt; 1 for one after the other.
        speed: seconds of traffic in one second of ours; None for as fast as calls are answered.
        transport: as :class:`saltern.Client` takes it.
    """

    block_bytes: int = BLOCK_BYTES_DEFAULT
    in_flight: int = IN_FLIGHT_DEFAULT
    speed: float | None = None
    transport: str = "auto"


@dataclass(frozen=True, slots=True)
class Scale:
    """Blocks as they are measured: as many on each node as the setup says, of another size.

    Attributes:
        block_bytes: of one block's payload.
        charged_bytes: what a node takes for it.
        bytes_scale: bytes of the model's own block for each byte of it.
        dram_bytes: of each node.
    """

    block_bytes: int
    charged_bytes: int
    bytes_scale: float
    dram_bytes: int

    @classmethod
    def of(cls, room: Room, block_bytes: int) -> Scale:
        """Checked against this machine.

        Raises:
            InvalidArgumentError: INVALID_REPLAY: a node would have less memory than it can be started with.
            ResourceExhaustedError: NOT_ENOUGH_MEMORY.
        """
        size_bytes = min(block_bytes, room.block_bytes)
        charged_bytes = rounded_up(size_bytes)
        dram_bytes = room.node_blocks * charged_bytes
        if dram_bytes < _NODE_MIN_BYTES:
            raise InvalidArgumentError(
                f"a node of {room.node_blocks} blocks of {format_size(charged_bytes)} has {format_size(dram_bytes)}, "
                f"and none can be started with less than {format_size(_NODE_MIN_BYTES)}",
                reason="INVALID_REPLAY",
                hint="choose larger blocks (--block-bytes), or more memory for each node (--node-memory)",
            )
        wanted_bytes, free_bytes = dram_bytes * room.nodes, int(available_bytes() * _MEMORY_PART)
        if wanted_bytes > free_bytes:
            fits_bytes = free_bytes // (room.node_blocks * room.nodes)
            raise ResourceExhaustedError(
                f"{room.nodes} nodes of {room.node_blocks:,} blocks of {format_size(charged_bytes)} take "
                f"{format_size(wanted_bytes)}, and {format_size(free_bytes)} may be taken here (half of what is free)",
                reason="NOT_ENOUGH_MEMORY",
                hint=f"scale blocks down (--block-bytes, at most {max(1, fits_bytes)} here), or replay fewer or "
                "smaller nodes (--nodes, --node-memory)",
            )
        return cls(size_bytes, charged_bytes, room.block_bytes / size_bytes, dram_bytes)
