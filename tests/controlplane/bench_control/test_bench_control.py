"""The bench's own arithmetic and its bare limit; the whole of it is run by hand (make bench-control)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import asdict

import grpc
import pytest

from controlplane.bench_control.echo import METHOD
from controlplane.bench_control.exchange import table
from controlplane.bench_control.measure import Rate, keep_in_flight, median
from controlplane.bench_control.targets import TARGETS, judge
from controlplane.bench_control.targets import table as target_table


async def test_so_many_calls_are_in_flight_and_none_is_lost() -> None:
    now = most = calls = 0

    async def call() -> None:
        nonlocal now, most, calls
        now, calls = now + 1, calls + 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    rate = await keep_in_flight(call, in_flight=7, duration_s=0.05, server_pid=os.getpid())
    assert (now, most) == (0, 7) and rate.per_s > 0 and 0 <= rate.p50_ms <= rate.p99_ms
    assert rate.server_cpu_us >= 0 and calls >= 7


async def test_an_error_of_a_call_ends_the_measurement() -> None:
    async def call() -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        await keep_in_flight(call, in_flight=2, duration_s=0.01)


async def test_the_echo_answers_what_it_was_asked() -> None:
    command = [sys.executable, "-m", "controlplane.bench_control.echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        endpoint = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with grpc.aio.insecure_channel(endpoint) as channel:
            assert await channel.unary_unary(METHOD)(b"payload") == b"payload"
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 30) == 0


def test_the_report_shows_the_round_in_the_middle() -> None:
    rates = [Rate(per_s, 1.0, 2.0, 3.0) for per_s in (10.0, 30.0, 20.0)]
    middle = median(rates)
    assert middle.per_s == 20.0
    names = ("echo", "commit", "exchange_alone", "exchange")
    report = {"cpus": 2, "load_average_1_min": 0.5, "tenants": 3, "in_flight": 4, "rounds": 3}
    shown = table(report | {name: asdict(middle) for name in names})
    assert shown.count("20") >= 4 and "keys of 3 tenants" in shown


def test_targets_are_held_against_what_was_measured_and_nothing_else() -> None:
    policy = {"quota_ms": {"p99": 501.0}, "revocation_ms": {"p99": 999.0}, "snapshot_load_ms": {"max": 1000.0}}
    report = {"exchange": {"exchange": {"per_s": 1000.0}}, "policy": policy, "audit": {"failure": "TimeoutError: "}}
    verdicts = [one["verdict"] for one in judge(report)]
    assert verdicts == ["met", "missed", "met", "met", "not measured", "not measured", "not measured"]
    assert len(target_table(judge(report)).splitlines()) == len(TARGETS)
