"""Tiny models with random weights, made here: Llama, latent attention (MLA), sliding windows, two LoRA adapters.

Weights are real files, not vLLM's ``load_format="dummy"``: with those every prompt gets the same two tokens, and a test
that compares tokens would prove nothing. Scales are chosen so that attention matters: other keys and values in the
cache lead to other tokens.

    python -m tests.vllm.models build/vllm-models
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
MODELS_DIR = ROOT / "build" / "vllm-models"
VOCABULARY = 512
CONTEXT_TOKENS = 2048
_LAYOUT = "6"  # part of the folder's name: what is made by older code is not taken for this code's
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
_TEXT = ["the quick brown fox jumps over the lazy dog", "tenant salt cache block prefix hash", "one pan, one wall"]

Weights = dict[str, torch.Tensor]
Build = Callable[["_Random", "_Shape"], tuple[dict[str, Any], Weights]]


class _Random:
    """Weights of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * scale


class _Shape(NamedTuple):
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    inner: int = 256


def _common_config(architecture: str, model_type: str, shape: _Shape) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def _mlp(prefix: str, random: _Random, shape: _Shape) -> Weights:
    return {
        f"{prefix}mlp.gate_proj.weight": random(shape.inner, shape.hidden),
        f"{prefix}mlp.up_proj.weight": random(shape.inner, shape.hidden),
        f"{prefix}mlp.down_proj.weight": random(shape.hidden, shape.inner),
    }


def _llama(random: _Random, shape: _Shape) -> tuple[dict[str, Any], Weights]:
    head = shape.hidden // shape.heads
    config = _common_config("LlamaForCausalLM", "llama", shape) | {
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, shape.hidden, scale=1.0),
        "model.norm.weight": torch.ones(shape.hidden),
        "lm_head.weight": random(VOCABULARY, shape.hidden, scale=1.0),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": random(shape.hidden, shape.hidden),
            f"{prefix}self_attn.k_proj.weight": random(shape.kv_heads * head, shape.hidden),
            f"{prefix}self_attn.v_proj.weight": random(shape.kv_heads * head, shape.hidden),
            f"{prefix}self_attn.o_proj.weight": random(shape.hidden, shape.hidden),
            f"{prefix}input_layernorm.weight": torch.ones(shape.hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(shape.hidden),
            **_mlp(prefix, random, shape),
        }
    return config, weights


def _latent(random: _Random, shape: _Shape) -> tuple[dict[str, Any], Weights]:
    """DeepSeek-V2's attention: one latent row for all heads, which every rank keeps whole.

    Positions are scaled (YaRN) as in DeepSeek's own, and must be: the kernel that vLLM 0.32.0 has for plain rotary
    embeddings on CPUs takes the distance between heads for that between tokens, so that with MLA's queries and keys,
    which it gets head by head, keys in the cache depend on a token's place in its batch. YaRN is computed by torch.
    """
    latent, nope, rope, value = 512, 128, 64, 128
    config = _common_config("DeepseekV2ForCausalLM", "deepseek_v2", shape) | {
        "num_key_value_heads": shape.heads,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": shape.layers,  # no experts: they have no CPU kernel and no part in the cache
        "moe_layer_freq": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": CONTEXT_TOKENS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, shape.hidden, scale=1.0),
        "model.norm.weight": torch.ones(shape.hidden),
        "lm_head.weight": random(VOCABULARY, shape.hidden, scale=1.0),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": random(shape.heads * (nope + rope), shape.hidden, scale=0.1),
            f"{prefix}self_attn.kv_a_proj_with_mqa.weight": random(latent + rope, shape.hidden),
            f"{prefix}self_attn.kv_a_layernorm.weight": torch.ones(latent),
            f"{prefix}self_attn.kv_b_proj.weight": random(shape.heads * (nope + value), latent, scale=0.1),
            f"{prefix}self_attn.o_proj.weight": random(shape.hidden, shape.heads * value),
            f"{prefix}input_layernorm.weight": torch.ones(shape.hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(shape.hidden),
            **_mlp(prefix, random, shape),
        }
    return config, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _windows(random: _Random, shape: _Shape) -> tuple[dict[str, Any], Weights]:
    """Gemma 3's: five layers that see 64 tokens and one that sees all, so two groups of KV cache."""
    head = 32
    config = _common_config("Gemma3ForCausalLM", "gemma3_text", shape) | {
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head,
        "sliding_window": 64,
        "sliding_window_pattern": shape.layers,
        "layer_types": ["sliding_attention"] * (shape.layers - 1) + ["full_attention"],
        "query_pre_attn_scalar": head,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    weights = {
        # Weak, because outputs are read off the same matrix: a strong one would repeat the last token.
        "model.embed_tokens.weight": random(VOCABULARY, shape.hidden, scale=0.03),
        "model.norm.weight": torch.zeros(shape.hidden),  # Gemma's norms multiply by one more than their weight
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        weights |= {
            f"{prefix}self_attn.q_proj.weight": random(shape.heads * head, shape.hidden),
            f"{prefix}self_attn.k_proj.weight": random(shape.kv_heads * head, shape.hidden),
            f"{prefix}self_attn.v_proj.weight": random(shape.kv_heads * head, shape.hidden),
            f"{prefix}self_attn.o_proj.weight": random(shape.hidden, shape.heads * head),
            f"{prefix}self_attn.q_norm.weight": torch.zeros(head),
            f"{prefix}self_attn.k_norm.weight": torch.zeros(head),
            **{f"{prefix}{norm}_layernorm.weight": torch.zeros(shape.hidden) for norm in norms},
            **_mlp(prefix, random, shape),
        }
    return config, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 50, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_model(build: Build, seed: int = 0, shape: _Shape = _Shape()) -> Callable[[Path], None]:  # noqa: B008
    def write(folder: Path) -> None:
        config, weights = build(_Random(seed), shape)
        _write_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})

    return write


def _write_lora(seed: int) -> Callable[[Path], None]:
    """An adapter of the Llama's queries and values, strong enough to change what is generated."""

    def write(folder: Path) -> None:
        rank, random, shapes = 8, _Random(seed), {"q_proj": 128, "v_proj": 64}
        weights = {}
        for layer in range(4):
            for name, rows in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{prefix}.lora_A.weight"] = random(rank, _Shape().hidden)
                weights[f"{prefix}.lora_B.weight"] = random(rows, rank)
        save_file(weights, str(folder / "adapter_model.safetensors"))
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 2 * rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(shapes),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return write


_WRITERS: dict[str, Callable[[Path], None]] = {
    "llama": _write_model(_llama),
    "llama-other-weights": _write_model(_llama, seed=1),
    #: Computes 6,000 operations for each byte that it caches, a twentieth of Llama 3.1 8B's: the worst case of a bench.
    "llama-bench": _write_model(_llama, shape=_Shape(hidden=768, heads=12, kv_heads=4, inner=2048)),
    #: Computes 57,000 operations for each byte that it caches: half as many as Llama 3.1 8B (16e9 for 128 KiB).
    "llama-bench-wide": _write_model(_llama, shape=_Shape(hidden=1024, heads=16, kv_heads=1, inner=4096)),
    "mla": _write_model(_latent, shape=_Shape(layers=2)),
    "windows": _write_model(_windows, shape=_Shape(layers=6)),
    "lora-a": _write_lora(10),
    "lora-b": _write_lora(11),
}


def model_path(name: str, models_dir: Path = MODELS_DIR) -> Path:
    """The folder of one of the models above; made at first use, by one process of several that ask."""
    folder = models_dir / f"{name}.{_LAYOUT}"
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            folder.mkdir(exist_ok=True)
            _WRITERS[name](folder)
            (folder / "complete").touch()
    return folder


if __name__ == "__main__":
    for each in _WRITERS:
        print(model_path(each, Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS_DIR))
