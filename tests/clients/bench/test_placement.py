"""The placement rule holds its figures on the trace that it was chosen by; the bench tells it apart from others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saltern.bench.placement import OURS, RULES, Figures, hit_rate, main, measure
from saltern.traces.mooncake import TraceRequest, encode_jsonl, read_trace

FOUR_TENANTS = "multitenant/four_tenants_15min.jsonl.gz"


def ours(requests: list[TraceRequest], **options: int | tuple[int, ...]) -> Figures:
    return measure(RULES[OURS], requests, **options)  # type: ignore[arg-type]


@pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="needs SALTERN_TRACES, a folder of recorded traces")
def test_losing_a_node_costs_little_and_reads_are_even_on_the_four_tenant_trace() -> None:
    requests = list(read_trace(Path(os.environ["SALTERN_TRACES"]) / FOUR_TENANTS))
    figures = ours(requests, lost=(3, 6))
    assert figures.hit >= 0.80
    assert figures.after_loss_worst >= 0.76
    assert figures.busiest <= 1.3
    assert figures.fullest <= 1.5
    assert figures.copies <= 1.5
    assert figures.nodes_asked <= 2


def conversations(count: int, turns: int, *, shared: int = 4) -> list[TraceRequest]:
    """Conversations that begin with the same blocks and grow by ten blocks in each turn, one turn of each in turn."""
    return [
        TraceRequest(
            timestamp_ms=0,
            input_tokens=512 * (shared + 10 * turn),
            block_ids=(*range(shared), *(1000 * (number + 1) + block for block in range(10 * turn))),
        )
        for turn in range(1, turns + 1)
        for number in range(count)
    ]


def test_what_is_asked_for_again_outlives_its_node_and_what_is_not_is_kept_once() -> None:
    requests = conversations(60, 6)
    assert ours(requests).after_loss_worst == pytest.approx(ours(requests).hit, abs=0.03)
    by_block = measure(RULES["block"], requests)
    assert by_block.after_loss_mean < 0.85 * by_block.hit
    scan = [
        TraceRequest(timestamp_ms=0, input_tokens=512 * 20, block_ids=tuple(range(20 * n, 20 * n + 20)))
        for n in range(100)
    ]
    assert ours(scan, lost=(0,)).copies == 1.0


def test_one_node_holds_everything_once() -> None:
    figures = ours(conversations(10, 4), nodes=1, lost=())  # type: ignore[arg-type]
    assert (figures.copies, figures.busiest, figures.nodes_asked) == (1.0, 1.0, 1.0)


def test_the_hit_rate_counts_tokens_over_the_window_behind_the_half() -> None:
    same = [TraceRequest(timestamp_ms=0, input_tokens=1000, block_ids=(1, 2))] * 10
    assert hit_rate(RULES["root"](2, 512), same, 512) == 1.0
    world = RULES["root"](2, 512)
    [held_by] = {node for node in (0, 1) if hit_rate(RULES["root"](2, 512), same, 512, node) < 1.0}
    assert hit_rate(world, same, 512, held_by) == pytest.approx(4 / 5)


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(encode_jsonl(conversations(4, 3)))
    main([str(trace), "--nodes", "2", "3", "--clients", "2", "--sticky"])
    printed = capsys.readouterr().out
    assert printed.count("| pair (ours) |") == 2 and "12 requests, 3 nodes" in printed
