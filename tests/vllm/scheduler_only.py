"""vLLM's real scheduler and both halves of the connector, without a model: milliseconds for a case.

Instead of a model, a step writes into each block that it fills a pattern of the block's hash, and before that looks
whether all that its requests count as computed holds the right patterns: what a model would read. So a wrong byte, a
block that was freed too early or a load that is late shows in any case, whatever it was about.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from saltern.vllm.connector import SalternConnector
from saltern.vllm.stats import merged
from tests.vllm.models import model_path

BLOCK_TOKENS: Final = 32
LAYERS: Final = 2
HEADS: Final = 2
HEAD_SIZE: Final = 32
WINDOW_TOKENS: Final = 64
#: Bytes of an entry: all layers of a block.
ENTRY_BYTES: Final = LAYERS * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4
_STEPS_MAX: Final = 100_000
_SAMPLED: Final = 5
#: Tokens that stand for one picture.
_PICTURE_TOKENS: Final = 16

init_none_hash(sha256_cbor)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)


def request(
    name: str,
    tokens: int,
    *,
    seed: int = 0,
    salt: str | None = "s",
    generate: int = 4,
    lora: LoRARequest | None = None,
    kv_transfer_params: dict[str, Any] | None = None,
    after: Sequence[int] = (),
    picture: tuple[str, int] | None = None,
    **sampling: Any,
) -> Request:
    """A request; with a ``picture`` it has one of this id at this place."""
    extra = {} if kv_transfer_params is None else {"extra_args": {"kv_transfer_params": kv_transfer_params}}
    parameters = SamplingParams(max_tokens=generate, ignore_eos=True, **extra, **sampling)
    parameters.update_from_generation_config({}, 1)
    prompt = [(index * 37 + seed * 11) % 500 + 3 for index in range(tokens)]
    features = None
    if picture is not None:
        identifier, offset = picture
        place = PlaceholderRange(offset=offset, length=_PICTURE_TOKENS)
        features = [MultiModalFeatureSpec(None, "image", identifier, place)]
    return Request(
        name,
        [*prompt, *after],
        parameters,
        None,
        cache_salt=salt,
        lora_request=lora,
        mm_features=features,
        block_hasher=_hasher,
    )


class SchedulerOnly:
    """One engine without a model.

    Args:
        connector: as an engine is configured.
        blocks: of the pool, the null block included.
        batch_tokens: that a step computes at most.
        windows: a second KV cache group, with a sliding window.
        is_asynchronous: each step is scheduled before the one before it has told what it sampled.
    """

    def __init__(
        self,
        connector: KVTransferConfig,
        *,
        blocks: int = 64,
        batch_tokens: int = 256,
        windows: bool = False,
        hash_algorithm: str = "sha256_cbor",
        is_asynchronous: bool = False,
    ) -> None:
        model = ModelConfig(model=str(model_path("llama")), dtype="float32", seed=0, max_model_len=1024)
        self.config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=batch_tokens,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(
                block_size=BLOCK_TOKENS,
                enable_prefix_caching=True,
                prefix_caching_hash_algo=hash_algorithm,  # type: ignore[arg-type]
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=connector,
        )
        self.config.cache_config.num_gpu_blocks = blocks
        # Only here: the platform of CPUs takes it back from whoever asks for it at the start.
        self.config.scheduler_config.async_scheduling = is_asynchronous
        shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32}
        specs: list[Any] = [FullAttentionSpec(**shape)]
        if windows:
            specs.append(SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS))
        self._names = [[f"layer.{group}.{layer}" for layer in range(LAYERS)] for group in range(len(specs))]
        groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(self._names, specs, strict=True)]
        self.cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.tensors = {
            name: torch.zeros(blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE) for names in self._names for name in names
        }
        self.scheduler = (AsyncScheduler if is_asynchronous else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
        )
        # The model that the configuration names sees no pictures; this one has room for some.
        self.scheduler.max_num_encoder_input_tokens = batch_tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=batch_tokens)
        #: Both halves: SalternConnectors, or what has them as children.
        self.connector: Any = self.scheduler.connector
        self.worker: Any = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
        self.worker.register_kv_caches(self.tensors)
        #: What both halves have counted so far.
        self.counts: dict[str, Any] = {}
        for half in (self.connector, self.worker):
            for each in getattr(half, "sub_connectors", [half]):
                self._count(each)
        self.free_at_start = self.free_blocks
        #: Blocks that a step computed with although they held other bytes; all right if the engine is told in time.
        self._wrong: dict[int, str] = {}
        #: Steps that were computed and not reported yet, and how many of them there are between steps.
        self._computed: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._ahead = int(is_asynchronous)
        #: Blocks that were computed before their hash was known, by request: group, block, index.
        self._unnamed: dict[str, list[tuple[int, int, int]]] = {}

    # ---- driving it

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add_request(one)

    def step(self) -> SchedulerOutput:
        """Schedule, compute, report: one step as the engine core drives it."""
        output = self.scheduler.schedule()
        self._computed.append((output, self.forward(output)))
        while len(self._computed) > self._ahead:
            self.scheduler.update_from_output(*self._computed.popleft())
        return output

    def forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A worker's part of a step, in the order of vLLM's model runner."""
        worker, metadata = self.worker, output.kv_connector_metadata
        assert metadata is not None
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        self._compute(output)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        invalid = worker.get_block_ids_with_load_errors()
        assert self._wrong.keys() <= invalid, f"{self._wrong.values()} held other bytes, and the engine was not told"
        stats = worker.get_kv_connector_stats()
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid,
            kv_connector_stats=stats,
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sample(output, name) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=reported,
        )

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(_STEPS_MAX):
            if condition():
                return
            self.step()
        raise AssertionError("the scheduler hangs")

    def run(self, *requests: Request) -> None:
        """Serve these to their ends."""
        self.add(*requests)
        names = {one.request_id for one in requests}
        self.step_until(lambda: not names & self.scheduler.requests.keys())

    def drain(self) -> None:
        for each in getattr(self.worker, "sub_connectors", [self.worker]):
            assert each.drain(60)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Empty the scheduler's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def count(self, name: str) -> Any:
        """One of the connector's counts, of both halves so far."""
        for half in (self.worker, self.connector):
            for each in getattr(half, "sub_connectors", [half]):
                each.get_kv_connector_stats()
        return self.counts.get(name, 0)

    def _count(self, half: SalternConnector) -> None:
        """Add up what this half gives out, whoever asks it."""
        original = half.get_kv_connector_stats

        def counted() -> Any:
            stats = original()
            if stats is not None:
                self.counts = merged(self.counts, stats.data)
            return stats

        half.get_kv_connector_stats = counted  # type: ignore[method-assign]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    # ---- in place of a model

    def _compute(self, output: SchedulerOutput) -> None:
        self._wrong = {}
        self._name_blocks()
        for name, before, tokens in _scheduled(output):
            one = self.scheduler.requests[name]
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            known, is_right = len(one.block_hashes), True
            for group, table in enumerate(tables):
                for index in range(before // BLOCK_TOKENS):
                    if table[index] and not self._holds(group, table[index], one.block_hashes[index]):
                        self._wrong[table[index]] = f"block {index} of {name}"
                        is_right = False
                for index in range(before // BLOCK_TOKENS, -(-(before + tokens) // BLOCK_TOKENS)):
                    complete = (index + 1) * BLOCK_TOKENS <= before + tokens and index < known
                    self._fill(group, table[index], one.block_hashes[index] if complete and is_right else b"\xee")
                    if self._ahead and is_right and index >= known:
                        self._unnamed.setdefault(name, []).append((group, table[index], index))

    def _name_blocks(self) -> None:
        """Write what a model has written already: a block's content follows from tokens that are known only now."""
        for name, blocks in list(self._unnamed.items()):
            one = self.scheduler.requests.get(name)
            tables = () if one is None else self.scheduler.kv_cache_manager.get_block_ids(name)
            self._unnamed[name] = []
            for group, block_id, index in blocks:
                if one is None or len(tables[group]) <= index or tables[group][index] != block_id:
                    continue  # its request has ended, or was thrown out
                if index < len(one.block_hashes):
                    self._fill(group, block_id, one.block_hashes[index])
                else:
                    self._unnamed[name].append((group, block_id, index))

    def _fill(self, group: int, block_id: int, content: bytes) -> None:
        assert block_id, "a step computes into the null block"
        for name in self._names[group]:
            self.tensors[name][block_id] = _pattern(name, content)

    def _holds(self, group: int, block_id: int, content: bytes) -> bool:
        return all(torch.equal(self.tensors[name][block_id], _pattern(name, content)) for name in self._names[group])

    def _sample(self, output: SchedulerOutput, name: str) -> list[int]:
        if self._ahead:
            return [] if self.scheduler.requests[name].is_prefill_chunk else [_SAMPLED]
        [computed] = [before + tokens for one, before, tokens in _scheduled(output) if one == name]
        return [_SAMPLED] if computed >= self.scheduler.requests[name].num_tokens else []


def _scheduled(output: SchedulerOutput) -> Iterable[tuple[str, int, int]]:
    cached = output.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(name, before[name], tokens) for name, tokens in output.num_scheduled_tokens.items()]


def _pattern(layer: str, content: bytes) -> torch.Tensor:
    """A page: integers, which floats hold exactly."""
    numbers = torch.tensor(list(layer.encode() + content), dtype=torch.float32)
    size = HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE
    return numbers.repeat(-(-size // len(numbers)))[:size].reshape(HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
