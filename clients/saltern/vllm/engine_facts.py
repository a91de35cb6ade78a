"""Reads what the connector must know out of vLLM's configuration objects. Tested with vLLM 0.32.0.

Every name of vLLM's that the connector leans on besides the connector interface itself is here.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from saltern.errors import FailedPreconditionError
from saltern.vllm.fingerprint import EngineFacts, GroupFacts, require_hash_algorithm
from saltern.vllm.layout import ChainLayout, Ranks
from saltern.vllm.weights import weights_digest

#: Says where a model came from, not what it is.
_PROVENANCE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
#: Rope variants whose numbers depend on the longest sequence that the engine is configured for.
_LENGTH_DEPENDENT_ROPE: Final = ("longrope", "dynamic")
#: Settings and files of a multimodal model's processors.
_MEDIA_SETTINGS: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_device_do_normalize",
)
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Caches whose blocks are keys and values of tokens, whole once their last token is computed.
_KNOWN_SPECS: Final = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "UniformTypeKVCacheSpecs",
    }
)


def ranks_of(vllm_config: Any, kv_cache_config: Any) -> Ranks:
    parallel = vllm_config.parallel_config
    return Ranks(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        replicas=max(1, getattr(kv_cache_config, "kv_tp_replicas", 1)),
    )


def layout_of(vllm_config: Any, kv_cache_config: Any) -> ChainLayout:
    return ChainLayout(
        block_tokens=vllm_config.cache_config.block_size,
        groups=len(kv_cache_config.kv_cache_groups),
        shards=ranks_of(vllm_config, kv_cache_config).shards,
    )


def entry_bytes_of(kv_cache_config: Any) -> int:
    """The largest entry, as far as the scheduler can tell; workers measure their own tensors."""
    return max(_group_bytes(group) for group in kv_cache_config.kv_cache_groups)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse engines whose blocks cannot be shared by their hashes.

    Raises:
        FailedPreconditionError: says which property is in the way, and what to change.
    """
    require_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise _unsupported("context parallelism spreads the tokens of a block over ranks", "use tensor parallelism")
    block_tokens = vllm_config.cache_config.block_size
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    if hash_tokens not in (None, block_tokens):
        raise _unsupported(f"blocks of {block_tokens} tokens are hashed in pieces of {hash_tokens}", "")
    if not kv_cache_config.kv_cache_groups:
        raise _unsupported("this model has no KV cache", "start it without the connector")
    for group in kv_cache_config.kv_cache_groups:
        kinds = {type(spec).__name__ for spec in (group.kv_cache_spec, *_layer_specs(group.kv_cache_spec))}
        if not kinds <= _KNOWN_SPECS:
            raise _unsupported(f"a cache of the kind {sorted(kinds - _KNOWN_SPECS)[0]} is not made of token blocks", "")
        if group.kv_cache_spec.block_size != block_tokens:
            raise _unsupported(
                f"one KV cache group has blocks of {group.kv_cache_spec.block_size} tokens, another of {block_tokens}",
                "",
            )
        if not group.enable_kv_transfer or group.host_resident:
            raise _unsupported("a KV cache group of this model is not to be transferred", "")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise _unsupported("KV scales are calculated from the first requests", "use a checkpoint that has them")


def facts_of(vllm_config: Any, kv_cache_config: Any, *, weights: str, cache_folder: Path | None) -> EngineFacts:
    """All that decides over the bytes of a block; reads the weights' files where ``weights`` does not name them.

    Raises:
        SalternError: the weights cannot be read.
    """
    import vllm

    model, cache = vllm_config.model_config, vllm_config.cache_config
    ranks = ranks_of(vllm_config, kv_cache_config)
    return EngineFacts(
        engine=f"vllm {vllm.__version__}",
        weights=f"named {weights}" if weights else _weights_of(vllm_config, cache_folder),
        model=_model_of(vllm_config, with_files=not weights),
        dtype=str(model.dtype),
        kv_dtype=str(cache.cache_dtype),
        block_tokens=cache.block_size,
        layout=str(getattr(kv_cache_config, "kv_cache_layout", None)),
        hash_algorithm=cache.prefix_caching_hash_algo,
        attention_backend=_attention_of(vllm_config),
        isa=_isa_of(vllm_config, kv_cache_config),
        tensor=ranks.tensor,
        pipeline=ranks.pipeline,
        replicas=ranks.replicas,
        groups=tuple(
            GroupFacts(
                kind=type(group.kv_cache_spec).__name__,
                details=repr(group.kv_cache_spec),
                layers=len(group.layer_names),
                page_bytes=group.kv_cache_spec.page_size_bytes,
            )
            for group in kv_cache_config.kv_cache_groups
        ),
    )


def can_load_in_step(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a load that fails in a step can be told before anything of that step is stored or computed upon."""
    ranks = ranks_of(vllm_config, kv_cache_config)
    is_alone = ranks.tensor == ranks.pipeline == len(kv_cache_config.kv_cache_groups) == 1
    return is_alone and not vllm_config.scheduler_config.async_scheduling


def has_draft_layers(kv_cache_config: Any) -> bool:
    return any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)


# ---- the facts, one by one -----------------------------------------------------------------------------------------


def _weights_of(vllm_config: Any, cache_folder: Path | None) -> str:
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy {model.seed}"
    return f"digest {weights_digest(_files_of(vllm_config), cache_folder)}"


def _files_of(vllm_config: Any) -> Path:
    model = vllm_config.model_config
    path = Path(model.model)
    return path if path.exists() else _downloaded(model.model, model.revision, vllm_config.load_config.download_dir)


def _downloaded(model: str, revision: str | None, folder: str | None) -> Path:
    """Where the engine has downloaded a model to."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=folder, local_files_only=True))
    except Exception:  # whatever the hub's library says: the weights are not where it puts them
        raise FailedPreconditionError(
            f"cannot find the files of model {model!r} on this host",
            reason="NO_WEIGHTS",
            hint="give the option weights_digest: a name of your own for exactly these weights",
        ) from None


def _model_of(vllm_config: Any, *, with_files: bool) -> str:
    model = vllm_config.model_config
    config = _without_provenance(model.hf_config.to_dict())
    text = json.dumps(config, sort_keys=True, default=str)
    lengths = model.max_model_len if any(variant in text for variant in _LENGTH_DEPENDENT_ROPE) else None
    return json.dumps([text, str(model.quantization), lengths, _media_of(vllm_config, with_files=with_files)])


def _media_of(vllm_config: Any, *, with_files: bool) -> list[str]:
    """How images and other media become embeddings, where the model takes any: vLLM's hash names only the media."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return []
    told = [str(getattr(multimodal, name, None)) for name in _MEDIA_SETTINGS]
    files = [_files_of(vllm_config) / name for name in _PROCESSOR_FILES] if with_files else []
    return told + [path.read_text(encoding="utf-8") if path.is_file() else "" for path in files]


def _without_provenance(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_provenance(part) for name, part in value.items() if name not in _PROVENANCE}
    if isinstance(value, list | tuple):
        return [_without_provenance(part) for part in value]
    return value


def _attention_of(vllm_config: Any) -> str:
    """The backend that vLLM chooses for this model, with what it was told about it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, attention = vllm_config.model_config, vllm_config.attention_config
    told = f"{attention.backend} {attention.backend_per_kind} {attention.flash_attn_version}"
    with set_current_vllm_config(vllm_config):
        chosen = get_attn_backend(
            model.get_head_size(), model.dtype, vllm_config.cache_config.cache_dtype, use_mla=model.use_mla
        )
    return f"{chosen.get_name()} {told}"


def _isa_of(vllm_config: Any, kv_cache_config: Any) -> str:
    """What pages are packed for: the instruction set on CPUs, the device on accelerators."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_name()}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache, packed = vllm_config.cache_config, []
    for group in kv_cache_config.kv_cache_groups:
        for spec in _layer_specs(group.kv_cache_spec):
            head_size = getattr(spec, "head_size", None)
            packed.append(_get_attn_isa(vllm_config.model_config.dtype, spec.block_size, head_size, cache.cache_dtype))
    return f"cpu {platform.machine()} {' '.join(packed)}"


def _layer_specs(spec: Any) -> Sequence[Any]:
    """The specifications of a group's layers: its own, or those that it collects."""
    collected = getattr(spec, "kv_cache_specs", None)
    return [spec] if collected is None else list(collected.values())


def _group_bytes(group: Any) -> int:
    collected = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if collected is not None:
        return sum(spec.page_size_bytes for spec in collected.values())
    return int(len(group.layer_names) * group.kv_cache_spec.page_size_bytes)


def _unsupported(what: str, hint: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"no remote cache with this engine: {what}",
        reason="ENGINE_NOT_SUPPORTED",
        hint=hint or "start it without the connector",
    )
