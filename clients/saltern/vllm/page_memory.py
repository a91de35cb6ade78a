"""Pages of the engine's cache tensors, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saltern.errors import FailedPreconditionError
from saltern.vllm.pages import HostPages, Pages
from saltern.vllm.tensors import regions_of


def pages_of(groups: Sequence[Sequence[str]], kv_caches: Mapping[str, Any], blocks: int) -> Pages:
    """The pages of this rank's layers.

    Args:
        groups: names of the layers of each KV cache group.
        kv_caches: the engine's tensors by layer; they must live as long as the pages are used.
        blocks: how many the engine manages.

    Raises:
        FailedPreconditionError: they lie in memory in a way, or on a device, that is not supported.
    """
    devices = {tensor.device.type for tensor in kv_caches.values()}
    regions = [regions_of(names, kv_caches, blocks) for names in groups]
    if not all(regions):
        raise _unsupported("this rank holds no layer of one of the KV cache groups")
    if devices == {"cpu"}:
        return HostPages(regions)
    if devices == {"cuda"}:
        from saltern.vllm.cuda_pages import CudaPages, with_tensors

        layers = [with_tensors(found, names, kv_caches) for found, names in zip(regions, groups, strict=True)]
        return CudaPages(layers, next(iter(kv_caches.values())).device)
    raise _unsupported(f"the cache is on {' and '.join(sorted(devices))}")


def _unsupported(what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"no remote cache on this rank: {what}",
        reason="ENGINE_NOT_SUPPORTED",
        hint="the cache tensors must be in host memory or on CUDA devices, with layers of every group on every rank",
    )
