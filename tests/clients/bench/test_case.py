from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saltern.bench.case import OURS, Case, Contender, Role
from saltern.bench.cpu import CpuUse, measured, pinned, process_cpu_s
from saltern.bench.peers.process import PeerError


def steady(name: str, role: Role, figure: float) -> Contender:
    return Contender(name, role, lambda: figure)


def case(unit: str, *contenders: Contender) -> Case:
    return Case("a case", unit, list(contenders))


def test_ratio_is_the_median_of_ratios_within_turns() -> None:
    ours, limit = steady(OURS, Role.OURS, 0), steady("limit", Role.LIMIT, 0)
    ours.seen, limit.seen = [1.0, 8.0, 3.0], [2.0, 4.0, 3.0]
    assert case("GB/s", ours, limit).ratio(limit) == 1.0


def test_less_is_better_in_microseconds() -> None:
    compared = case("us", steady(OURS, Role.OURS, 20), steady("limit", Role.LIMIT, 10))
    compared.turn(0)
    assert compared.ratio(compared.contenders[1]) == 0.5


def test_another_contender_begins_each_turn() -> None:
    order: list[str] = []

    def noting(name: str) -> Contender:
        return Contender(name, Role.PEER, lambda: float(order.append(name) or 1))

    compared = case("GB/s", noting("a"), noting("b"), noting("c"))
    for number in range(2):
        compared.turn(number)
    assert order == ["a", "b", "c", "b", "c", "a"]


def test_a_peer_that_fails_is_out_and_says_why_and_the_others_go_on() -> None:
    calls: list[int] = []

    def fail() -> float:
        calls.append(1)
        raise PeerError("it fell over")

    compared = case("GB/s", steady(OURS, Role.OURS, 2), Contender("peer", Role.PEER, fail))
    compared.turn(0)
    compared.turn(1)
    assert compared.ours.seen == [2, 2]
    assert compared.contenders[1].failure == "it fell over"
    assert len(calls) == 1
    assert compared.find("peer") is None


def test_warming_up_leaves_no_figures() -> None:
    use = CpuUse()

    def measure() -> float:
        use.add(1, 1, 1000)
        return 1

    compared = case("GB/s", Contender(OURS, Role.OURS, measure, use))
    compared.warm_up()
    assert compared.ours.seen == []
    assert use.moved_bytes == 0


def test_cpu_of_both_ends_is_counted_for_each_gigabyte() -> None:
    spin = "import sys\nfor _ in sys.stdin:\n sum(range(2_000_000)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        stdin, stdout, use = server.stdin, server.stdout, CpuUse()

        def ask() -> None:
            stdin.write(b"\n")
            stdin.flush()
            stdout.readline()

        before_s = process_cpu_s(server.pid)
        wall_s = measured(use, server.pid, 500_000_000, ask)
        assert 0 < use.server_s <= process_cpu_s(server.pid) - before_s
        assert wall_s > 0
        assert use.s_per_gb == pytest.approx(2 * (use.client_s + use.server_s))
        stdin.close()


def test_pinned_processes_go_where_they_were() -> None:
    before = os.sched_getaffinity(0)
    with pinned({0: {min(before)}}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
