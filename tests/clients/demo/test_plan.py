"""What the demo decides before it starts anything: payloads, the split of a trace, quotas, percentiles. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.demo.payload import block_payload, differing_bytes, engine_block_hash
from saltern.demo.plan import TENANTS, check_memory, default_trace, load_trace, make_plan
from saltern.demo.report import percentile
from saltern.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from saltern.traces import Trace, TraceRequest


def trace_of(*blocks: tuple[int, ...], tenants: tuple[str, ...] = ()) -> Trace:
    names = tenants or ("",) * len(blocks)
    return Trace(
        "test",
        "0" * 64,
        tuple(
            TraceRequest(timestamp_ms=index, input_tokens=512 * len(ids), block_ids=ids, tenant=name)
            for index, (ids, name) in enumerate(zip(blocks, names, strict=True))
        ),
    )


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(33, 4096))
def test_payloads_repeat_and_differ_by_tenant_block_and_position(first: int, second: int, size_bytes: int) -> None:
    payload = block_payload("alpha", first, size_bytes)
    assert payload == block_payload("alpha", first, size_bytes)
    assert len(payload) == size_bytes
    assert payload != block_payload("beta", first, size_bytes)
    assert first == second or payload != block_payload("alpha", second, size_bytes)
    assert payload[16:] != payload[:-16], "a shifted block is found"
    assert block_payload("alpha", first, size_bytes + 7)[:size_bytes] == payload


def test_one_wrong_missing_or_surplus_byte_is_counted() -> None:
    payload = block_payload("alpha", 1, 1000)
    assert differing_bytes(payload, memoryview(payload)) == 0
    changed = bytearray(payload)
    changed[500] ^= 1
    assert differing_bytes(payload, memoryview(changed)) == 1
    assert differing_bytes(payload, memoryview(payload)[:-3]) == 3
    assert differing_bytes(payload, memoryview(payload + b"x")) == 1


def test_engine_hashes_are_the_same_for_every_tenant_and_differ_by_block() -> None:
    assert len({engine_block_hash(block) for block in range(1000)}) == 1000


def test_a_conversation_stays_with_one_tenant_and_shared_heads_go_to_both() -> None:
    plan = make_plan(trace_of((0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (9,)))
    assert [tenant for tenant, _ in plan.order] == ["alpha", "beta", "alpha", "beta", "alpha"]
    shared = {block for _, request in plan.order for block in request.block_ids if block == 0}
    assert shared == {0}


def test_a_trace_that_names_tenants_is_split_by_them() -> None:
    plan = make_plan(trace_of((0, 1), (5, 1), (0, 2), (7, 1), tenants=("x", "y", "x", "z")))
    assert [tenant for tenant, _ in plan.order] == ["alpha", "beta", "alpha", "alpha"]
    assert plan.tenants[0].working_set_blocks == 5, "block 1 of x is not block 1 of z"


def test_a_plan_that_the_machine_has_no_memory_for_is_refused() -> None:
    plan = make_plan(trace_of((0, 1), (0, 2)))
    check_memory(plan)
    with pytest.raises(ResourceExhaustedError, match="free here"):
        check_memory(replace(plan, dram_bytes=2**50))


def test_quotas_fit_alpha_press_beta_and_the_node_holds_both() -> None:
    plan = make_plan(load_trace(None, requests=300))
    alpha, beta = plan.tenants
    assert (alpha.tenant, beta.tenant) == TENANTS
    assert alpha.working_set_blocks * plan.block_bytes <= alpha.limit_bytes
    assert beta.working_set_blocks * plan.block_bytes > beta.limit_bytes
    assert alpha.reserved_bytes + beta.reserved_bytes <= plan.dram_bytes
    for tenant in plan.tenants:
        assert tenant.reserved_bytes <= tenant.limit_bytes
        assert max(len(request.block_ids) for request in tenant.requests) * plan.block_bytes <= tenant.limit_bytes
    assert sum(len(tenant.requests) for tenant in plan.tenants) == 300


def test_a_trace_of_one_conversation_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no request for tenant beta"):
        make_plan(trace_of((0, 1), (0, 1, 2)))


def test_the_trace_is_the_named_one_else_that_of_the_folder_else_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_TRACES", str(tmp_path))
    assert default_trace() is None
    path = tmp_path / "mooncake" / "conversation_trace.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(b"")
    assert default_trace() == path
    monkeypatch.delenv("SALTERN_TRACES")
    assert default_trace() is None
    assert load_trace(None, requests=5) == load_trace(None, requests=5)
    with pytest.raises(NotFoundError):
        load_trace(tmp_path / "absent", requests=5)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 99) == 99.0
    assert percentile([1.5], 99) == 1.5
