"""The engine's cache in memory: where the pages of a block are, and how whole blocks are copied.

The interior of a page is the kernels' affair (on CPU keys are packed for the instruction set), so a page is copied
whole, as bytes, from and to where it lies: nothing here looks inside, and no tensor is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from saltern.transport.memory import RegisteredBuffer


class Region(NamedTuple):
    """The pages of one layer, block by block.

    Attributes:
        address: of block 0.
        stride_bytes: from one block to the next.
        page_bytes: of each block.
        blocks: how many there are.
    """

    address: int
    stride_bytes: int
    page_bytes: int
    blocks: int


class Move(NamedTuple):
    """One block of one group, and the memory that its entry is copied to or from."""

    group: int
    block_id: int
    address: int


class Pages(Protocol):
    """The pages of one worker.

    Attributes:
        in_host_memory: whether any host memory will do to copy from; else only what was pinned is quick.
    """

    in_host_memory: ClassVar[bool]

    @property
    def entry_bytes(self) -> Sequence[int]:
        """Bytes of one block in each group: all layers that this rank has."""

    def pin(self, buffer: RegisteredBuffer) -> None:
        """Make ready to copy from and to this memory."""

    def copy_out(self, moves: Sequence[Move]) -> Copied:
        """Begin to copy blocks out, as they are after all work that was submitted so far.

        When it returns the engine may overwrite them; the bytes are there after ``Copied.wait``.
        """

    def begin_loads(self) -> None:
        """Order the loads of this step behind what was submitted so far. On the engine's thread."""

    def copy_in(self, moves: Sequence[Move]) -> None:
        """Copy blocks in; they are there when it returns. On any thread."""

    def close(self) -> None:
        """Let go of memory and streams."""


class Copied(Protocol):
    """Blocks on their way out."""

    def wait(self) -> None:
        """Return when the bytes are there."""


class _AtOnce:
    def wait(self) -> None:
        """They are there already."""


_AT_ONCE = _AtOnce()


class HostPages:
    """Pages in this process's memory.

    Args:
        groups: the layers of each group, in the order in which an entry holds them.
    """

    in_host_memory: ClassVar[bool] = True

    def __init__(self, groups: Sequence[Sequence[Region]]) -> None:
        self._groups = [list(regions) for regions in groups]
        self._entry_bytes = tuple(sum(region.page_bytes for region in regions) for regions in groups)

    @property
    def entry_bytes(self) -> Sequence[int]:
        return self._entry_bytes

    def pin(self, buffer: RegisteredBuffer) -> None:
        """Host memory needs nothing."""

    def copy_out(self, moves: Sequence[Move]) -> Copied:
        memmove = ctypes.memmove  # leaves the GIL to others while it copies
        for group, block_id, address in moves:
            to = address
            for region in self._groups[group]:
                memmove(to, _page(region, block_id), region.page_bytes)
                to += region.page_bytes
        return _AT_ONCE

    def begin_loads(self) -> None:
        """Nothing is in flight: the engine's work is done when its calls return."""

    def copy_in(self, moves: Sequence[Move]) -> None:
        memmove = ctypes.memmove
        for group, block_id, address in moves:
            source = address
            for region in self._groups[group]:
                memmove(_page(region, block_id), source, region.page_bytes)
                source += region.page_bytes

    def close(self) -> None:
        """The memory is the engine's."""


def _page(region: Region, block_id: int) -> int:
    # A wrong address would write over somebody's memory: this check stays on.
    assert 0 < block_id < region.blocks, f"no block {block_id} in {region.blocks}"
    return region.address + block_id * region.stride_bytes
