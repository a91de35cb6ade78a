"""The fleet's day on a small scale: quotas hold, books are exact, a lost node costs hits. ``make fleet-day``: all."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from saltern.replay.results import Column, Series
from saltern.traces.compositions import build, composition_from
from tests.replay.fleet_day import (
    BLOCK_TOKENS,
    COLUMNS,
    DAY_S,
    above_limits,
    composition,
    every_two_hours,
    held,
    print_day,
    serve,
    setup_of,
)

_BLOCK_BYTES = 64 * 2**20  # of 512 tokens of the model that the fleet serves


def chats(path: Path) -> None:
    """Ten conversations that grow by a block from turn to turn."""
    chance = random.Random(3)
    turns = dict.fromkeys(range(10), 2)
    with path.open("w") as out:
        for number in range(120):
            chat = chance.randrange(10)
            turns[chat] += 1
            ids = [chat * 1000 + depth for depth in range(turns[chat])]
            row = {"timestamp": 1000 * number, "input_length": BLOCK_TOKENS * len(ids), "output_length": 5}
            out.write(json.dumps(row | {"hash_ids": ids}) + "\n")


def small(folder: Path) -> dict[str, Any]:
    """Three tenants that chat through their working day, and one that scans."""
    chats(folder / "chats.jsonl")
    part = {"trace": "chats.jsonl", "scale_time": 300.0}
    tenants: dict[str, Any] = {f"chat-{number}": part | {"shift_s": 20_000.0 * number} for number in range(3)}
    tenants["scan"] = {"scan": {"rate_per_s": 0.002, "duration_s": DAY_S, "input_tokens": 4096}}
    return {"block_tokens": BLOCK_TOKENS, "clip": {"end_s": DAY_S}, "tenants": tenants}


def test_i4_i5_no_tenant_is_above_its_limit_all_day_and_a_scan_takes_nothing_that_is_reserved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = held(build(composition_from(small(tmp_path), "small"), tmp_path))
    setup = setup_of(["chat-0", "chat-1", "chat-2", "scan"], nodes=3, node_bytes=80 * _BLOCK_BYTES)
    day = serve(trace, setup)
    assert day.broken == []
    assert tuple(day.columns) == COLUMNS
    shared, lost = day.columns[Column.SHARED], day.columns[Column.NODE_LOST]
    assert shared.recorded_s > 0.9 * DAY_S
    assert min(day.rho(Column.SHARED).values()) > 0.95, "what is reserved is what a tenant has alone"
    assert lost.hit_tokens < shared.hit_tokens
    most_bytes = max(shared.series.occupancy_bytes["scan"])
    assert above_limits(shared, {"scan": most_bytes}) == []
    assert len(above_limits(shared, {"scan": most_bytes - 1})) == 1, "what is above a limit is found"
    print_day(day)
    shown = capsys.readouterr().out
    assert "least hit rate over that alone" in shown and "node-lost:" in shown


def test_hours_without_a_request_stay_where_they_are() -> None:
    series = Series(bin_s=3600.0, hit_rate=[0.2, 0.4, None, None, None, 0.5, 0.1])
    assert every_two_hours(series) == [pytest.approx(0.3), None, 0.5, 0.1]


def test_a_hundred_tenants_are_composed_of_what_there_is() -> None:
    wanted = composition(100)
    parts = composition_from(wanted, "the fleet's day").tenants
    assert len(parts) == 100
    kinds = [name.rpartition("-")[0] for name in parts]
    assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
        "chat": 40, "tool": 30, "agent": 20, "documents": 8, "scan": 2,
    }  # fmt: skip
    assert all(part.scan is not None or part.trace is not None for part in parts.values())
