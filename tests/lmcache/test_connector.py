"""LMCache's remote backend, with its own allocator and keys, over a real control plane and node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from tests.vllm.stack import Stack, running_stack, wait_until

LAYERS, CHUNK_TOKENS, HEADS, HEAD = 4, 16, 2, 64
CHUNK_BYTES = LAYERS * 2 * CHUNK_TOKENS * HEADS * HEAD * 2


class Deployment(NamedTuple):
    """A stack, and the key file of each tenant."""

    stack: Stack
    key_files: dict[str, Path]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with running_stack(has_door=False) as stack:
        sizes = {"block_tokens": CHUNK_TOKENS, "block_bytes": CHUNK_BYTES, "limit_bytes": 64 * CHUNK_BYTES}
        yield Deployment(stack, {tenant: stack.add_tenant(tenant, **sizes) for tenant in ("acme", "bolt")})


class Worker:
    """One LMCache worker's remote backend."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deployment: Deployment, tenant: str, **settings: Any) -> None:
        prefix = "remote_storage_plugin.saltern."
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.05,
            remote_storage_plugins=["saltern"],
            extra_config={
                prefix + "module_path": "saltern.lmcache",
                prefix + "class_name": "SalternAdapter",
                prefix + "control": deployment.stack.control,
                prefix + "namespace": "chat",
                prefix + "api_key_file": str(deployment.key_files[tenant]),
                prefix + "deadline_ms": 20_000,
            },
            **{"pre_caching_hash_algorithm": "sha256_cbor", **settings},
        )
        metadata = LMCacheMetadata(
            model_name="a/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD),
            chunk_size=CHUNK_TOKENS,
        )
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.backend = RemoteBackend(config, metadata, loop, self.memory, dst_device="cpu", plugin_name="saltern")
        assert self.backend.connection is not None, "LMCache goes on without; its log says why"

    def chunk(self, value: float, tokens: int = CHUNK_TOKENS) -> Any:
        memory_obj = self.memory.allocate(torch.Size([2, LAYERS, tokens, HEADS * HEAD]), torch.bfloat16)
        memory_obj.tensor.fill_(value)
        return memory_obj

    def store(self, keys: list[CacheEngineKey], memory_objs: list[Any]) -> None:
        stored = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, memory_objs, on_complete_callback=lambda key: stored.release())
        for _ in keys:
            assert stored.acquire(timeout=60)
        for memory_obj in memory_objs:
            wait_until(lambda memory_obj=memory_obj: memory_obj.get_ref_count() == 1, 60, "LMCache gives it back")
            memory_obj.ref_count_down()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


@contextmanager
def worker(
    loop: asyncio.AbstractEventLoop, deployment: Deployment, tenant: str = "acme", **settings: Any
) -> Iterator[Worker]:
    running = Worker(loop, deployment, tenant, **settings)
    try:
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(running.backend.connection.close(), loop).result(60)


def key(number: int, **changed: Any) -> CacheEngineKey:
    named = {"model_name": "a/model", "world_size": 1, "worker_id": 0, "dtype": torch.bfloat16}
    return CacheEngineKey(**{**named, "chunk_hash": number, **changed})


def test_what_one_worker_stores_another_one_loads(loop: asyncio.AbstractEventLoop, deployment: Deployment) -> None:
    keys = [key(number) for number in (1, 2, 3)]
    with worker(loop, deployment) as first:
        assert first.backend.batched_contains(keys) == 0
        first.store(keys, [first.chunk(number + 0.5) for number in range(3)])
    with worker(loop, deployment) as second:
        assert second.backend.batched_contains([*keys, key(4)]) == 3
        assert second.backend.contains(keys[0]) and not second.backend.contains(key(4))
        loaded = second.backend.batched_get_blocking([*keys, key(4)])
        assert loaded[3] is None
        for number, memory_obj in enumerate(loaded[:3]):
            assert memory_obj.tensor.shape == (2, LAYERS, CHUNK_TOKENS, HEADS * HEAD)
            assert bool((memory_obj.tensor == number + 0.5).all())
            memory_obj.ref_count_down()


def test_a_part_of_a_chunk_comes_back_as_such(loop: asyncio.AbstractEventLoop, deployment: Deployment) -> None:
    with worker(loop, deployment) as both:
        both.store([key(10)], [both.chunk(7.0, tokens=5)])
        loaded = both.backend.get_blocking(key(10))
        assert loaded.tensor.shape == (2, LAYERS, 5, HEADS * HEAD)
        assert bool((loaded.tensor == 7.0).all())
        loaded.ref_count_down()


def test_i1_another_tenant_and_every_field_of_a_key_is_another_chunk(
    loop: asyncio.AbstractEventLoop, deployment: Deployment
) -> None:
    with worker(loop, deployment) as first:
        first.store([key(20)], [first.chunk(1.0)])
        assert first.backend.contains(key(20))
        for other in (
            key(21),
            key(20, model_name="another/model"),
            key(20, world_size=2),
            key(20, worker_id=1),
            key(20, dtype=torch.float16),
            key(20, request_configs={"lmcache.tag.user": "u"}),
        ):
            assert not first.backend.contains(other)
    with worker(loop, deployment, "bolt") as stranger:
        assert not stranger.backend.contains(key(20))
        assert stranger.backend.get_blocking(key(20)) is None


@pytest.mark.parametrize(
    "settings", [{"pre_caching_hash_algorithm": "builtin"}, {"use_layerwise": True}, {"remote_serde": "cachegen"}]
)
def test_a_setting_under_which_chunks_are_not_found_again_is_refused_by_name(
    loop: asyncio.AbstractEventLoop, deployment: Deployment, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1.storage_backend.connector import ConnectorContext

    from saltern.errors import FailedPreconditionError
    from saltern.lmcache import SalternAdapter

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = LMCacheEngineConfig.from_defaults(**{"pre_caching_hash_algorithm": "sha256_cbor", **settings})
    with pytest.raises(FailedPreconditionError, match="no remote storage"):
        SalternAdapter().create_connector(ConnectorContext("plugin://saltern", loop, None, config, None, "saltern"))
