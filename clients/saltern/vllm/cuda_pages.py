"""The engine's cache on a CUDA device: whole blocks through pinned host memory, ordered by events.

Out (storing), on the engine's own stream, so that the next forward pass cannot overtake it::

    forward pass --> gather blocks into a device buffer --> copy entries to pinned memory --> event
                                                                               (the sending thread waits for it)

In (loading), on a stream of its own, behind what the engine had submitted when the step's loads began::

    event of the step --> copy entries to a device buffer --> scatter into the pages --> event (the loader waits)

Gathering costs one kernel for each layer and one copy for each entry, instead of a small copy for each page. The
blocks that are loaded belong to requests that wait for them, so nothing else touches them meanwhile. The staging area
is registered with the device once, so that copies from and to it are asynchronous and nothing is copied twice.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from saltern.errors import FailedPreconditionError
from saltern.transport.memory import RegisteredBuffer, address_of
from saltern.vllm.pages import Copied, Move, Region

#: Device memory for each direction, at least one entry; batches that need more go in pieces.
_DEVICE_BUFFER_BYTES: Final = 64 * 1024 * 1024


class CudaPages:
    """Pages on one CUDA device.

    Args:
        groups: the layers of each group, in the order in which an entry holds them: where each lies, and its tensor.
        device: of the tensors, which must live as long as this.
    """

    in_host_memory: ClassVar[bool] = False

    def __init__(self, groups: Sequence[Sequence[tuple[Region, Any]]], device: Any) -> None:
        self._device = device
        self._layers = [[_rows_of(region, tensor) for region, tensor in layers] for layers in groups]
        self._entry_bytes = tuple(sum(region.page_bytes for region, _ in layers) for layers in groups)
        self._rows_max = max(1, _DEVICE_BUFFER_BYTES // max(self._entry_bytes))
        self._outgoing, self._incoming = self._device_buffer(), self._device_buffer()
        self._loads = torch.cuda.Stream(device)
        self._submitted = torch.cuda.Event()
        self._pinned: list[tuple[int, int, Any]] = []
        self._load_lock = threading.Lock()

    @property
    def entry_bytes(self) -> Sequence[int]:
        return self._entry_bytes

    def pin(self, buffer: RegisteredBuffer) -> None:
        """Register host memory with the device, so that copies from and to it are asynchronous."""
        address, runtime = address_of(buffer.view), torch.cuda.cudart()
        with torch.cuda.device(self._device):
            status = int(runtime.cudaHostRegister(address, buffer.size_bytes, 0))
        if status:
            raise FailedPreconditionError(
                f"cannot pin {buffer.size_bytes} bytes of host memory: CUDA error {status}",
                reason="HOST_MEMORY_NOT_PINNED",
                hint="lower load_staging_bytes and save_staging_bytes, or raise the limit of locked memory (ulimit -l)",
            )
        self._pinned.append((address, buffer.size_bytes, torch.frombuffer(buffer.view, dtype=torch.uint8)))

    def copy_out(self, moves: Sequence[Move]) -> Copied:
        for group, piece in self._pieces(moves):
            ids = torch.tensor([move.block_id for move in piece], device=self._device)
            gathered = self._outgoing[: len(piece), : self._entry_bytes[group]]
            start = 0
            for rows in self._layers[group]:
                end = start + rows.shape[1]
                gathered[:, start:end] = rows.index_select(0, ids)
                start = end
            for move, row in zip(piece, gathered, strict=True):
                self._host(move.address, row.numel()).copy_(row, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return _Copied(copied)

    def begin_loads(self) -> None:
        self._submitted.record(torch.cuda.current_stream(self._device))

    def copy_in(self, moves: Sequence[Move]) -> None:
        with self._load_lock, torch.cuda.device(self._device), torch.cuda.stream(self._loads):
            self._loads.wait_event(self._submitted)
            for group, piece in self._pieces(moves):
                ids = torch.tensor([move.block_id for move in piece], device=self._device)
                arrived = self._incoming[: len(piece), : self._entry_bytes[group]]
                for move, row in zip(piece, arrived, strict=True):
                    row.copy_(self._host(move.address, row.numel()), non_blocking=True)
                start = 0
                for rows in self._layers[group]:
                    end = start + rows.shape[1]
                    rows.index_copy_(0, ids, arrived[:, start:end])
                    start = end
            self._loads.synchronize()

    def close(self) -> None:
        """Wait for copies in flight and let go of the host memory."""
        torch.cuda.synchronize(self._device)
        for address, _, _ in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _pieces(self, moves: Sequence[Move]) -> Iterator[tuple[int, list[Move]]]:
        """The moves of each group, no more at once than the device buffer holds."""
        by_group = sorted(moves, key=lambda move: move.group)
        for group, of_group in itertools.groupby(by_group, key=lambda move: move.group):
            while piece := list(itertools.islice(of_group, self._rows_max)):
                yield group, piece

    def _host(self, address: int, size_bytes: int) -> Any:
        for start, length, tensor in self._pinned:
            offset = address - start
            if 0 <= offset <= length - size_bytes:
                return tensor[offset : offset + size_bytes]
        raise AssertionError("an entry outside the pinned staging areas")

    def _device_buffer(self) -> Any:
        return torch.empty((self._rows_max, max(self._entry_bytes)), dtype=torch.uint8, device=self._device)


class _Copied:
    """Entries on their way to host memory."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def with_tensors(regions: Sequence[Region], names: Sequence[str], kv_caches: Mapping[str, Any]) -> list[Any]:
    """Each region with the tensor of its layer; regions are in the order of the layers' names."""
    return list(zip(regions, (kv_caches[name] for name in sorted(names)), strict=True))


def _rows_of(region: Region, tensor: Any) -> Any:
    """A layer's cache as bytes: one row for each block."""
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    shape, strides = (region.blocks, region.page_bytes), (region.stride_bytes, 1)
    return rows.set_(tensor.untyped_storage(), offset_bytes, shape, strides)
