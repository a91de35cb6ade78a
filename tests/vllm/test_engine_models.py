"""The models that the other tests stand on: what they generate follows from the prompt, all of it."""

from __future__ import annotations

import pytest

from tests.vllm.deployment import Engines
from tests.vllm.engine import prompt


@pytest.mark.parametrize("model", ["llama", "mla", "windows"])
def test_other_prompts_get_other_tokens_and_the_same_prompt_the_same(engines: Engines, model: str) -> None:
    engine = engines.get(model=model, dtype="float32" if model == "llama" else "bfloat16")
    prompts = [prompt(100, seed) for seed in range(4)]
    first = engine.generate(prompts)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert len({token for tokens in first for token in tokens}) > 8, "the model repeats itself"
    changed = dict(prompts[0])
    changed["prompt_token_ids"] = [7, *changed["prompt_token_ids"][1:]]
    assert engine.generate([changed]) != first[:1], "the first block does not matter to what is generated"
    engine.forget()
    assert engine.generate(prompts) == first
