"""``saltern plan``: a suggestion that its own simulation has checked, or why there is none."""

from __future__ import annotations

import csv
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from saltern.cli import main
from saltern.replay.arrivals import Arrivals
from saltern.traces.request import TraceRequest
from tests.clients.replay.pages import faults_of

MACHINE = ["--model", "qwen2.5-7b", "--hardware", "1xh100", "--engines", "2"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Chats that come back, and a scan that never does; 64 tokens in a block of 3,670,016 bytes."""
    chance = random.Random(7)
    rows = []
    for number in range(240):
        chat = chance.randrange(12)
        rows.append(_row(number, "chat", [chat * 100 + depth for depth in range(chance.randrange(4, 12))]))
        if number % 4 == 0:
            rows.append(_row(number, "scan", [50_000 + number * 20 + depth for depth in range(8)]))
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _row(number: int, tenant: str, ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": 500 * number,
        "input_length": 64 * len(ids),
        "output_length": 5,
        "hash_ids": ids,
        "tenant": tenant,
    }


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, *MACHINE, "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_hit_rate_is_reached_in_the_simulation_that_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(trace), "--hit-rate", "0.5")
    chosen = plan["trials"][plan["chosen"]]
    assert plan["reached"]
    assert 0.4995 <= chosen["simulatedHitRate"] <= 1
    assert chosen["nodes"] == plan["setup"]["nodes"]
    assert plan["tenants"]["chat"]["dramReservedBytes"] > 0
    assert plan["tenants"]["scan"]["dramReservedBytes"] == 0, "who gains nothing is reserved nothing"
    assert plan["setup"]["quotas"]["chat"]["reservedBytes"] == plan["tenants"]["chat"]["dramReservedBytes"]
    assert plan["infiniteHitRate"] >= chosen["predictedHitRate"]


def test_what_no_cache_reaches_is_said_with_what_an_infinite_one_hits(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(capsys, str(trace), "--hit-rate", "0.99")
    assert not plan["reached"]
    assert plan["verdict"].startswith("not reached: no cache reaches a hit rate of 0.9900")
    assert f"one without end hits {plan['infiniteHitRate']:.4f}" in plan["verdict"]
    assert len(plan["trials"]) == 1


def test_a_target_of_time_takes_the_least_cache_that_meets_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    easy = planned(capsys, str(trace), "--slo-ttft-ms", "60000")
    assert easy["reached"]
    assert easy["trials"][easy["chosen"]]["withinShare"] >= 0.95
    never = planned(capsys, str(trace), "--slo-ttft-ms", "0.001")
    assert not never["reached"]
    assert "0.0% of requests within 1e-06 s where 95.0% are wanted" in never["verdict"]


def test_a_budget_is_kept_and_one_that_is_too_small_is_said(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(trace), "--budget", "0.002")
    assert plan["reached"]
    assert 0 < plan["trials"][plan["chosen"]]["usdPerHour"] <= 0.002
    dear = planned(capsys, str(trace), "--hit-rate", "0.6", "--budget", "0.0005")
    assert not dear["reached"]
    assert "and the budget is 0.00" in dear["verdict"]
    assert dear["trials"][dear["chosen"]]["usdPerHour"] <= 0.0005


def test_ssd_takes_most_where_there_is_some(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(trace), "--hit-rate", "0.5", "--node-ssd", "100GiB")
    chat = plan["tenants"]["chat"]
    assert chat["ssdReservedBytes"] > chat["dramReservedBytes"]
    assert plan["trials"][plan["chosen"]]["ssdHitRate"] > 0
    assert plan["reached"]


def test_tables_curve_and_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"plan.{name}" for name in ("json", "csv", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main(["plan", str(trace), "--hit-rate", "0.5", *MACHINE, *options]) == 0
    shown = capsys.readouterr().out
    said = json.loads(files["json"].read_text())
    for told in ("reach", "SIMULATED", "PREDICTED", "suggested", "RESERVE DRAM", said["trace"]["sha256"], "Mattson"):
        assert told in shown
    assert f"saltern replay {trace}" in shown
    lines = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert {line["tenant"] for line in lines} == {"", "chat", "scan"}
    rates = [float(line["lru_hit_rate"]) for line in lines if not line["tenant"]]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(said["infiniteHitRate"], abs=1e-6)
    page = files["html"].read_text()
    assert faults_of(page) == []
    assert page.count('role="img"') == 3
    assert "Reached." in page


def test_the_command_that_it_prints_replays_what_it_suggests(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    file = tmp_path / "plan.json"
    assert main(["plan", str(trace), "--hit-rate", "0.5", *MACHINE, "--json", str(file)]) == 0
    command = capsys.readouterr().out.rpartition("of it: ")[2]
    plan = json.loads(file.read_text())
    assert main([*shlex.split(command)[1:], "--column", "shared", "-o", "json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["columns"][0]["hitRate"] == plan["trials"][plan["chosen"]]["simulatedHitRate"]


@pytest.mark.parametrize("arguments", [[], ["--hit-rate", "2"], ["--hit-rate", "0.5", "--sample", "0"]])
def test_what_makes_no_sense_is_one_error(
    trace: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(trace), *MACHINE, *arguments]) == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_a_trace_without_prefixes_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n")
    assert main(["plan", str(path), "--hit-rate", "0.5", *MACHINE]) == 2
    assert "no prefix identity" in capsys.readouterr().err


# ---- Ctrl-C


def interrupt(monkeypatch: pytest.MonkeyPatch, *, in_simulation: int) -> None:
    """Send SIGINT when that simulation has read 100 requests."""
    read: Counter[Arrivals] = Counter()
    first = Arrivals.first

    def counted(arrivals: Arrivals) -> tuple[float, TraceRequest] | None:
        read[arrivals] += 1
        if len(read) == in_simulation and read[arrivals] == 100:
            signal.raise_signal(signal.SIGINT)
        return first(arrivals)

    monkeypatch.setattr(Arrivals, "first", counted)


@pytest.mark.parametrize("in_simulation", [1, 2])
def test_interrupted_it_prints_what_is_known_so_far(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_simulation: int
) -> None:
    command = ["plan", str(trace), "--slo-ttft-ms", "200", *MACHINE]
    interrupt(monkeypatch, in_simulation=in_simulation)
    assert main([*command, "-o", "json"]) == 130
    plan = json.loads(capsys.readouterr().out)
    assert not plan["complete"] and not plan["reached"]
    assert [trial["complete"] for trial in plan["trials"]] == [True] * (in_simulation - 1) + [False]
    assert plan["chosen"] == 0 and plan["tenants"]["chat"]["predictedHitRate"] > 0
    assert plan["verdict"].startswith("not finished, interrupted: ")
    interrupt(monkeypatch, in_simulation=in_simulation)
    assert main(command) == 130
    shown = capsys.readouterr().out
    assert "NOT COMPLETE (interrupted)" in shown and "(part)" in shown


def test_interrupted_before_anything_was_simulated_there_is_no_plan(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltern.replay.plan.survey", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["plan", str(trace), "--hit-rate", "0.5", *MACHINE]) == 130
    assert "plan" not in capsys.readouterr().out
