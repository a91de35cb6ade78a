"""Any difference in what decides over a block's bytes is another name, and so a miss (I7)."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from saltern.errors import FailedPreconditionError
from saltern.vllm.fingerprint import EngineFacts, GroupFacts, bindings_of, fingerprint_of, require_hash_algorithm
from saltern.vllm.layout import ChainLayout, Ranks

GROUP = GroupFacts(kind="FullAttentionSpec", details="heads=8", layers=32, page_bytes=65536)
FACTS = EngineFacts(
    engine="vllm 0.32.0",
    weights="digest 00",
    model="{}",
    dtype="bfloat16",
    kv_dtype="auto",
    block_tokens=16,
    layout="NHD",
    hash_algorithm="sha256_cbor",
    attention_backend="CPU_ATTN",
    isa="cpu x86_64 amx",
    tensor=1,
    pipeline=1,
    replicas=1,
    groups=(GROUP,),
)


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return value + "x"
    return value + 1 if isinstance(value, int) else (*value, GROUP)


@pytest.mark.parametrize("name", EngineFacts.__struct_fields__)
def test_i7_each_fact_of_an_engine_matters(name: str) -> None:
    changed = msgspec.structs.replace(FACTS, **{name: _other(getattr(FACTS, name))})
    assert fingerprint_of(changed) != fingerprint_of(FACTS)


@pytest.mark.parametrize("name", GroupFacts.__struct_fields__)
def test_i7_each_fact_of_a_group_matters(name: str) -> None:
    group = msgspec.structs.replace(GROUP, **{name: _other(getattr(GROUP, name))})
    assert fingerprint_of(msgspec.structs.replace(FACTS, groups=(group,))) != fingerprint_of(FACTS)


def test_facts_that_move_from_one_field_to_the_next_are_other_facts() -> None:
    one = msgspec.structs.replace(FACTS, dtype="a", kv_dtype="bc")
    two = msgspec.structs.replace(FACTS, dtype="ab", kv_dtype="c")
    assert fingerprint_of(one) != fingerprint_of(two)


def test_the_same_facts_are_the_same_name_in_every_process() -> None:
    assert fingerprint_of(FACTS).hex() == "1df68ed0219f84af9fd4c2c84a70b320b6b240b8817344a03c86cf325f45194c"


def test_every_group_shard_and_adapter_has_a_binding_of_its_own() -> None:
    fingerprint = fingerprint_of(FACTS)
    plain = bindings_of(fingerprint, groups=2, shards=3)
    tuned = bindings_of(fingerprint, groups=2, shards=3, adapter=b"a" * 32)
    assert len({*plain, *tuned}) == 12
    assert {len(binding) for binding in plain} == {32}


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor"])
def test_hashes_that_differ_between_processes_or_collide_are_refused(algorithm: str) -> None:
    require_hash_algorithm("sha256_cbor")
    with pytest.raises(FailedPreconditionError, match="sha256_cbor"):
        require_hash_algorithm(algorithm)


def test_entries_of_a_block_lie_side_by_side_and_a_prefix_counts_whole_blocks() -> None:
    layout = ChainLayout(block_tokens=96, groups=2, shards=3)
    positions = [layout.position(block, group, shard) for block in range(2) for group in range(2) for shard in range(3)]
    assert positions == list(range(12))
    assert [layout.blocks_in(entries) for entries in (0, 5, 6, 11, 12)] == [0, 0, 1, 1, 2]
    assert layout.tokens_per_entry == 16
    bindings = [bytes([number]) * 32 for number in range(6)]
    hashes = layout.hashes([b"h" * 32, b"i" * 32], bindings)
    assert hashes[layout.position(1, 1, 2)] == bindings[5] + b"i" * 32
    assert len(set(hashes)) == 12


@pytest.mark.parametrize(
    ("ranks", "shards", "of_rank", "stored_by"),
    [
        (Ranks(), 1, [0], [0]),
        (Ranks(tensor=4), 4, [0, 1, 2, 3], [0, 1, 2, 3]),
        (Ranks(tensor=4, replicas=4), 1, [0, 0, 0, 0], [0]),
        (Ranks(tensor=4, replicas=2), 2, [0, 0, 1, 1], [0, 2]),
        (Ranks(tensor=2, pipeline=2), 4, [0, 1, 2, 3], [0, 1, 2, 3]),
        (Ranks(tensor=2, pipeline=2, replicas=2), 2, [0, 0, 1, 1], [0, 2]),
    ],
)
def test_ranks_that_hold_the_same_bytes_share_a_shard_that_one_of_them_stores(
    ranks: Ranks, shards: int, of_rank: list[int], stored_by: list[int]
) -> None:
    every_rank = range(ranks.tensor * ranks.pipeline)
    assert ranks.shards == shards
    assert [ranks.shard_of(rank) for rank in every_rank] == of_rank
    assert [rank for rank in every_rank if ranks.stores(rank)] == stored_by
    assert all(ranks.shard_of(one) != ranks.shard_of(other) for one, other in itertools.combinations(stored_by, 2))
