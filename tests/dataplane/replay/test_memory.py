"""A replay's memory grows by numbers for each request (times, and blocks for references), and by no requests."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from dataplane.replay.engine import SimulatedEngine
from saltern.replay.assemble import run_replay
from saltern.replay.results import Column
from saltern.traces.request import Arrival, Identity, Provenance, Trace, TraceRequest, block_ids
from tests.dataplane.replay.test_simulation import BLOCK_TOKENS, replay, request, setup_of

#: Two times of each request, 8 bytes each, and at the end the same as numbers that are sorted.
_BYTES_A_REQUEST_MAX = 120
#: Where there are references, too: its length, where its blocks end, and for each of its 3 blocks which it is and who
#: needs it next.
_REFERENCE_BYTES_A_REQUEST_MAX = 64


def endless(requests: int) -> Trace:
    """As many requests over the same 60 blocks, made as they are read."""

    def opened() -> Iterator[TraceRequest]:
        for number in range(requests):
            first = number % 20 * 3
            yield request(float(number), first, first + 1, first + 2)

    return Trace(
        name="endless",
        provenance=Provenance(source="endless", format="test", sha256="0" * 64),
        block_tokens=BLOCK_TOKENS,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.RECORDED,
        opener=opened,
    )


def peak_bytes(requests: int) -> int:
    tracemalloc.start()
    try:
        (result,) = replay(endless(requests), setup_of(40, nodes=2), Column.SHARED)
        assert result.requests == requests
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def report_peak_bytes(requests: int) -> int:
    """Of two columns and the references, in a pool that is too small for all blocks."""
    tracemalloc.start()
    try:
        columns = [Column.COLD, Column.SHARED]
        report, _ = run_replay(endless(requests), setup_of(20, nodes=2), columns, SimulatedEngine(), lambda *_: None)
        assert report.complete and report.references.opt_hit_rate
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_four_times_the_requests_take_little_more_memory() -> None:
    peak_bytes(100)  # what is made once
    few, many = peak_bytes(200), peak_bytes(800)
    assert (many - few) / 600 < _BYTES_A_REQUEST_MAX


def test_with_references_they_take_little_more_as_well() -> None:
    report_peak_bytes(100)
    few, many = report_peak_bytes(500), report_peak_bytes(2000)
    assert (many - few) / 1500 < _BYTES_A_REQUEST_MAX + _REFERENCE_BYTES_A_REQUEST_MAX


class Counted(TraceRequest):
    """A request that says how many of its kind there are."""

    __slots__ = ()
    alive: ClassVar[int] = 0

    def __init__(self, at_s: float, block: int) -> None:
        super().__init__(arrival_s=at_s, input_tokens=BLOCK_TOKENS, block_ids=block_ids([block]))
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1


def test_no_request_outlives_its_answer() -> None:
    """Of 2,000 requests only those are there that wait, or that blocks on their way belong to."""
    most = 0

    def opened() -> Iterator[TraceRequest]:
        nonlocal most
        for number in range(2000):
            yield Counted(float(number), number % 20)
            most = max(most, Counted.alive)

    (result,) = replay(replace(endless(0), opener=opened), setup_of(40, nodes=2), Column.SHARED)
    assert result.requests == 2000
    assert 0 < most < 20
    assert Counted.alive == 0
