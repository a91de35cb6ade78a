"""Puts and gets over RDMA while entries move: evicted, demoted to SSD, read back into the registered arena."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from dataplane.settings import SsdSettings
from saltern.client import Client
from saltern.keys import BlockKey
from saltern.names import TenantId
from saltern.results import AlreadyStored, Hit, Miss, Stored
from tests.rdma.attacker import rdma_node, sdk_client
from tests.rdma.extent import by_extent
from tests.rdma.other_process import pattern
from tests.support.static_node import MIB, StaticNode, tenant_policy
from tests.support.waiting import wait_until

KIB = 1024
#: Of each tenant, whose DRAM holds at most 32 of them.
COUNT = by_extent(quick=48, usual=64, full=96)
SIZE_BYTES = 64 * KIB
ROUNDS = by_extent(quick=2, usual=3, full=4)
TENANTS = {
    "acme": tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB),
    "blue": tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB),
    "thin": tenant_policy(limit_bytes=MIB),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticNode]:
    folder: Path = tmp_path_factory.mktemp("ssd")
    with rdma_node(8 * MIB, TENANTS, ssd=SsdSettings(folder / "ssd", 64 * MIB, folder)) as running:
        yield running


@cache
def entry(number: int) -> tuple[BlockKey, bytes]:
    return BlockKey(number.to_bytes(32, "little")), pattern(number, SIZE_BYTES - number % 61)


def together(*works: Callable[[], None]) -> None:
    """Run all of them at once; the first failure of any is raised."""
    faults: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def read_some(client: Client, numbers: list[int], buffer: memoryview) -> int:
    """Get entries into registered memory, compare every byte of those that are there, return how many are."""
    names, values = zip(*map(entry, numbers), strict=True)
    views = [buffer[at * SIZE_BYTES : (at + 1) * SIZE_BYTES] for at in range(len(numbers))]
    hits = 0
    for result, value in zip(client.get_into(names, views), values, strict=True):
        if isinstance(result, Hit):
            assert result.payload == value
            hits += 1
        else:
            assert isinstance(result, Miss) and result.cause is None, result
    return hits


def test_what_was_demoted_comes_back_through_the_registered_arena_byte_for_byte(node: StaticNode) -> None:
    """Two tenants write more than their DRAM holds while readers of theirs ask for what was just pushed out."""
    with ExitStack() as stack:
        works: list[Callable[[], None]] = []
        clients: dict[str, Client] = {}
        for base, tenant in ((1_000, "acme"), (2_000, "blue")):
            writer, reader = (stack.enter_context(sdk_client(node, tenant=tenant)) for _ in range(2))
            clients[tenant] = reader
            written: list[int] = []
            done = threading.Event()

            def write(
                base: int = base, writer: Client = writer, written: list[int] = written, done: threading.Event = done
            ) -> None:
                try:
                    for start in range(base, base + COUNT, 4):
                        numbers = list(range(start, start + 4))
                        stored = writer.put_many([entry(number) for number in numbers])
                        assert all(isinstance(result, Stored | AlreadyStored) for result in stored), stored
                        written.extend(numbers)
                finally:
                    done.set()

            def read(
                base: int = base, reader: Client = reader, written: list[int] = written, done: threading.Event = done
            ) -> None:
                chosen = random.Random(base)
                with reader.allocate(8 * SIZE_BYTES) as buffer:
                    while not done.is_set():
                        if written:
                            read_some(reader, chosen.choices(list(written), k=4), buffer.view)

            works += [write, read]
        together(*works)
        for base, tenant in ((1_000, "acme"), (2_000, "blue")):
            client, numbers = clients[tenant], list(range(base, base + COUNT))
            wait_until(lambda client=client, numbers=numbers: _all_there(client, numbers), 120)  # type: ignore[misc]
            with client.allocate(8 * SIZE_BYTES) as buffer:
                hits = sum(read_some(client, numbers[at : at + 8], buffer.view) for at in range(0, COUNT, 8))
            assert hits == COUNT
            books = node.usage().tenants[TenantId(tenant)]
            assert books.ssd is not None and books.ssd.counters.reads >= COUNT - 32, "the rest was on SSD"
            assert books.used_bytes <= books.limit_bytes and books.ssd.used_bytes <= books.ssd.limit_bytes
        assert {client.transport for client in clients.values()} == {"rdma"}
        node.check_invariants()


def _all_there(client: Client, numbers: list[int]) -> bool:
    return client.longest_prefix([entry(number)[0] for number in numbers]) == len(numbers)


def test_gets_that_race_eviction_bring_the_right_bytes_or_none(node: StaticNode) -> None:
    """A tenant without SSD: what a reader has pinned stays until the device has sent it, the rest may go any time."""
    with sdk_client(node, tenant="thin") as writer, sdk_client(node, tenant="thin") as reader:
        done = threading.Event()
        seen: list[int] = []

        def write() -> None:
            try:
                for number in range(ROUNDS * COUNT):
                    writer.put_many([entry(3_000 + number % COUNT)])
            finally:
                done.set()

        def read() -> None:
            chosen = random.Random(3)
            with reader.allocate(8 * SIZE_BYTES) as buffer:
                while not done.is_set():
                    numbers = [3_000 + chosen.randrange(COUNT) for _ in range(6)]
                    seen.append(read_some(reader, numbers, buffer.view))

        together(write, read)
        books = node.usage().tenants[TenantId("thin")]
        assert books.counters.evictions > COUNT and books.used_bytes <= MIB
        assert sum(seen) > 0 and sum(seen) < 6 * len(seen), "some were there, some were not"
        node.check_invariants()
