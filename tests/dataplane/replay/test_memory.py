"""A replay's memory grows by its figures of time, and not by the requests that it has served."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from saltern.replay.results import Column
from saltern.traces.request import Arrival, Identity, Provenance, Trace, TraceRequest
from tests.dataplane.replay.test_simulation import BLOCK_TOKENS, replay, request, setup_of

#: Two times of each request, 8 bytes each, and at the end the same as numbers that are sorted.
_BYTES_A_REQUEST_MAX = 200


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


def test_four_times_the_requests_take_little_more_memory() -> None:
    peak_bytes(100)  # what is made once
    few, many = peak_bytes(200), peak_bytes(800)
    assert (many - few) / 600 < _BYTES_A_REQUEST_MAX
