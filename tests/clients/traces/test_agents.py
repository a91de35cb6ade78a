"""The generator of agent sessions: deterministic, and shaped like agents."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

from saltern.errors import InvalidArgumentError
from saltern.traces import BLOCK_TOKENS, AgentWorkload, encode_jsonl, generate_agent_requests


def test_one_seed_gives_the_same_bytes_on_every_machine() -> None:
    encoded = encode_jsonl(generate_agent_requests(seed=7, tenants=("alpha", "beta"), requests=300))
    assert hashlib.sha256(encoded).hexdigest() == "e3d2317a6273cdaf25741f97e300b4f885ebc746fd83dc64eb6659f115c19d0f"
    other = generate_agent_requests(seed=8, tenants=("alpha", "beta"), requests=300)
    assert encode_jsonl(other) != encoded


def test_sessions_share_their_tenants_system_prompt_and_nothing_with_the_other() -> None:
    shape = AgentWorkload(system_blocks=5)
    requests = generate_agent_requests(seed=1, tenants=("alpha", "beta"), requests=400, workload=shape)
    heads, blocks = defaultdict(set), defaultdict(set)
    for request in requests:
        heads[request.tenant].add(request.block_ids[:5])
        blocks[request.tenant].update(request.block_ids)
    assert all(len(head) == 1 for head in heads.values())
    assert not blocks["alpha"] & blocks["beta"]


def test_turns_extend_their_context_and_blocks_match_lengths() -> None:
    requests = generate_agent_requests(seed=3, tenants=("alpha",), requests=400)
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)
    seen: set[int] = set()
    hit_tokens = 0
    for request in requests:
        assert len(request.block_ids) == -(-request.input_tokens // BLOCK_TOKENS)
        assert len(set(request.block_ids)) == len(request.block_ids)
        hits = [block in seen for block in request.block_ids]
        prefix = hits.index(False) if False in hits else len(hits)
        assert not any(hits[prefix:]), "a block after a miss cannot have been seen: ids name their whole prefix"
        hit_tokens += min(request.input_tokens, prefix * BLOCK_TOKENS)
        seen.update(request.block_ids)
    assert hit_tokens / sum(r.input_tokens for r in requests) > 0.7, "agents come back with almost their whole context"


@pytest.mark.parametrize(("tenants", "requests"), [((), 1), (("a",), 0), (("a",), -1), (("a",), 10**9)])
def test_absurd_workloads_are_refused(tenants: tuple[str, ...], requests: int) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot generate"):
        generate_agent_requests(seed=1, tenants=tenants, requests=requests)
