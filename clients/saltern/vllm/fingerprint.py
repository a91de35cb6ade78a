"""What must be equal for the bytes of a block to mean the same: anything else is a miss, never a wrong byte (I7).

::

    fingerprint = BLAKE2b-256(frame of every fact of the engine)
    binding     = BLAKE2b-256(frame(fingerprint, group, shard, adapter))      one for each entry of a block
    chain hash  = binding || engine block hash                                what ``Client.chain`` is given

The SDK then hashes that under the tenant's salt and the namespace's own model fingerprint. The engine's block hash
carries tokens, cache salt, image and prompt-embedding digests and a LoRA adapter's name; what the name cannot carry,
the adapter's weights, is bound here.
"""

from __future__ import annotations

import hashlib
from typing import Final, NewType

import msgspec

from saltern.errors import FailedPreconditionError
from saltern.keys import frame

Fingerprint = NewType("Fingerprint", bytes)
Binding = NewType("Binding", bytes)

DIGEST_BYTES: Final = 32
#: The one algorithm whose hashes are equal in every process for equal content, and cannot be made to collide.
HASH_ALGORITHM: Final = "sha256_cbor"
_FINGERPRINT_LABEL: Final = "saltern/vllm/fingerprint/1"
_BINDING_LABEL: Final = "saltern/vllm/binding/1"


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group.

    Attributes:
        kind: class of vLLM's specification, such as ``FullAttentionSpec``.
        details: whatever else the specification says (heads, head size, window, quantisation), as text.
        layers: how many layers the group has.
        page_bytes: of one layer and block.
    """

    kind: str
    details: str
    layers: int
    page_bytes: int


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an engine that decides over the bytes in its blocks.

    Attributes:
        engine: name and version of the engine: the interior of a page is its own affair.
        weights: digest of the weights' content, not their path.
        model: digest of the model's configuration, with overrides.
        dtype, kv_dtype: of activations and of the cache.
        block_tokens: tokens in a block.
        layout: order of a page's dimensions in memory.
        hash_algorithm: of the engine's block hashes.
        attention_backend: which kernels write the pages, and with which options.
        isa: instruction set or device that they are packed for.
        tensor, pipeline, replicas: see :class:`saltern.vllm.layout.Ranks`.
        groups: the KV cache groups.
    """

    engine: str
    weights: str
    model: str
    dtype: str
    kv_dtype: str
    block_tokens: int
    layout: str
    hash_algorithm: str
    attention_backend: str
    isa: str
    tensor: int
    pipeline: int
    replicas: int
    groups: tuple[GroupFacts, ...]


def fingerprint_of(facts: EngineFacts) -> Fingerprint:
    """The digest of all facts; each is framed with its name, so that no two sets of facts share an encoding."""
    parts: list[str | bytes | int] = [_FINGERPRINT_LABEL]
    for name in facts.__struct_fields__:
        value = getattr(facts, name)
        if name == "groups":
            for group in facts.groups:
                parts += ["group", group.kind, group.details, group.layers, group.page_bytes]
        else:
            parts += [name, value]
    return Fingerprint(_digest(frame(*parts)))


def bindings_of(fingerprint: Fingerprint, *, groups: int, shards: int, adapter: bytes = b"") -> tuple[Binding, ...]:
    """One binding for each entry of a block, in chain order.

    Args:
        adapter: digest of the LoRA adapter's weights; empty for none.
    """
    return tuple(
        Binding(_digest(frame(_BINDING_LABEL, fingerprint, group, shard, adapter)))
        for group in range(groups)
        for shard in range(shards)
    )


def require_hash_algorithm(algorithm: str) -> None:
    """Refuse block hashes that differ between processes, or that somebody could make collide.

    Raises:
        FailedPreconditionError: the engine's algorithm is another one.
    """
    if algorithm == HASH_ALGORITHM:
        return
    raise FailedPreconditionError(
        f"the engine hashes blocks with {algorithm!r}, whose hashes cannot be shared between processes",
        reason="HASH_ALGORITHM_NOT_SHARED",
        hint=f"start the engine with --prefix-caching-hash-algo {HASH_ALGORITHM}",
    )


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=DIGEST_BYTES).digest()
