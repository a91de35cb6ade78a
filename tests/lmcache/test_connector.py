"""LMCache's remote backend, with its own allocator and keys, over a real control plane and node."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from saltern.admin_client import read_api_key
from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError
from saltern.lmcache import SalternAdapter
from saltern.results import Stored
from tests.vllm.stack import Stack, running_stack, wait_until

LAYERS, CHUNK_TOKENS, HEADS, HEAD = 4, 16, 2, 64
CHUNK_BYTES = LAYERS * 2 * CHUNK_TOKENS * HEADS * HEAD * 2
#: Chunks of a worker's memory.
ROOM_CHUNKS = 64
_PREFIX = "remote_storage_plugin.saltern."


class Deployment(NamedTuple):
    """A stack, and the key file of each tenant."""

    stack: Stack
    key_files: dict[str, Path]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with running_stack(has_door=False) as stack:
        sizes = {"block_tokens": CHUNK_TOKENS, "block_bytes": CHUNK_BYTES, "limit_bytes": 64 * CHUNK_BYTES}
        yield Deployment(stack, {tenant: stack.add_tenant(tenant, **sizes) for tenant in ("acme", "bolt", "gone")})


class Worker:
    """One LMCache worker's remote backend."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deployment: Deployment, tenant: str, **options: Any) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=ROOM_CHUNKS * CHUNK_BYTES / 2**30,
            remote_storage_plugins=["saltern"],
            pre_caching_hash_algorithm="sha256_cbor",
            extra_config=extra_config(
                control=deployment.stack.control,
                namespace="chat",
                api_key_file=str(deployment.key_files[tenant]),
                **{"deadline_ms": 20_000, "lookup_deadline_ms": 20_000, **options},
            ),
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
        self.connector = self.backend.connection.getWrappedConnector()

    def free_chunks(self) -> int:
        """How many chunks there is room for."""
        taken = []
        shape = torch.Size([2, LAYERS, CHUNK_TOKENS, HEADS * HEAD])
        while (memory_obj := self.memory.allocate(shape, torch.bfloat16, busy_loop=False)) is not None:
            taken.append(memory_obj)
        for memory_obj in taken:
            memory_obj.ref_count_down()
        return len(taken)

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


def extra_config(**options: Any) -> dict[str, Any]:
    """LMCache's ``extra_config`` with these options of the plug-in."""
    named = {"module_path": "saltern.lmcache", "class_name": "SalternAdapter", **options}
    return {_PREFIX + name: value for name, value in named.items()}


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
    loop: asyncio.AbstractEventLoop, deployment: Deployment, tenant: str = "acme", **options: Any
) -> Iterator[Worker]:
    running = Worker(loop, deployment, tenant, **options)
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


def test_i7_what_is_damaged_or_of_another_length_is_a_miss(
    loop: asyncio.AbstractEventLoop, deployment: Deployment
) -> None:
    keys = [key(number) for number in (30, 31, 32)]
    with worker(loop, deployment) as reader, deployment.stack.client(deployment.key_files["acme"]) as spoiler:
        reader.store(keys[::2], [reader.chunk(1.0), reader.chunk(2.0)])
        odd, *_ = reader.connector._keys(keys[1:2])
        assert spoiler.put_many([(odd, b"x" * 1001)]) == [Stored()]
        free_chunks = reader.free_chunks()
        first, middle, last = reader.backend.batched_get_blocking(keys)
        assert middle is None
        for memory_obj, value in ((first, 1.0), (last, 2.0)):
            assert bool((memory_obj.tensor == value).all())
            memory_obj.ref_count_down()
        # Up to the first that is not there, and the rest of the memory given back.
        found = asyncio.run_coroutine_threadsafe(reader.backend.batched_get_non_blocking("lookup", keys), loop).result(
            60
        )
        assert len(found) == 1
        found[0].ref_count_down()
        assert reader.free_chunks() == free_chunks


def test_more_than_there_is_room_for_is_a_miss_and_not_waited_for(
    loop: asyncio.AbstractEventLoop, deployment: Deployment
) -> None:
    with worker(loop, deployment) as both:
        both.store([key(40), key(41)], [both.chunk(1.0), both.chunk(2.0)])
        free_chunks = both.free_chunks()
        held = [both.chunk(0.0) for _ in range(free_chunks - 1)]
        first, second = both.backend.batched_get_blocking([key(40), key(41)])
        assert bool((first.tensor == 1.0).all())
        assert second is None
        for memory_obj in [first, *held]:
            memory_obj.ref_count_down()
        assert both.free_chunks() == free_chunks


def test_workers_threads_get_their_own_chunks_each(loop: asyncio.AbstractEventLoop, deployment: Deployment) -> None:
    numbers = range(50, 58)
    with worker(loop, deployment) as both, ThreadPoolExecutor(len(numbers)) as threads:

        def turn(number: int) -> None:
            both.store([key(number)], [both.chunk(float(number))])
            for _ in range(5):
                assert both.backend.batched_contains([key(number), key(1000 + number)]) == 1
                loaded = both.backend.get_blocking(key(number))
                assert bool((loaded.tensor == number).all())
                loaded.ref_count_down()

        for outcome in [threads.submit(turn, number) for number in numbers]:
            outcome.result()


def test_a_chunk_that_was_removed_is_gone(loop: asyncio.AbstractEventLoop, deployment: Deployment) -> None:
    with worker(loop, deployment) as both:
        both.store([key(60)], [both.chunk(1.0)])
        assert both.backend.remove(key(60))
        assert not both.backend.contains(key(60))
        assert not both.backend.remove(key(60))


def test_i10_a_caller_that_is_cancelled_leaves_no_memory_behind_and_none_in_use(
    loop: asyncio.AbstractEventLoop, deployment: Deployment
) -> None:
    with worker(loop, deployment) as both:
        both.store([key(70)], [both.chunk(1.0)])
        free_chunks = both.free_chunks()
        sent = both.chunk(2.0)
        with deployment.stack.node.paused():
            reading = asyncio.run_coroutine_threadsafe(both.connector.batched_get([key(70)]), loop)
            writing = asyncio.run_coroutine_threadsafe(both.connector.batched_put([key(71)], [sent]), loop)
            wait_until(lambda: sent.get_ref_count() == 2, 60, "the put has begun")
            reading.cancel()
            writing.cancel()
            wait_until(lambda: reading.done() and writing.done(), 60, "both are cancelled")
            assert sent.get_ref_count() == 2, "memory that is being sent from may be used for something else"
        wait_until(lambda: sent.get_ref_count() == 1, 60, "the put is over")
        sent.ref_count_down()
        wait_until(lambda: both.free_chunks() == free_chunks, 60, "what was read for nobody is given back")


def test_i10_a_node_that_dies_or_stands_still_is_a_miss_and_is_used_again(
    loop: asyncio.AbstractEventLoop, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    node = deployment.stack.node
    with worker(loop, deployment, deadline_ms=300, lookup_deadline_ms=300) as both:
        both.store([key(80)], [both.chunk(1.0)])
        wait_until(lambda: both.backend.contains(key(80)), 60, "a busy machine has stored it")
        free_chunks = both.free_chunks()

        def nothing_works() -> None:
            assert both.backend.batched_contains([key(80)]) == 0
            assert not both.backend.contains(key(80))
            assert both.backend.batched_get_blocking([key(80), key(81)]) == [None, None]
            both.store([key(82)], [both.chunk(2.0)])
            assert both.free_chunks() == free_chunks

        with node.paused():
            nothing_works()
        wait_until(lambda: both.backend.contains(key(80)), 60, "the node is asked again")
        node.kill()
        nothing_works()
        node.start()

        def works() -> bool:
            both.store([key(83)], [both.chunk(3.0)])
            return both.backend.contains(key(83))

        wait_until(works, 60, "the node is used again")
    told = [record.getMessage() for record in caplog.records if record.name == "saltern.lmcache"]
    assert any(message.startswith("lookup not made") for message in told)
    assert len(told) <= 10, "one line for each reason, not for each call"


def test_i10_after_the_key_is_revoked_and_after_the_end_everything_is_a_miss(
    loop: asyncio.AbstractEventLoop, deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    secret = read_api_key(deployment.key_files["gone"]).reveal()
    with caplog.at_level(logging.DEBUG), worker(loop, deployment, "gone") as both:
        both.store([key(90)], [both.chunk(1.0)])
        assert both.backend.contains(key(90))
        deployment.stack.revoke_key("gone")
        wait_until(lambda: not both.backend.contains(key(90)), 60, "the revocation is felt")
        assert both.backend.get_blocking(key(90)) is None
        both.store([key(91)], [both.chunk(1.0)])
        asyncio.run_coroutine_threadsafe(both.backend.connection.close(), loop).result(60)
        assert both.backend.batched_contains([key(90)]) == 0
        assert not both.backend.contains(key(90))
        assert both.backend.batched_get_blocking([key(90)]) == [None]
        both.store([key(92)], [both.chunk(1.0)])
        assert secret not in repr(both.connector) + repr(vars(both.connector))
    assert secret not in caplog.text
    assert secret.rsplit("-", 1)[1] not in caplog.text


def _refusal(loop: asyncio.AbstractEventLoop, options: dict[str, Any], **settings: Any) -> SalternError:
    settings = {"pre_caching_hash_algorithm": "sha256_cbor", **settings}
    config = LMCacheEngineConfig.from_defaults(extra_config=extra_config(**options), **settings)
    with pytest.raises(SalternError) as refused:
        SalternAdapter().create_connector(ConnectorContext("plugin://saltern", loop, None, config, None, "saltern"))
    return refused.value


@pytest.mark.parametrize(
    "settings",
    [
        {"pre_caching_hash_algorithm": "builtin"},
        {"pre_caching_hash_algorithm": "sha256"},
        {"use_layerwise": True},
        {"remote_serde": "cachegen"},
    ],
)
@pytest.mark.parametrize("hash_seed", ["", "0"])
def test_a_setting_under_which_chunks_are_not_found_again_is_refused_by_name(
    loop: asyncio.AbstractEventLoop, settings: dict[str, Any], hash_seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
    error = _refusal(loop, {}, **settings)
    assert isinstance(error, FailedPreconditionError)
    assert error.reason == "LMCACHE_SETTING_NOT_SUPPORTED"


@pytest.mark.parametrize("name", ["deadline_ms", "lookup_deadline_ms"])
@pytest.mark.parametrize("value", ["soon", 0, -1, "inf", "nan", [1]])
def test_a_deadline_that_makes_no_sense_is_refused_by_name(
    loop: asyncio.AbstractEventLoop, name: str, value: object
) -> None:
    error = _refusal(loop, {"api_key_file": "/nowhere", name: value})
    assert isinstance(error, InvalidArgumentError)
    assert f"saltern.{name}" in str(error)


def test_an_option_that_is_given_wins_over_the_environment(
    loop: asyncio.AbstractEventLoop, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_API_KEY", read_api_key(deployment.key_files["bolt"]).reveal())
    monkeypatch.setenv("SALTERN_NAMESPACE", "another")
    with worker(loop, deployment, "acme") as one:
        assert one.connector._client.tenant == "acme"
        assert one.connector._client.namespace == "chat"
    monkeypatch.delenv("SALTERN_API_KEY")
    assert _refusal(loop, {}).reason == "LMCACHE_OPTION_MISSING"
