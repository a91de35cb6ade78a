"""Latencies: every duration in exactly one bucket, counted for its door and its tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.metrics.meters import BUCKETS_S, OPERATIONS, Histogram, Meters, Operation, Transport
from saltern.names import TenantId
from saltern.wire import Opcode


@given(st.lists(st.integers(0, 20 * 10**9)))
def test_a_duration_is_counted_in_the_first_bucket_that_holds_it(durations_ns: list[int]) -> None:
    histogram = Histogram()
    for elapsed_ns in durations_ns:
        histogram.observe(elapsed_ns)
    cumulated = 0
    for bound_s, count in zip(BUCKETS_S, histogram.counts, strict=False):
        cumulated += count
        assert cumulated == sum(elapsed_ns <= round(bound_s * 1e9) for elapsed_ns in durations_ns)
    assert sum(histogram.counts) == len(durations_ns)
    assert histogram.total_ns == sum(durations_ns)


def test_every_opcode_has_an_operation_and_tenants_are_told_apart() -> None:
    meters, acme, blue = Meters(), TenantId("acme"), TenantId("blue")
    door = meters.doors[Transport.TCP]
    for opcode in Opcode:
        door.observe(opcode, acme, 1_000)
    door.observe(Opcode.GET, blue, 5)
    door.observe(Opcode.HELLO, None, 7)
    assert sum(door.histograms[Operation.GET].counts) == 2
    assert sum(door.histograms[Operation.SESSION].counts) == len(Opcode) - 4 + 1
    spent = meters.spent(acme)
    assert spent is not None
    assert spent.requests[OPERATIONS.index(Operation.PUT)] == 1
    assert sum(spent.total_ns) == 1_000 * len(Opcode)
    meters.retain([blue])
    assert meters.spent(acme) is None and meters.spent(blue) is not None
    assert not any(sum(other.counts) for other in meters.doors[Transport.SHM].histograms.values())
