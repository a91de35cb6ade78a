"""What a get brings from SSD into DRAM, and what happens beside it."""

from __future__ import annotations

from saltern.names import TenantId
from tests.support.cache_node import key_of
from tests.support.ssd_lives import Start, fill, value_of


def test_i10_a_device_that_hangs_is_a_miss(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0)], pins, None)
    assert fetch is not None and not fetch.is_done
    woken: list[bool] = []
    fetch.on_done(lambda: woken.append(True))
    node.workers.timers.pop()()
    assert fetch.is_done and woken == [True] and pins == [None]
    node.workers.drain()
    assert pins == [None] and woken == [True]
    assert node.get(partition, key_of(0)) == [value_of(0)]


def test_a_get_that_ends_early_leaves_nothing_held(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0), key_of(1)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0), key_of(1)], pins, None)
    assert fetch is not None
    fetch.close()
    node.core.get_end(pins)
    node.workers.drain()
    assert node.core.usage().tenants[TenantId("a")].held_bytes == 0
    assert node.get(partition, key_of(0)) == [value_of(0)]


def test_two_gets_share_one_read(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    waiting = []
    for _ in range(3):
        pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
        waiting.append((pins, node.store.fetch(partition, [key_of(0)], pins, None)))
    assert len(node.workers.jobs) == 1
    node.workers.drain()
    for pins, fetch in waiting:
        assert fetch is not None and fetch.is_done and pins[0] is not None
        node.core.get_end(pins)
    assert node.core.usage().tenants[TenantId("a")].held_bytes == 0


def test_i12_a_key_deleted_while_it_is_read_is_not_served(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    pins = node.core.get_start(partition, [key_of(0)], node.tick(), counts_misses=False)
    fetch = node.store.fetch(partition, [key_of(0)], pins, None)
    assert node.core.delete(partition, [key_of(0)]) == 1
    node.workers.drain()
    assert fetch is not None and fetch.is_done and pins == [None]
    assert not any(node.found(partition, [key_of(0)]))
