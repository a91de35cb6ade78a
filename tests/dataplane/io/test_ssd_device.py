"""What the SSD store does on a device that fails, fills up or stops, and what it says about it."""

from __future__ import annotations

import errno

import pytest

from dataplane.core.segments import BLOCK_BYTES
from dataplane.io.ssd import SsdState
from dataplane.io.ssd_places import place_of
from saltern.names import TenantId
from tests.support.cache_node import key_of
from tests.support.ssd_lives import Start, fill, on_ssd, status, value_of
from tests.support.ssd_node import FaultyFiles


def test_i7_a_rotten_record_is_a_miss_and_the_tier_says_so(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    entry = node.tier.find(partition, key_of(2))
    assert entry is not None
    path = node.disk.path(place_of(entry.segment))
    with path.open("r+b") as file:
        file.seek((entry.block + 1) * BLOCK_BYTES + 77)
        file.write(b"!")
    assert node.get(partition, key_of(1), key_of(2), key_of(3)) == [value_of(1), None, value_of(3)]
    assert status(node) is SsdState.DEGRADED
    assert node.put(partition, key_of(2), value_of(2)) == ""
    assert node.tier.tenants[TenantId("a")].counters.read_failures == 1


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short"])
def test_a_failed_write_makes_the_tier_read_only_for_a_while(start: Start, fault: int | str) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    assert isinstance(node.files, FaultyFiles)
    node.files.write_faults.append(fault)
    fill(node, "a", range(10, 30))
    assert status(node) is SsdState.READ_ONLY
    assert ("full" in node.store.status.reason) == (fault == errno.ENOSPC)
    assert on_ssd(node, partition, range(30)) == list(range(5)), "reads go on"
    assert node.get(partition, key_of(0), key_of(29)) == [value_of(0), value_of(29)]
    node.pass_time(60)
    fill(node, "a", range(30, 50))
    assert status(node) is SsdState.OK
    assert len(on_ssd(node, partition, range(50))) > 20
    node = start()
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in on_ssd(node, partition, range(50)))


def test_i12_a_delete_that_cannot_be_recorded_costs_the_segment(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(10))
    assert isinstance(node.files, FaultyFiles)
    node.files.write_faults.append(errno.ENOSPC)
    node.core.delete(partition, [key_of(0)])
    node.workers.drain()
    assert on_ssd(node, partition, range(10)) == [3, 4]
    node = start()
    assert on_ssd(node, partition, range(10)) == [3, 4]
