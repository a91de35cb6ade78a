"""A real vLLM engine inside the test's own process: stepped by hand, so that a test can act in the middle of a load.

Import this module before anything of vLLM: it says that the engine is to run in this process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Models are so small that threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kept from run to run: inspecting a model's class costs vLLM a process.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).resolve().parents[2] / "build" / "vllm-cache"))

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

from tests.vllm.models import model_path

# The first engine's kernels serve those after it, too. vLLM 0.32.0 looks for them in every module at each start, and
# once a drafting engine has loaded numba that ends in an AttributeError: llvmlite has a function for any attribute.
current_platform.register_triton_kernel_overrides = functools.cache(current_platform.register_triton_kernel_overrides)

BLOCK_TOKENS: Final = 32
#: Nothing here takes longer than this, unless it hangs.
HANG_S: Final = 120.0
_POOL_BYTES: Final = 64 * 1024 * 1024
_DEFAULTS: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 1024,
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": _POOL_BYTES,
    "disable_log_stats": False,
    "prefix_caching_hash_algo": "sha256_cbor",
}

Prompt = dict[str, Any]


def prompt(tokens: int, seed: int = 0, *, salt: str | None = "s", after: Sequence[int] = ()) -> Prompt:
    """A prompt of its own for each ``seed``, the same in every run.

    Args:
        salt: its ``cache_salt``, or None for none.
        after: tokens that follow, such as an earlier answer.
    """
    state, numbers = (seed + 1) * 2654435761 % 2**32, []
    for _ in range(tokens):
        state = (1664525 * state + 1013904223) % 2**32
        numbers.append(3 + (state >> 16) % 500)
    made: Prompt = {"prompt_token_ids": [*numbers, *after]}
    return made if salt is None else made | {"cache_salt": salt}


class Engine:
    """One engine; at most one at a time in a process: vLLM keeps its connector and process groups in globals."""

    def __init__(self, connector: KVTransferConfig | None = None, model: str | Path = "llama", **options: Any) -> None:
        """Start it.

        Args:
            connector: how it loads and saves; None for an engine that knows no store.
            model: a name of :mod:`tests.vllm.models`, or a folder.
            options: of vLLM's ``LLM``, over the defaults above.
        """
        arguments = {**_DEFAULTS, **options}
        if connector is not None:
            arguments["kv_transfer_config"] = connector
        folder = model if isinstance(model, Path) else model_path(model)
        self._llm = vllm.LLM(model=str(folder), **arguments)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]  # the in-process client's
        self._next_id = 0
        #: What each request that has ended came to, by its id.
        self.ended: dict[str, RequestOutput] = {}

    # ---- requests

    def start(
        self,
        prompt: Prompt,
        tokens: int = 16,
        *,
        lora: LoRARequest | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Hand a request to the engine, greedy and of exactly ``tokens`` tokens; returns its id. Nothing runs yet."""
        self._next_id += 1
        name = f"request-{self._next_id}"
        extra = {} if kv_transfer_params is None else {"extra_args": {"kv_transfer_params": dict(kv_transfer_params)}}
        parameters = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **extra, **sampling)
        self._engine.add_request(name, dict(prompt), parameters, lora_request=lora)
        return name

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                assert isinstance(output, RequestOutput)
                self.ended[output.request_id] = output

    def step_until(self, condition: Callable[[], bool], seconds: float = HANG_S) -> None:
        """Go on until ``condition``; fails after ``seconds``, which is how a hanging engine shows."""
        end_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end_s, f"the engine hangs: {self._engine.get_num_unfinished_requests()} requests"
            self.step()

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Go on until these requests have ended; all of them by default."""
        wanted = None if names is None else set(names)
        self.step_until(
            lambda: not self._engine.has_unfinished_requests() if wanted is None else wanted <= self.ended.keys()
        )

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def generate(self, prompts: Sequence[Prompt], tokens: int = 16, **options: Any) -> list[list[int]]:
        """The tokens of each prompt, all of them handed over at once."""
        return [tokens_of(output) for output in self.run(prompts, tokens, **options)]

    def run(self, prompts: Sequence[Prompt], tokens: int = 16, **options: Any) -> list[RequestOutput]:
        names = [self.start(each, tokens, **options) for each in prompts]
        self.finish(names)
        return [self.ended.pop(name) for name in names]

    # ---- what it holds

    def forget(self) -> None:
        """Empty the engine's own prefix cache: what it finds next it finds in the store."""
        self.step_until(lambda: self._core.scheduler.reset_prefix_cache())

    @property
    def free_blocks(self) -> int:
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def all_blocks(self) -> int:
        """How many are free when nothing runs: one stands for "not held" and is never free."""
        return int(self._core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def running_requests(self) -> int:
        """All that the scheduler still knows, those included that were aborted and wait for a load's end."""
        return len(self._core.scheduler.requests)

    @property
    def scheduler_connector(self) -> Any:
        return self._core.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        return get_kv_transfer_group()

    @property
    def _pages(self) -> list[torch.Tensor]:
        return list(self._core.model_executor.driver_worker.worker.model_runner.kv_caches)

    def page_digests(self) -> list[set[bytes]]:
        """Of each layer: digests of the pages that hold anything."""
        layers = []
        for pages in self._pages:
            rows = pages.reshape(pages.shape[0], -1).view(torch.uint8)
            held = rows[1:][(rows[1:] != 0).any(dim=1)]
            layers.append({hashlib.sha256(row.numpy().tobytes()).digest() for row in held})
        return layers

    def erase_pages(self) -> None:
        """Forget all, and overwrite it with zeros: what pages hold next was loaded or computed since."""
        self.forget()
        for pages in self._pages:
            pages.zero_()

    def settle(self) -> None:
        """Step, without a request to run, until every load that was begun is reported."""
        self.step_until(lambda: self.running_requests == 0)

    def counter(self, name: str) -> int:
        """One of vLLM's counters, summed over its labels; of this engine, as long as it is the last one made."""
        found = [each.value for each in get_metrics_snapshot() if isinstance(each, Counter) and each.name == name]
        assert found, f"there is no counter {name}"
        return sum(found)

    def close(self) -> None:
        self._core.shutdown()  # the connector, the process groups and the garbage with it
        del self._llm, self._engine, self._core


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def hit_tokens(output: RequestOutput) -> int:
    """How many tokens of the prompt were found, in the engine's own cache or in the store."""
    return output.num_cached_tokens or 0
