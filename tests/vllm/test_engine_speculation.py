"""An engine that drafts tokens by n-grams: whatever it rejects is in no block that is stored."""

from __future__ import annotations

import pytest

from tests.vllm.deployment import Engines, Store, chains_recorded, drain, put_zeros
from tests.vllm.engine import BLOCK_TOKENS, Engine, hit_tokens, prompt, tokens_of

pytestmark = pytest.mark.timeout(600)

_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_LENGTHS = (100, 200, 96, 33, 20)
_PROMPTS = [prompt(length, seed) for seed, length in enumerate(_LENGTHS)]
_ANSWER_TOKENS = 80
#: With so few tokens to choose from the model repeats itself: some drafts are accepted, whole or in part.
_FEW = {"allowed_token_ids": [10, 20, 30, 40]}


def _loadable(tokens: int) -> int:
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def _rejected(engine: Engine) -> int:
    drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
    accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafted, "the drafts prove nothing"
    return drafted - accepted


@pytest.mark.parametrize("load", ["async", "sync"])
def test_rejected_drafts_are_never_stored_and_a_second_engine_hits(engines: Engines, store: Store, load: str) -> None:
    reference = engines.get().generate(_PROMPTS, _ANSWER_TOKENS, **_FEW)
    turns = [
        prompt(length, seed, after=[*answer, 7])
        for seed, (length, answer) in enumerate(zip(_LENGTHS, reference, strict=True))
    ]
    next_turns = engines.get().generate(turns, _ANSWER_TOKENS, **_FEW)

    options = {"load": load}
    first = engines.get(store, options=options, speculative_config=_NGRAM)
    with chains_recorded() as chains:
        assert first.generate(_PROMPTS, _ANSWER_TOKENS, **_FEW) == reference
        drain(first)
    assert _rejected(first) > 100
    stored_blocks = first.counter("vllm:saltern_save_blocks")
    computed = first.page_digests()

    second = engines.new(store, options=options, speculative_config=_NGRAM)
    free_blocks = second.free_blocks
    # One token of each: what lies in the pages was loaded, but for the last block of each prompt.
    hits = [hit_tokens(output) for output in second.run(turns, 1, **_FEW)]
    assert hits == [_loadable(length + _ANSWER_TOKENS) for length in _LENGTHS]
    assert stored_blocks == sum(hits) // BLOCK_TOKENS, "something was stored that nobody can find"
    for before, after in zip(computed, second.page_digests(), strict=True):
        # Byte for byte what the pages became once all drafts were accepted or overwritten.
        assert len(before & after) == sum(hits) // BLOCK_TOKENS
    second.forget()
    outputs = second.run(turns, _ANSWER_TOKENS, **_FEW)
    assert [tokens_of(output) for output in outputs] == next_turns
    assert [hit_tokens(output) for output in outputs] == hits
    assert second.counter("vllm:saltern_load_failed_blocks") == 0
    assert second.free_blocks == free_blocks
    _rejected(second)

    with store.client() as client:
        put_zeros(client, chains)
    second.forget()
    outputs = second.run(turns, _ANSWER_TOKENS, **_FEW)
    assert [tokens_of(output) for output in outputs] != next_turns, "what was loaded is not used"
