"""Our profiles against what models and vendors publish, reckoned again from the published numbers."""

from __future__ import annotations

import pytest

from saltern.replay.profiles import PRICE_SOURCE, builtin_profiles

PROFILES = builtin_profiles()
BF16_BYTES = 2
#: From each model's public config.json: layers, hidden size, query heads, KV heads, values in a head.
GROUPED = {
    "llama-3-70b": (80, 8192, 64, 8, 128),
    "llama-3-8b": (32, 4096, 32, 8, 128),
    "qwen2.5-7b": (28, 3584, 28, 4, 128),
    "qwen3-8b": (36, 4096, 32, 8, 128),
    "qwen3-32b": (64, 5120, 64, 8, 128),
}


@pytest.mark.parametrize("name", GROUPED)
def test_keys_values_and_attention_follow_from_config_json(name: str) -> None:
    """Keys and values of every layer in BF16; scores and their use, 2 + 2 operations for each pair and value
    (Mooncake, FAST'25, section 3: a = 4)."""
    layers, _, heads, kv_heads, head_values = GROUPED[name]
    model = PROFILES.model(name)
    assert model.kv_bytes_per_token == 2 * layers * kv_heads * head_values * BF16_BYTES
    assert model.attention_flops_per_pair == 4 * layers * heads * head_values


def test_latent_attention_keeps_one_latent_and_one_rotary_key_for_each_token() -> None:
    """DeepSeek-V3's config.json: 61 layers, kv_lora_rank 512, qk_rope_head_dim 64, qk_nope and v 128, 128 heads."""
    model = PROFILES.model("deepseek-v3")
    assert model.kv_bytes_per_token == 61 * (512 + 64) * BF16_BYTES
    assert model.attention_flops_per_pair == 61 * 128 * 2 * ((128 + 64) + 128)
    assert model.linear_flops_per_token == pytest.approx(2 * (36.6e9 - 0.9e9))


def test_linear_operations_are_two_for_each_weight_but_the_embeddings() -> None:
    # Model cards give parameters without embeddings; LLaMA3-8B: 8.03e9 in all, 2 x 128,256 x 4,096 of them embeddings.
    assert PROFILES.model("llama-3-8b").linear_flops_per_token == pytest.approx(
        2 * (8.03e9 - 2 * 128_256 * 4096), rel=0.002
    )
    for name, weights in (("qwen2.5-7b", 6.53e9), ("qwen3-8b", 6.95e9), ("qwen3-32b", 31.2e9)):
        assert PROFILES.model(name).linear_flops_per_token == pytest.approx(2 * weights, rel=0.001)
    # Mooncake's l b d^2 with b = 22 (FAST'25, section 3).
    assert PROFILES.model("llama-3-70b").linear_flops_per_token == 80 * 22 * 8192**2


@pytest.mark.parametrize(
    ("name", "flops_per_s", "memory_bytes_per_s", "usd_per_hour"),
    [
        ("8xa800", 312e12, 2039e9, 14.75 / 8),
        ("8xh800", 1979e12 / 2, 3.35e12, 39.33 / 8),
        ("8xh100", 1979e12 / 2, 3.35e12, 39.33 / 8),
        ("1xh100", 1979e12 / 2, 3.35e12, 39.33 / 8),
        ("1xh200", 1979e12 / 2, 4.8e12, 43.26 / 8),
        ("1xl40s", 362.05e12, 864e9, 1.86),
    ],
)
def test_machines_are_what_data_sheets_and_price_lists_say(
    name: str, flops_per_s: float, memory_bytes_per_s: float, usd_per_hour: float
) -> None:
    """NVIDIA's data sheets give tensor operations with sparsity: half of that is dense. Prices: EC2 Capacity Blocks,
    p4d, p5 and p5e by the instance, and g6e on demand."""
    machine = PROFILES.machine(name)
    assert machine.flops_per_s == pytest.approx(flops_per_s, rel=0.001)
    assert machine.memory_bytes_per_s == pytest.approx(memory_bytes_per_s)
    assert machine.gpu_usd_per_hour == pytest.approx(usd_per_hour, rel=0.001)


def test_every_profile_and_price_names_its_source_and_prices_their_date() -> None:
    for profile in (*PROFILES.models.values(), *PROFILES.hardware.values()):
        assert len(profile.source) > 20
    assert "2025" in PRICE_SOURCE and "give your own" in PRICE_SOURCE
    assert all("price" in machine.source for machine in PROFILES.hardware.values())
