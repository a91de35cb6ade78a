"""vLLM's own scheduler with a connector and no model: milliseconds for a case that an engine would take seconds for."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import tests.vllm.engine  # noqa: F401  # says first how vLLM is to run
from saltern.keys import BlockHash
from saltern.results import Hit
from saltern.transport.memory import address_of
from saltern.vllm.connector import SalternConnector
from saltern.vllm.page_memory import pages_of
from saltern.vllm.pages import Move
from tests.vllm.deployment import chains_recorded
from tests.vllm.models import model_path

BLOCK_TOKENS = 32
_LAYERS, _KV_HEADS, _HEAD = 8, 8, 128
_CONTEXT_TOKENS = 65536
#: What vLLM's engine core sleeps after a step in which there was nothing to compute, so that transfers get on.
_IDLE_STEP_S = 0.001


class Took(NamedTuple):
    """Seconds: on the clock, of the scheduler's own thread, and of all threads of the process."""

    wall_s: float
    thread_s: float
    process_s: float


class BareScheduler:
    """A scheduler whose steps compute nothing.

    Args:
        connector: None for none.
        blocks: of its pool.
    """

    def __init__(self, connector: KVTransferConfig | None, blocks: int) -> None:
        model = ModelConfig(
            model=str(model_path("llama")),
            dtype="bfloat16",
            seed=0,
            max_model_len=_CONTEXT_TOKENS,
            hf_overrides={"max_position_embeddings": _CONTEXT_TOKENS},
        )
        self.config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=_CONTEXT_TOKENS,
                max_model_len=_CONTEXT_TOKENS,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK_TOKENS, enable_prefix_caching=True, prefix_caching_hash_algo="sha256_cbor"
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=connector,
        )
        self.config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=_KV_HEADS, head_size=_HEAD, dtype=torch.bfloat16)
        layers = [f"layer.{number}" for number in range(_LAYERS)]
        self.kv_cache_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)]
        )
        self.page_bytes = spec.page_size_bytes
        init_none_hash(sha256_cbor)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
        )

    def request(self, name: str, tokens: list[int]) -> Request:
        """A request for one token, whose block hashes are computed here as an engine's input processor does."""
        sampling = vllm.SamplingParams(max_tokens=1, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        return Request(name, tokens, sampling, None, cache_salt="bench", block_hasher=hasher)

    def one_request(self, seed: int, blocks: int) -> Took:
        """Schedule a request of so many blocks, finish it; returns what it took until it was scheduled."""
        name = f"request-{seed}"
        request = self.request(name, _tokens(seed, blocks))
        self.scheduler.reset_prefix_cache()
        started_s, thread_started_s, process_started_s = time.perf_counter(), time.thread_time(), time.process_time()
        self.scheduler.add_request(request)
        output = self.scheduler.schedule()
        while not output.num_scheduled_tokens:
            output = self.scheduler.schedule()
        took = Took(
            time.perf_counter() - started_s,
            time.thread_time() - thread_started_s,
            time.process_time() - process_started_s,
        )
        self.finish(name, output)
        return took

    def bare_lookup(self, seed: int, blocks: int) -> Took:
        """What the same question takes by the SDK alone, in one thread: keys, round trip, answer; of other entries."""
        connector = self.scheduler.connector
        client = connector._tenancy.client(connector._tenancy.ticket)
        hashes = [BlockHash(sha256(b"%d %d" % (seed, index)).digest() * 2) for index in range(blocks)]
        started_s, thread_started_s, process_started_s = time.perf_counter(), time.thread_time(), time.process_time()
        answer = client.chain(hashes).lookup(deadline_ms=20_000)
        took = Took(
            time.perf_counter() - started_s,
            time.thread_time() - thread_started_s,
            time.process_time() - process_started_s,
        )
        assert answer.error is None
        return took

    def finish(self, name: str, output: SchedulerOutput, connector_output: KVConnectorOutput | None = None) -> None:
        self.scheduler.update_from_output(output, _sampled(output, connector_output))
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()


class BareEngine:
    """The scheduler above with a worker's connector beside it, over tensors that no model computes."""

    def __init__(self, connector: KVTransferConfig, blocks: int) -> None:
        self.bare = BareScheduler(connector, blocks)
        page = self.bare.page_bytes
        self.entry_bytes = _LAYERS * page
        self.worker = SalternConnector(self.bare.config, KVConnectorRole.WORKER, self.bare.kv_cache_config)
        shape = (blocks, _KV_HEADS, BLOCK_TOKENS, 2 * _HEAD)
        self.layers = {
            f"layer.{number}": torch.randint(-9, 9, shape).to(torch.bfloat16).contiguous() for number in range(_LAYERS)
        }
        assert page * blocks == next(iter(self.layers.values())).nbytes
        self.worker.register_kv_caches(self.layers)

    def load_seconds(self, *, blocks: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of a load of so many blocks, in each round; the contenders take turns.

        ``connector`` from the step that begins it to the step that is told of its end; ``transport`` is ``get_into``
        of the same entries by the SDK alone, in one call and one thread, into memory that a round before has touched;
        ``transport, copy`` is the same and then a bare copy into the same kind of pages: what this machine takes for
        the connector's work without overlapping any of it.
        """
        tokens = [*_tokens(7, blocks), 5]  # one more, which is always computed
        with chains_recorded() as chains:
            self._run("store", tokens)
            assert self.worker.drain(60)
        [hashes] = [chain for chain in chains if len(chain) == blocks]
        times: dict[str, list[float]] = {"connector": [], "transport": [], "transport, copy": []}
        pages = pages_of([list(self.layers)], self.layers, len(next(iter(self.layers.values()))))
        client = self.worker._tenancy.client(self.worker._tenancy.ticket)
        buffer = client.allocate(blocks * self.entry_bytes)
        rooms = [buffer.view[index * self.entry_bytes :][: self.entry_bytes] for index in range(blocks)]
        for number in range(rounds + 2):
            self.bare.scheduler.reset_prefix_cache()
            times["connector"].append(self._run(f"load-{number}", tokens))
            started_s = time.perf_counter()
            results = client.chain(hashes).get_into(range(blocks), rooms, deadline_ms=20_000)
            got_s = time.perf_counter()
            pages.copy_in([Move(0, index + 1, address_of(room)) for index, room in enumerate(rooms)])
            times["transport, copy"].append(time.perf_counter() - started_s)
            times["transport"].append(got_s - started_s)
            assert all(isinstance(result, Hit) for result in results)
        buffer.close()
        return {name: values[2:] for name, values in times.items()}  # the first ones open connections

    def _run(self, name: str, tokens: list[int]) -> float:
        """One request from start to end; returns the seconds that its load took, 0 if it had none."""
        scheduler = self.bare.scheduler
        scheduler.add_request(self.bare.request(name, tokens))
        load_began_s, took_s = 0.0, 0.0
        while True:
            output = scheduler.schedule()
            self.worker.bind_connector_metadata(output.kv_connector_metadata)
            if self.worker._work().loads:
                load_began_s = time.perf_counter()
            self.worker.start_load_kv(None)
            self.worker.wait_for_save()
            results = self.worker.get_transfer_results(output.finished_req_ids)
            self.worker.clear_connector_metadata()
            if results.finished_recving:
                took_s = time.perf_counter() - load_began_s
            connector_output = KVConnectorOutput(
                finished_recving=results.finished_recving or None,
                invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            )
            if output.num_scheduled_tokens:
                self.bare.finish(name, output, connector_output)
                return took_s
            scheduler.update_from_output(output, _sampled(output, connector_output))
            time.sleep(_IDLE_STEP_S)

    def close(self) -> None:
        self.worker.shutdown()
        self.bare.close()


def _tokens(seed: int, blocks: int) -> list[int]:
    return [(index * 37 + seed * 101 + index // 7) % 500 + 3 for index in range(blocks * BLOCK_TOKENS)]


def _sampled(output: SchedulerOutput, connector_output: KVConnectorOutput | None) -> Any:
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[5] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=connector_output,
    )
