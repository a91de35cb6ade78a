from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.entry import Entry
from dataplane.core.extents import ArenaOffset
from dataplane.core.lru import LruOrder
from dataplane.core.partition import Partition
from dataplane.core.tenant_cache import PartitionIndex, TenantCache
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId

PARTITION = Partition(TenantId("a"), NamespaceId("ns"), "u", 1)
INDEX = PartitionIndex(PARTITION, TenantCache(TenantId("a"), LruOrder()), 4096, True)


def entry_of(number: int) -> Entry:
    return Entry(BlockKey(number.to_bytes(32, "big")), INDEX, ArenaOffset(0), 1, 4096)


@given(st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove"]), st.integers(0, 7)), max_size=80))
@settings(max_examples=200, deadline=None)
def test_it_orders_like_a_plain_list_of_last_uses(commands: list[tuple[str, int]]) -> None:
    order = LruOrder()
    model: OrderedDict[int, Entry] = OrderedDict()
    for command, number in commands:
        if command == "insert" and number not in model:
            model[number] = entry_of(number)
            order.insert(model[number])
        elif command == "touch" and number in model:
            model.move_to_end(number)
            order.touch(model[number])
        elif command == "remove" and number in model:
            order.remove(model.pop(number))
        assert list(order) == list(model.values())


def test_a_removed_entry_can_be_inserted_again() -> None:
    order = LruOrder()
    first, second = entry_of(1), entry_of(2)
    for entry in (first, second):
        order.insert(entry)
    order.remove(first)
    order.insert(first)
    assert list(order) == [second, first]


def test_a_batch_touched_tail_first_keeps_its_head_longest() -> None:
    order = LruOrder()
    chain = [entry_of(number) for number in range(4)]
    for entry in chain:
        order.insert(entry)
    for entry in reversed(chain):
        order.touch(entry)
    assert list(order) == chain[::-1]
