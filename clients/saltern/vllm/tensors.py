"""Where the pages of vLLM's cache tensors lie in memory. Imports nothing: tensors are asked by their own methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saltern.errors import FailedPreconditionError
from saltern.vllm.pages import Region


def regions_of(layer_names: Sequence[str], kv_caches: Mapping[str, Any], blocks: int) -> list[Region]:
    """The pages of a group's layers, in the order of the layers' names.

    Args:
        kv_caches: a tensor for each layer, with blocks (or the kernel blocks that make them up) as first dimension.
        blocks: how many the engine manages.

    Raises:
        FailedPreconditionError: a block's page is not one piece of memory.
    """
    return [_region_of(name, kv_caches[name], blocks) for name in sorted(layer_names)]


def _region_of(name: str, tensor: Any, blocks: int) -> Region:
    rows, item_bytes = tensor.shape[0], tensor.element_size()
    inner = sorted(
        (stride, size) for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True) if size > 1
    )
    dense = 1
    for stride, size in inner:
        if stride != dense:
            raise _scattered(name, tensor)
        dense *= size
    per_block, rest = divmod(rows, blocks)
    row_bytes = tensor.stride(0) * item_bytes
    # Kernel blocks that make up one block must follow each other without a gap.
    if rest or (per_block > 1 and row_bytes != dense * item_bytes):
        raise _scattered(name, tensor)
    return Region(tensor.data_ptr(), row_bytes * per_block, dense * item_bytes * per_block, blocks)


def _scattered(name: str, tensor: Any) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the pages of layer {name!r} are not whole in memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}",
        reason="LAYOUT_NOT_SUPPORTED",
        hint="set VLLM_KV_CACHE_LAYOUT to a layout that keeps a block's page together, such as LBNHC",
    )
