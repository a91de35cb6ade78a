"""An engine that finds in the store what another one stored there: the same tokens, and real loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.vllm.deployment import Engines, Store, chains_recorded, drain, put_zeros
from tests.vllm.engine import BLOCK_TOKENS, hit_tokens, prompt, tokens_of

pytestmark = pytest.mark.timeout(600)

#: Within a block, on a block's edge, one over it, and many blocks.
LENGTHS = (100, 200, 96, 33, 20)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
#: The last token is always computed, since the next one is sampled from it: a prompt on the edge lacks its last block.
LOADABLE = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(engines: Engines) -> list[list[int]]:
    """What an engine without any store generates."""
    return engines.get().generate(PROMPTS)


@pytest.fixture(scope="module")
def _stored(stack: object, engines: Engines, reference: list[list[int]]) -> Iterator[Store]:
    """A store that one engine, which is gone, has filled."""
    from tests.vllm.stack import Stack

    assert isinstance(stack, Stack)
    store = Store(stack, "shared")
    engine = engines.new(store)
    outputs = engine.run(PROMPTS)
    assert [tokens_of(output) for output in outputs] == reference, "a cold store changes what is generated"
    assert [hit_tokens(output) for output in outputs] == [0] * len(PROMPTS)
    drain(engine)
    yield store


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_second_engine_hits_and_its_tokens_are_those_of_a_run_without_cache(
    engines: Engines, _stored: Store, reference: list[list[int]], load: str, transport: str
) -> None:
    engine = engines.new(_stored, options={"load": load, "transport": transport})
    free_blocks = engine.free_blocks
    outputs = engine.run(PROMPTS)
    assert [tokens_of(output) for output in outputs] == reference
    assert [hit_tokens(output) for output in outputs] == LOADABLE
    assert engine.counter("vllm:external_prefix_cache_hits") == sum(LOADABLE)
    assert engine.counter("vllm:saltern_load_blocks") == sum(LOADABLE) // BLOCK_TOKENS
    assert engine.counter("vllm:saltern_load_failed_blocks") == 0
    assert engine.free_blocks == free_blocks


def test_what_the_engine_holds_itself_is_not_loaded(
    engines: Engines, _stored: Store, reference: list[list[int]]
) -> None:
    engine = engines.get(_stored, options={"load": "sync", "transport": "tcp"})
    engine.run(PROMPTS)
    loaded = engine.counter("vllm:saltern_load_blocks")
    assert engine.generate(PROMPTS) == reference
    assert engine.counter("vllm:saltern_load_blocks") == loaded


def test_zeros_in_the_store_change_the_tokens(engines: Engines, store: Store, reference: list[list[int]]) -> None:
    """Proves the other tests: were blocks not really loaded, or not used, nothing would change."""
    engine = engines.get(store)
    with chains_recorded() as chains:
        engine.run(PROMPTS)
        drain(engine)
    with store.client() as client:
        assert put_zeros(client, chains) >= sum(LENGTHS) // BLOCK_TOKENS
    engine.forget()
    outputs = engine.run(PROMPTS)
    assert [hit_tokens(output) for output in outputs] == LOADABLE
    assert [tokens_of(output) == expected for output, expected in zip(outputs, reference, strict=True)] == [
        not loaded for loaded in LOADABLE
    ]


def test_blocks_of_the_answer_are_found_by_the_next_turn(engines: Engines, store: Store) -> None:
    engine = engines.get(store)
    first = prompt(300, 9)
    [answer] = engine.generate([first], 40)
    drain(engine)
    engine.forget()
    [output] = engine.run([prompt(300, 9, after=answer[:30])], 10)
    assert tokens_of(output) == answer[30:40]
    assert hit_tokens(output) == 320


def test_the_place_of_the_last_sampled_token_is_never_stored(engines: Engines, store: Store) -> None:
    """A request that ends on the edge of a block: its last token was sampled and never computed."""
    engine = engines.get(store)
    [answer] = engine.generate([prompt(40, 5)], 24)
    drain(engine)
    engine.forget()
    whole = prompt(40, 5, after=answer)
    [output] = engine.run([prompt(40, 5, after=[*answer, 7, 8, 9])], 8)
    assert len(whole["prompt_token_ids"]) == 64
    assert hit_tokens(output) == 32
    expected = engines.get().generate([prompt(40, 5, after=[*answer, 7, 8, 9])], 8)
    assert tokens_of(output) == expected[0]


def test_without_generated_blocks_only_the_prompt_is_stored(engines: Engines, store: Store) -> None:
    engine = engines.get(store, options={"save_generated": False})
    [answer] = engine.generate([prompt(100, 9)], 60)
    drain(engine)
    engine.forget()
    [output] = engine.run([prompt(100, 9, after=answer)], 4)
    assert hit_tokens(output) == 96


def test_prompt_log_probabilities_need_every_token_computed(engines: Engines, store: Store) -> None:
    """vLLM may not skip a token then: nothing is loaded, and the next request without them hits as ever."""
    engine = engines.get(store)
    engine.generate([prompt(100, 3)])
    drain(engine)
    engine.forget()
    [output] = engine.run([prompt(100, 3)], 4, prompt_logprobs=1)
    assert hit_tokens(output) == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 100
    assert engine.counter("vllm:saltern_load_blocks") == 0
    assert engine.counter("vllm:external_prefix_cache_hits") == 0
    engine.forget()
    [output] = engine.run([prompt(100, 3)], 4)
    assert hit_tokens(output) == 96


def test_a_prompt_that_comes_in_chunks_is_stored_and_found_whole(
    engines: Engines, store: Store, reference: list[list[int]]
) -> None:
    engine = engines.get(store, max_num_batched_tokens=64, max_num_seqs=8)
    assert engine.generate(PROMPTS) == reference
    drain(engine)
    engine.forget()
    outputs = engine.run(PROMPTS)
    assert [tokens_of(output) for output in outputs] == reference
    assert [hit_tokens(output) for output in outputs] == LOADABLE


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_pool_so_small_that_requests_are_preempted(
    engines: Engines, store: Store, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are freed and overwritten while earlier saves of them are still on their way."""
    import time

    from saltern.chain import Chain

    prompts = [prompt(120, 50 + seed) for seed in range(6)]
    expected = engines.get().generate(prompts, 100)
    put_many = Chain.put_many

    def late_put(self: Chain, *arguments: object, **options: object) -> object:
        time.sleep(0.05)
        return put_many(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "put_many", late_put)
    engine = engines.get(store, options={"load": load}, num_gpu_blocks_override=18, max_model_len=512)
    free_blocks = engine.free_blocks
    assert engine.generate(prompts, 100) == expected
    assert engine.counter("vllm:num_preemptions") > 0, "the pool is not small enough for this test"
    drain(engine)
    engine.forget()
    outputs = engine.run(prompts, 100)
    assert [tokens_of(output) for output in outputs] == expected
    assert sum(map(hit_tokens, outputs)) > 0
    assert engine.free_blocks == free_blocks


@pytest.mark.parametrize(
    ("model", "engine_options", "block_tokens", "entries_per_block"),
    [
        ("llama", {"dtype": "bfloat16"}, 32, 1),
        ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, 32, 1),
        # In float32: MLA attends to what it found and to what is new apart, and rounds both before it adds them up.
        # In bfloat16 that decides between tokens equally likely, after a hit in vLLM's own cache as well (0.32.0).
        ("mla", {"dtype": "float32"}, 16, 1),  # what vLLM makes of 32 for MLA on CPU
        ("windows", {"dtype": "bfloat16"}, 32, 6),  # six groups of one layer
    ],
    ids=["bf16", "fp8", "mla", "windows"],
)
def test_every_kind_of_cache_is_stored_and_found(
    engines: Engines,
    new_store: Callable[..., Store],
    model: str,
    engine_options: dict[str, str],
    block_tokens: int,
    entries_per_block: int,
) -> None:
    loadable = [(length - 1) // block_tokens * block_tokens for length in LENGTHS]
    expected = engines.get(model=model, **engine_options).generate(PROMPTS)
    store = new_store(block_tokens=block_tokens // entries_per_block)
    engine = engines.get(store, options={"strict_start": True}, model=model, **engine_options)
    free_blocks = engine.free_blocks
    with chains_recorded() as chains:
        assert engine.generate(PROMPTS) == expected
        drain(engine)
    computed = engine.page_digests()
    engine.erase_pages()
    outputs = engine.run(PROMPTS)
    assert [hit_tokens(output) for output in outputs] == loadable
    assert [tokens_of(output) for output in outputs] == expected
    if entries_per_block == 1:  # of windows only the last blocks are loaded
        for before, after in zip(computed, engine.page_digests(), strict=True):
            assert len(before & after) >= sum(loadable) // block_tokens
    with store.client() as client:
        put_zeros(client, chains)
    engine.forget()
    outputs = engine.run(PROMPTS)
    assert [hit_tokens(output) for output in outputs] == loadable
    assert [tokens_of(output) for output in outputs] != expected
    assert engine.free_blocks == free_blocks
