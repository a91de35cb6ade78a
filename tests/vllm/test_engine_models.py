"""The models that the other tests stand on: what they generate follows from the prompt, all of it, and nothing else."""

from __future__ import annotations

import pytest

from tests.vllm.deployment import Engines
from tests.vllm.engine import Engine, prompt


@pytest.fixture(scope="module", params=["llama", "mla", "windows"])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    return engines.get(model=request.param, dtype="float32")


def test_other_prompts_get_other_tokens_and_the_same_prompt_the_same(engine: Engine) -> None:
    prompts = [prompt(100, seed) for seed in range(4)]
    first = engine.generate(prompts)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert len({token for tokens in first for token in tokens}) > 8, "the model repeats itself"
    changed = dict(prompts[0])
    changed["prompt_token_ids"] = [7, *changed["prompt_token_ids"][1:]]
    assert engine.generate([changed]) != first[:1], "the first block does not matter to what is generated"
    engine.forget()
    assert engine.generate(prompts) == first


def test_a_prompt_gets_the_same_tokens_alone_as_in_a_batch(engine: Engine) -> None:
    """Were it not so, tokens after a hit would be others without any fault of the cache: fewer are computed then."""
    prompts = [prompt(100, seed) for seed in range(4)]
    together = engine.generate(prompts)
    engine.forget()
    assert [engine.generate([each])[0] for each in prompts] == together
