"""What vLLM's scheduler asks of a connector, and every fault that others had with it and that shows there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from vllm.config import KVTransferConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from tests.vllm.deployment import Store
from tests.vllm.scheduler_only import BLOCK_TOKENS, ENTRY_BYTES, SchedulerOnly, request

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., SchedulerOnly]


@pytest.fixture
def engine(store: Store) -> Iterator[Make]:
    """Makes engines on the test's store; every one of them ends with all its blocks free."""
    made: list[SchedulerOnly] = []

    def make(*, of: Store = store, options: dict[str, Any] | None = None, **shape: Any) -> SchedulerOnly:
        made.append(SchedulerOnly(of.connector(**(options or {})), **shape))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _serves_on(one: SchedulerOnly) -> None:
    """Whatever happened: a new request is served, and no block is missing."""
    one.step_until(lambda: not one.scheduler.requests)
    one.run(request("after all", 70, seed=77))
    one.forget()
    assert one.free_blocks == one.free_at_start
    assert len(one.connector._scheduler or ()) == 0, "the connector remembers requests that are gone"


def _stored(one: SchedulerOnly, tokens: int = 128, **options: Any) -> None:
    """Serve a prompt, store it, and forget it locally."""
    one.run(request("first", tokens, **options))
    one.drain()
    one.forget()


@contextmanager
def _held_loads(one: SchedulerOnly) -> Iterator[None]:
    """Loads that were begun do not end within the block."""
    take = one.worker._worker.take_load_results
    nothing = take()
    assert not any(nothing), "a load had ended before"
    one.worker._worker.take_load_results = lambda: nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        one.worker._worker.take_load_results = take  # type: ignore[method-assign]


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("tokens", [20, 33, 100, 128, 129])
def test_a_hit_leaves_a_token_to_compute_and_is_whole_blocks(engine: Make, load: str, tokens: int) -> None:
    one = engine(options={"load": load})
    _stored(one, tokens)
    again = request("again", tokens)
    one.run(again)
    loaded = (tokens - 1) // BLOCK_TOKENS
    assert one.count("load_blocks") == loaded
    assert again.num_output_tokens == 4
    _serves_on(one)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_hit_that_ends_within_the_prompt_is_continued(engine: Make, load: str) -> None:
    one = engine(options={"load": load})
    _stored(one, 100)
    one.run(request("longer", 100, after=[7] * 150))
    assert one.count("load_blocks") == 3
    _serves_on(one)


def test_same_values_hit_and_each_other_value_misses(
    engine: Make, tmp_path: Path, new_store: Callable[..., Store]
) -> None:
    one = engine()
    adapters = [_adapter(tmp_path / name, scale) for name, scale in (("one", 1.0), ("two", 2.0))]
    variants: list[dict[str, Any]] = [
        {"salt": "a"},
        {"salt": "b"},
        {"salt": None},
        {"salt": ""},
        {"salt": "style"},
        {"salt": None, "lora": LoRARequest("style", 1, str(adapters[0]))},
        {"salt": None, "lora": LoRARequest("other", 2, str(adapters[1]))},
        {"salt": "a", "lora": LoRARequest("style", 1, str(adapters[0]))},
        {"seed": 1},
    ]
    for number, variant in enumerate(variants):
        one.run(request(f"first-{number}", 100, **variant))
        one.drain()
        one.forget()
    # An empty salt and none are one and the same to vLLM, and to us.
    assert one.count("load_blocks") == 3
    for number, variant in enumerate(variants):
        before = one.count("load_blocks")
        one.run(request(f"again-{number}", 100, **variant))
        one.forget()
        assert one.count("load_blocks") - before == 3, variant


def test_a_picture_is_its_id_and_its_place(engine: Make) -> None:
    one = engine()
    _stored(one, 160, picture=("sha256-of-a-cat", 4))
    others: list[dict[str, Any]] = [
        {"picture": ("sha256-of-a-dog", 4)},
        {"picture": ("sha256-of-a-cat", 5)},
        {"picture": None},
        {"salt": "sha256-of-a-cat", "picture": None},
    ]
    for number, other in enumerate(others):
        one.run(request(f"other-{number}", 160, **other))
        assert one.count("load_blocks") == 0, other
        one.forget()
    one.run(request("same", 160, picture=("sha256-of-a-cat", 4)))
    assert (one.count("lookup_failed"), one.count("load_blocks")) == (0, 4)
    _serves_on(one)


def test_blocks_before_a_picture_are_shared_whatever_it_shows(engine: Make) -> None:
    one = engine()
    _stored(one, 160, picture=("sha256-of-a-cat", 70))
    one.run(request("other", 160, picture=("sha256-of-a-dog", 70)))
    assert one.count("load_blocks") == 2
    _serves_on(one)


def test_an_adapter_is_its_weights_not_its_name(engine: Make, tmp_path: Path) -> None:
    one = engine()
    adapter = _adapter(tmp_path / "style", 1.0)
    _stored(one, 100, lora=LoRARequest("style", 1, str(adapter)))
    _adapter(tmp_path / "style", 2.0)
    other = engine()
    other.run(request("again", 100, lora=LoRARequest("style", 1, str(adapter))))
    assert other.count("load_blocks") == 0
    _adapter(tmp_path / "style", 1.0)
    same = engine()
    same.run(request("again", 100, lora=LoRARequest("style", 1, str(adapter))))
    assert same.count("load_blocks") == 3


def _adapter(folder: Path, scale: float) -> Path:
    import torch

    folder.mkdir(exist_ok=True)
    save_file({"weight": torch.full((4, 4), scale)}, str(folder / "adapter_model.safetensors"))
    return folder


@pytest.mark.parametrize("salt", ["a\\0b", "a" * 128, "tenant-b", "ü" * 64, "'; DROP", "{}", "sk-saltern"])
def test_hostile_salts_are_only_salts(engine: Make, salt: str) -> None:
    one = engine()
    _stored(one, 100, salt="tenant-a")
    one.run(request("other", 100, salt=salt))
    assert one.count("load_blocks") == 0
    one.drain()
    one.forget()
    one.run(request("same", 100, salt=salt))
    assert one.count("load_blocks") == 3


def test_i2_another_tenant_never_hits(engine: Make, new_store: Callable[..., Store]) -> None:
    _stored(engine())
    other = engine(of=new_store())
    other.run(request("again", 128))
    assert other.count("lookup_hit_blocks") == 0
    assert other.count("load_blocks") == 0


def test_without_a_salt_there_is_no_remote_cache_where_one_is_required(engine: Make) -> None:
    one = engine(options={"require_cache_salt": True})
    _stored(one, salt=None)
    one.run(request("again", 128, salt=None))
    assert (one.count("save_blocks"), one.count("lookup_requests"), one.count("unused_requests")) == (0, 0, 2)
    _stored(one, salt="s")
    one.run(request("salted", 128, salt="s"))
    assert one.count("load_blocks") == 3


def test_an_engine_with_other_facts_misses(engine: Make) -> None:
    _stored(engine(options={"weights_digest": "v1"}))
    same, other = engine(options={"weights_digest": "v1"}), engine(options={"weights_digest": "v2"})
    for one in (same, other):
        one.run(request("again", 128))
    assert (same.count("load_blocks"), other.count("load_blocks")) == (3, 0)


def test_after_a_reset_of_the_connector_nothing_that_was_stored_is_found(engine: Make) -> None:
    """Weights may have been changed in place: what is stored was computed by others."""
    one = engine()
    _stored(one)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.run(request("again", 128))
    assert one.count("load_blocks") == 0
    one.drain()
    one.forget()
    one.run(request("third", 128))
    assert one.count("load_blocks") == 3, "what is computed since then is found"
    other = engine()
    other.run(request("elsewhere", 128))
    assert other.count("load_blocks") == 3, "other engines of the tenant keep theirs"


# ---- loads that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_store_that_lists_what_it_cannot_give_costs_one_load(
    engine: Make, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(options={"load": load})
    _stored(one)
    gets = _count_gets(monkeypatch, lose_from=1)
    again = request("again", 128)
    one.run(again)
    assert again.num_output_tokens == 4
    assert gets == [3]
    assert (one.count("load_blocks"), one.count("load_failed_blocks")) == (1, 2)
    _serves_on(one)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_store_that_gives_nothing_at_all_costs_one_load(
    engine: Make, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(options={"load": load})
    _stored(one)
    lookups = one.count("lookup_requests")
    gets = _count_gets(monkeypatch, lose_from=0)
    again = request("again", 128)
    one.run(again)
    assert gets == [3]
    assert one.count("lookup_requests") == lookups + 1
    _serves_on(one)


def test_a_load_of_several_groups_that_fails_is_computed(
    engine: Make, monkeypatch: pytest.MonkeyPatch, new_store: Callable[..., Store]
) -> None:
    """vLLM raises on single blocks there: the request as a whole is reported."""
    one = engine(of=new_store(block_tokens=BLOCK_TOKENS // 2), windows=True)
    _stored(one, 200)
    gets = _count_gets(monkeypatch, lose_from=3)
    again = request("again", 200)
    one.run(again)
    assert again.num_output_tokens == 4
    assert len(gets) == 1
    _serves_on(one)


def _count_gets(monkeypatch: pytest.MonkeyPatch, *, lose_from: int) -> list[int]:
    """Lose what gets of chains bring, from one position in the batch on; returns the sizes of the batches."""
    from saltern.chain import Chain

    gets: list[int] = []
    original = Chain.get_each

    def get_each(self: Chain, positions: Any, take: Any, **options: Any) -> Any:
        wanted = list(positions)
        gets.append(len(wanted))
        return original(self, wanted[:lose_from], take, **options)

    monkeypatch.setattr(Chain, "get_each", get_each)
    return gets


@pytest.mark.parametrize("load", ["async", "sync"])
def test_i10_a_node_that_dies_between_lookup_and_load_costs_nothing_but_the_load(
    engine: Make, store: Store, load: str
) -> None:
    one = engine(options={"load": load, "load_deadline_ms": 2000})
    _stored(one)
    again = request("again", 128)
    one.add(again)
    assert one.connector._scheduler is not None
    while one.connector._scheduler.matched(again, 0)[0] is None:
        one.connector._scheduler.plan_step([])
    store.stack.node.kill()
    try:
        one.step_until(lambda: not one.scheduler.requests)
        assert again.num_output_tokens == 4
        assert one.count("load_failed_blocks") == 3
        one.run(request("dark", 128, seed=3))
    finally:
        store.stack.node.start()
    _serves_on(one)


def test_i10_a_paused_node_holds_a_request_for_its_deadlines_and_no_other_at_all(engine: Make, store: Store) -> None:
    one = engine(options={"load_deadline_ms": 300, "lookup_deadline_ms": 10_000})
    _stored(one)
    slow, other = request("slow", 128), request("other", 20, seed=5)
    one.add(slow)
    assert one.connector._scheduler is not None
    while one.connector._scheduler.matched(slow, 0)[0] is None:
        one.connector._scheduler.plan_step([])
    with store.stack.node.paused():
        one.step()
        assert slow.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        one.run(other)
        one.step_until(lambda: not one.scheduler.requests)
    assert slow.num_output_tokens == 4
    _serves_on(one)


# ---- aborts ----------------------------------------------------------------------------------------------------------


def test_an_abort_while_a_load_runs_gives_all_blocks_back_once_it_has_ended(engine: Make) -> None:
    one = engine()
    _stored(one)
    again = request("again", 128)
    one.add(again)
    with _held_loads(one):
        one.step_until(lambda: again.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        one.step()
        one.abort("again")
        one.step()
        assert one.free_blocks < one.free_at_start, "the load still writes to them"
    _serves_on(one)


def test_an_abort_before_the_lookup_is_answered_leaves_nothing(engine: Make) -> None:
    one = engine()
    _stored(one)
    one.add(request("again", 128))
    one.abort("again")
    _serves_on(one)


def test_an_abort_while_a_load_fails_leaves_nothing(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    _stored(one)
    _count_gets(monkeypatch, lose_from=0)
    again = request("again", 128)
    one.add(again)
    with _held_loads(one):
        one.step_until(lambda: again.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
        one.step()
        one.abort("again")
    _serves_on(one)


def test_a_name_that_is_used_again_is_another_request(engine: Make) -> None:
    one = engine()
    for seed in range(4):
        one.run(request("same", 100, seed=seed))
        one.drain()
    one.forget()
    for seed in range(4):
        one.run(request("same", 100, seed=seed))
    assert one.count("load_blocks") == 12
    _serves_on(one)


# ---- chunks, preemption, decoding ------------------------------------------------------------------------------------


def test_every_chunk_of_a_prompt_is_stored(engine: Make) -> None:
    one = engine(batch_tokens=64)
    _stored(one, 300)
    assert one.count("save_blocks") == 9
    one.run(request("again", 300))
    assert one.count("load_blocks") == 9


def test_the_slot_of_the_last_sampled_token_is_not_stored(engine: Make) -> None:
    one = engine()
    one.run(request("first", 40, generate=24))
    one.drain()
    assert one.count("save_blocks") == 1, "64 tokens, 63 of them computed"
    longer = engine()
    longer.run(request("first", 40, generate=25))
    longer.drain()
    assert longer.count("save_known_blocks") + longer.count("save_blocks") >= 1
    assert longer.count("save_blocks") == 1


@pytest.mark.parametrize("load", ["async", "sync"])
def test_preemption_frees_blocks_that_are_stored_whole_all_the_same(engine: Make, load: str) -> None:
    """A pool so small that requests throw each other out, while their blocks are on their way to the store."""
    for turn in range(2):
        one = engine(blocks=14, options={"load": load})
        one.run(*(request(f"r{number}", 100, seed=number, generate=60) for number in range(4)))
        one.drain()
        assert turn == 0 or one.count("load_blocks") > 0
        _serves_on(one)


@pytest.mark.parametrize("blocks", [64, 14], ids=["roomy", "preempted"])
def test_steps_that_are_scheduled_ahead_store_only_what_is_final(engine: Make, blocks: int) -> None:
    """Asynchronous scheduling: a step is planned before the tokens of the one before it are known."""
    for turn in range(2):
        one = engine(blocks=blocks, is_asynchronous=True, options={"load": "sync"})
        assert one.connector._options.load == "async", "in the step it would be told too late"
        one.run(*(request(f"r{number}", 100, seed=number, generate=60) for number in range(4)))
        one.drain()
        assert turn == 0 or one.count("load_blocks") > 0
        _serves_on(one)
    # Another one that is not asynchronous finds what its answers were made of: 159 computed tokens.
    after = engine()
    after.run(request("next turn", 100, seed=0, after=[5] * 60))
    assert after.count("load_blocks") == 4
    _serves_on(after)


def test_sliding_windows_load_what_is_in_them(engine: Make, new_store: Callable[..., Store]) -> None:
    halves = new_store(block_tokens=BLOCK_TOKENS // 2)
    first = engine(of=halves, windows=True)
    _stored(first, 300)
    second = engine(of=halves, windows=True)
    second.run(request("again", 300))
    assert second.count("load_blocks") == 9
    assert second.count("load_bytes") < 9 * 2 * ENTRY_BYTES, "blocks out of the window were loaded"
    _serves_on(second)


def test_prompt_log_probabilities_look_nothing_up(engine: Make) -> None:
    one = engine()
    _stored(one)
    one.run(request("again", 128, prompt_logprobs=1))
    assert one.count("load_blocks") == 0
    _serves_on(one)


# ---- starts ----------------------------------------------------------------------------------------------------------


def test_a_namespace_that_does_not_fit_costs_the_cache_not_the_engine(
    engine: Make, new_store: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    small = new_store(block_tokens=16, block_bytes=4096)
    with caplog.at_level(logging.ERROR, logger="saltern"):
        one = engine(of=small)
    assert f"--block-tokens {BLOCK_TOKENS} --block-bytes {ENTRY_BYTES}" in caplog.text
    _stored(one)
    one.run(request("again", 128))
    assert one.count("load_blocks") == 0
    _serves_on(one)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_block_hashes_that_cannot_be_shared_cost_the_cache_and_the_log_names_the_right_option(
    engine: Make, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="saltern"):
        one = engine(hash_algorithm=algorithm)
    assert "--prefix-caching-hash-algo sha256_cbor" in caplog.text
    _stored(one)
    one.run(request("again", 128))
    assert one.count("load_blocks") == 0
    _serves_on(one)


def test_a_strict_start_fails_where_another_goes_without(engine: Make, new_store: Callable[..., Store]) -> None:
    from saltern.errors import FailedPreconditionError

    with pytest.raises(FailedPreconditionError, match="saltern namespace create"):
        engine(of=new_store(block_tokens=16, block_bytes=4096), options={"strict_start": True})
    with pytest.raises(FailedPreconditionError, match="sha256_cbor"):
        engine(hash_algorithm="sha256", options={"strict_start": True})


def test_i10_without_a_control_plane_an_engine_starts_and_serves(engine: Make) -> None:
    one = engine(options={"control": "127.0.0.1:1", "open_wait_ms": 200})
    _stored(one)
    one.run(request("again", 128))
    assert (one.count("load_blocks"), one.count("save_blocks")) == (0, 0)
    _serves_on(one)


def test_no_secret_is_in_what_is_said(engine: Make, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    secret = store.key_file.read_text().strip()
    with caplog.at_level(logging.DEBUG):
        one = engine()
        _stored(one, salt="very-private-salt")
        output = one.scheduler.schedule()
        shown = repr(output) + repr(vars(output.kv_connector_metadata)) + repr(one.connector._tenancy)
    assert secret[-20:] not in caplog.text + shown
    one.scheduler.update_from_output(output, one.forward(output))


# ---- beside other connectors -----------------------------------------------------------------------------------------


def test_beside_another_connector_each_stores_and_the_first_that_has_it_loads(
    engine: Make, store: Store, new_store: Callable[..., Store]
) -> None:
    """As a child of vLLM's MultiConnector, whose other child brings its own hits."""
    other = new_store()
    _stored(engine(of=other), 70)
    both = SchedulerOnly(
        KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [_as_child(other), _as_child(store)]},
        )
    )
    try:
        both.run(request("first", 128))
        both.drain()
        assert both.count("load_blocks") == 2, "the other child had two blocks"
    finally:
        both.close()
    for each in (store, other):
        alone = engine(of=each)
        alone.run(request("again", 128))
        assert alone.count("load_blocks") == 3, "what the other child loaded and what was computed is stored in both"


def test_metrics_of_a_child_are_added_up_by_its_name(store: Store) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from saltern.vllm.prometheus import SalternStats

    counted = MultiConnector.build_kv_connector_stats({"SalternConnector": {"load_blocks": 2, "load_seconds": [0.1]}})
    assert counted is not None
    assert isinstance(counted["SalternConnector"], SalternStats)
    more = MultiConnector.build_kv_connector_stats({"SalternConnector": {"load_blocks": 3, "load_seconds": [0.3]}})
    counted.aggregate(more)
    assert counted.reduce() == {"SalternConnector": {"load_blocks": 5, "load_seconds": 0.2}}
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [_as_child(store)]},
        )
    )
    # A registry of its own: other tests run whole engines in this process, and those register theirs for good.
    registry = CollectorRegistry()
    names = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = MultiConnector.build_prom_metrics(config, names, ["engine"], {0: ["7"]})
    assert registry.get_sample_value("vllm:saltern_load_blocks_total", {"engine": "7"}) == 0
    metrics.observe(counted.to_dict(), 0)
    assert registry.get_sample_value("vllm:saltern_load_blocks_total", {"engine": "7"}) == 5
    assert registry.get_sample_value("vllm:saltern_load_seconds_count", {"engine": "7"}) == 2


def _as_child(store: Store) -> dict[str, Any]:
    own = store.connector()
    return {
        "kv_connector": own.kv_connector,
        "kv_connector_module_path": own.kv_connector_module_path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": own.kv_connector_extra_config,
    }
