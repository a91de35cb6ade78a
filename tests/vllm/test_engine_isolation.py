"""What must differ for a miss, and be equal for a hit: each dimension both ways, on a real engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from tests.vllm.deployment import Engines, Store, drain
from tests.vllm.engine import Engine, Prompt, hit_tokens, prompt
from tests.vllm.models import model_path

pytestmark = pytest.mark.timeout(600)

_FOUND = 96
_HOSTILE_SALTS = ("a", "A", "a ", " a", "a\x00b", "a/b", "../a", "ä", "a\u0308", "lora-a", "1", "x" * 128, "x" * 127)


def _hits(engine: Engine, wanted: Prompt, **options: Any) -> int:
    """How many tokens the store has of this prompt: the engine itself has forgotten everything."""
    drain(engine)
    engine.forget()
    [output] = engine.run([wanted], 4, **options)
    return hit_tokens(output)


def test_salts_that_differ_share_nothing_and_equal_ones_all(engines: Engines, store: Store) -> None:
    engine = engines.get(store)
    for salt in _HOSTILE_SALTS:
        assert _hits(engine, prompt(100, 1, salt=salt)) == 0, salt
    for salt in _HOSTILE_SALTS:
        assert _hits(engine, prompt(100, 1, salt=salt)) == _FOUND, salt
    assert _hits(engine, prompt(100, 1, salt=None)) == 0
    assert _hits(engine, prompt(100, 1, salt=None)) == _FOUND


def test_where_a_salt_is_required_a_request_without_one_uses_no_store(engines: Engines, store: Store) -> None:
    engine = engines.get(store, options={"require_cache_salt": True})
    for _ in range(2):
        assert _hits(engine, prompt(100, 2, salt=None)) == 0
    assert engine.counter("vllm:saltern_unused_requests") == 2
    assert _hits(engine, prompt(100, 2)) == 0
    assert _hits(engine, prompt(100, 2)) == _FOUND


def test_another_tenant_and_another_namespace_find_nothing(
    engines: Engines, store: Store, new_store: Callable[..., Store]
) -> None:
    assert _hits(engines.get(store), prompt(100, 3)) == 0
    drain(engines.get(store))
    assert _hits(engines.get(new_store()), prompt(100, 3)) == 0
    store.stack.add_namespace(store.tenant, "other")
    store.stack.admin.wait_for_policy()
    assert _hits(engines.get(store, options={"namespace": "other"}), prompt(100, 3)) == 0
    assert _hits(engines.get(store), prompt(100, 3)) == _FOUND


def test_the_same_weights_elsewhere_hit_and_other_weights_at_the_same_place_do_not(
    engines: Engines, store: Store, tmp_path: Path
) -> None:
    assert _hits(engines.get(store), prompt(100, 4)) == 0
    drain(engines.get(store))
    here = tmp_path / "model"
    shutil.copytree(model_path("llama"), here)
    assert _hits(engines.get(store, model=here), prompt(100, 4)) == _FOUND
    shutil.copy(model_path("llama-other-weights") / "model.safetensors", here)
    assert _hits(engines.new(store, model=here), prompt(100, 4)) == 0


def test_engines_whose_blocks_mean_something_else_find_nothing(engines: Engines, store: Store) -> None:
    assert _hits(engines.get(store), prompt(200, 5)) == 0
    drain(engines.get(store))
    others: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
        {"block_size": 64},
        {"hf_overrides": {"rope_theta": 5e5}},
    ]
    for other in others:
        assert _hits(engines.get(store, **other), prompt(200, 5)) == 0, other
    assert _hits(engines.get(store), prompt(200, 5)) == 192


def test_adapters_share_nothing_with_each_other_or_with_none_whatever_they_are_called(
    engines: Engines, store: Store
) -> None:
    a, b = (LoRARequest(name, number, str(model_path(name))) for number, name in ((1, "lora-a"), (2, "lora-b")))
    b_called_a = LoRARequest("lora-a", 3, str(model_path("lora-b")))
    engine = engines.get(store, enable_lora=True, max_lora_rank=8, max_loras=1)
    wanted = prompt(100, 6)
    assert _hits(engine, wanted) == 0
    assert _hits(engine, wanted, lora=a) == 0
    assert _hits(engine, wanted, lora=b) == 0
    assert _hits(engine, prompt(100, 6, salt="lora-a")) == 0
    assert _hits(engine, wanted) == _FOUND
    assert _hits(engine, wanted, lora=a) == _FOUND
    assert _hits(engine, wanted, lora=b) == _FOUND
    drain(engine)
    engine.forget()
    [output] = engine.run([wanted], 4, lora=b_called_a)
    assert hit_tokens(output) == 0, "another adapter of the same name"


def test_prompts_given_as_embeddings_are_told_apart_by_their_numbers(engines: Engines, store: Store) -> None:
    engine = engines.get(store, enable_prompt_embeds=True)
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(100, 128, generator=generator)
    other = one.clone()
    other[0, 0] += 1
    wanted: Prompt = {"prompt_embeds": one, "cache_salt": "s"}
    assert _hits(engine, wanted) == 0
    assert _hits(engine, {"prompt_embeds": other, "cache_salt": "s"}) == 0
    assert _hits(engine, {"prompt_embeds": one.clone(), "cache_salt": "s"}) == _FOUND
    assert _hits(engine, {"prompt_embeds": one, "cache_salt": "t"}) == 0


def test_a_rotated_salt_hides_what_was_stored_once_its_grace_is_over(engines: Engines, store: Store) -> None:
    from saltern.admin.v1.salt_policies_pb2 import RotateSaltRequest

    engine = engines.get(store)
    assert _hits(engine, prompt(100, 7)) == 0
    assert _hits(engine, prompt(100, 7)) == _FOUND
    admin = store.stack.admin
    request = RotateSaltRequest(name=f"tenants/{store.tenant}/saltPolicy")
    request.grace_period.FromSeconds(0)
    admin.call(admin.salt_policies.RotateSalt, request)
    admin.wait_for_policy()
    assert _hits(engine, prompt(100, 7)) == 0
