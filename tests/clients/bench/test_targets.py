from __future__ import annotations

import json

import pytest

from saltern.bench.batches import BatchResult
from saltern.bench.case import OURS, Case, Contender, Role
from saltern.bench.cpu import CpuUse
from saltern.bench.report import BenchReport, PeerNote
from saltern.bench.targets import Target, targets


def contender(name: str, role: Role, figure: float, cpu_s: float | None = None, failure: str = "") -> Contender:
    cpu = None if cpu_s is None else CpuUse(cpu_s / 2, cpu_s / 2, 10**9)
    return Contender(name, role, lambda: figure, cpu, [] if failure else [figure], failure)


def transfer(*peers: Contender) -> Case:
    ours = contender(OURS, Role.OURS, 2.0, 0.6)
    return Case("TCP put 1 MiB", "GB/s", [ours, contender("bare socket pair", Role.LIMIT, 2.0), *peers])


def by_name(case: Case) -> dict[str, Target]:
    return {target.name: target for target in targets([case], [])}


def test_transfers_are_held_against_the_socket_mooncake_and_the_best_peer() -> None:
    mooncake = contender("Mooncake", Role.PEER, 1.0, 1.5)
    redis = contender("Redis", Role.PEER, 2.5, 2.0)
    seen = by_name(transfer(mooncake, redis))
    assert seen["TCP put 1 MiB / bare socket pair"].verdict == "met"
    assert (seen["TCP put 1 MiB / Mooncake"].figure, seen["TCP put 1 MiB / Mooncake"].verdict) == (2.0, "met")
    assert (seen["TCP put 1 MiB / best peer"].verdict, seen["TCP put 1 MiB / best peer"].note) == ("missed", "Redis")
    cpu = seen["TCP put 1 MiB, CPU s/GB / best peer"]
    assert (cpu.figure, cpu.verdict, cpu.note) == (pytest.approx(0.4), "met", "Mooncake")


def test_a_peer_that_failed_is_not_measured_with_its_reason() -> None:
    seen = by_name(transfer(contender("Mooncake", Role.PEER, 0, failure="TRANSFER_FAIL")))
    mooncake = seen["TCP put 1 MiB / Mooncake"]
    assert (mooncake.verdict, mooncake.note) == ("not measured", "TRANSFER_FAIL")
    assert seen["TCP put 1 MiB / best peer"].verdict == "not measured"


def test_one_key_is_held_against_a_ping_pong_from_above() -> None:
    case = Case(
        "exists, 1 key, p50",
        "us",
        [contender(OURS, Role.OURS, 24), contender("bare ping-pong", Role.LIMIT, 16)],
    )
    [target] = targets([case], [])
    assert (target.figure, target.at_most, target.verdict) == (1.5, True, "missed")


def test_only_our_own_batches_are_targets() -> None:
    batches = [BatchResult(OURS, 3000, 1, 1, 1), BatchResult("Mooncake", 3000, failure="-800")]
    assert [target.verdict for target in targets([], batches)] == ["met"]


def test_the_report_names_who_did_not_run_and_says_the_same_in_each_form() -> None:
    failed = contender("LMCache server", Role.PEER, 0, failure="it hung up")
    report = BenchReport(
        turns=1,
        batch_bytes=1,
        private_network=False,
        load_before=0.5,
        cases=[transfer(failed)],
        batches=[BatchResult("Mooncake", 3000, failure="code -800 | of 3")],
        latency_ms={"tcp": {"put": {"p50_ms": 1.0, "p99_ms": 2.0}}},
        authentication={"gate_check_ns": 500.0},
        peers=[PeerNote("Redis", "", {}, "not installed")],
    )
    said = json.loads(json.dumps(report.as_json()))
    assert said["schema"] == "saltern.bench/2"
    assert said["peers"][0]["reason"] == "not installed"
    assert said["cases"][0]["contenders"][2] == {
        "name": "LMCache server",
        "role": "peer",
        "figure": None,
        "seen": [],
        "ours_to_it": None,
        "cpu_s_per_gb": None,
        "failure": "it hung up",
    }
    markdown = report.as_markdown()
    assert "| TCP put 1 MiB | GB/s | 2.00 | 2.00 bare socket pair | failed |" in markdown
    assert "| Redis | not installed |" in markdown
    assert "code -800 / of 3" in markdown  # a bar would end the cell
