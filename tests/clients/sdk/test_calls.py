"""Every call of the client against a real node, over both transports."""

from __future__ import annotations

import array
import random
import threading
from collections.abc import Iterator

import pytest

from saltern.client import Client
from saltern.errors import (
    DataLossError,
    EntryTooLargeError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from saltern.keys import BlockHash, BlockKey
from saltern.results import AlreadyStored, Deleted, Error, Hit, Lookup, Miss, Pong, Refused, Stored
from tenants.roles import Role
from tests.support.clients import DEADLINE_MS, block, blocks, endpoint_of, node_client, static_client
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy

KIB = 1024


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    tenants = {
        "acme": tenant_policy(limit_bytes=192 * MIB, block_bytes=64 * MIB),
        "tiny": tenant_policy(limit_bytes=1 * MIB, block_bytes=256 * KIB),
    }
    with static_node(tenants, dram_bytes=200 * MIB) as running:
        yield running


@pytest.fixture(params=["tcp", "shm"])
def client(node: StaticNode, request: pytest.FixtureRequest) -> Iterator[Client]:
    with node_client(node, request.param) as made:
        yield made
        node.check_invariants()


def fresh(count: int, size_bytes: int) -> list[tuple[BlockKey, bytes]]:
    """Blocks whose keys no other test uses."""
    return blocks(count, size_bytes, first=random.SystemRandom().getrandbits(128))


@pytest.mark.parametrize("size_bytes", [1, 63, 64, 4096, 300 * KIB, 1 * MIB, 9 * MIB, 64 * MIB])
def test_an_entry_of_any_size_comes_back_as_it_was(client: Client, size_bytes: int) -> None:
    items = fresh(1, size_bytes)
    assert client.put_many(items) == [Stored()]
    [result] = client.get_many([key for key, _ in items])
    assert isinstance(result, Hit)
    assert result.payload == items[0][1]
    assert result.size_bytes == size_bytes
    assert result.payload.readonly
    assert client.delete([items[0][0]]) == Deleted(1)


@pytest.mark.parametrize("count", [0, 1, 1000, 5000])
def test_batches_of_any_length_keep_their_order(client: Client, count: int) -> None:
    items = fresh(count, 40)
    assert client.put_many(items) == [Stored()] * count
    keys = [key for key, _ in items]
    absent = [key for key, _ in fresh(count, 1)]
    wanted = [key for pair in zip(keys, absent, strict=True) for key in pair]
    results = client.get_many(wanted)
    assert len(results) == 2 * count
    assert [result.payload for result in results[::2] if isinstance(result, Hit)] == [data for _, data in items]
    assert results[1::2] == [Miss()] * count
    assert client.exists(wanted) == [True, False] * count
    assert client.longest_prefix(keys) == count
    assert client.longest_prefix([*keys, *absent[:1], *keys]) == (2 * count if not absent else count)
    assert client.delete(wanted) == Deleted(count)


def test_large_batches_travel_in_several_frames(client: Client) -> None:
    items = fresh(40, 1 * MIB)  # 40 MiB: five frames
    assert client.put_many(items) == [Stored()] * 40
    room = bytearray(40 * MIB)
    views = [memoryview(room)[start * MIB : (start + 1) * MIB] for start in range(40)]
    results = client.get_into([key for key, _ in items], views)
    assert [result.payload for result in results if isinstance(result, Hit)] == [data for _, data in items]
    assert room == b"".join(data for _, data in items)
    assert client.delete([key for key, _ in items]) == Deleted(40)


def test_registered_memory_is_used_in_place(client: Client) -> None:
    size_bytes, count = 700 * KIB, 30
    source, target = client.allocate(count * size_bytes), client.allocate(count * MIB)
    source.view[:] = random.Random(1).randbytes(source.size_bytes)
    keys = [key for key, _ in fresh(count, 1)]
    parts = [source[index * size_bytes : (index + 1) * size_bytes] for index in range(count)]
    rooms = [target[index * MIB : (index + 1) * MIB] for index in range(count)]
    assert client.put_many(zip(keys, parts, strict=True)) == [Stored()] * count
    results = client.get_into(keys, rooms)
    for result, part, room in zip(results, parts, rooms, strict=True):
        assert isinstance(result, Hit)
        assert result.payload.nbytes == size_bytes
        assert result.payload == part == room[:size_bytes]
    assert client.delete(keys) == Deleted(count)


def test_registered_and_other_memory_mix_in_one_batch(client: Client) -> None:
    items = fresh(12, 5000)
    with client.allocate(6 * 8192) as buffer:
        mixed = []
        for index, (key, data) in enumerate(items):
            if index % 2:
                part = buffer[index // 2 * 8192 :][:5000]
                part[:] = data
                mixed.append((key, part))
            else:
                mixed.append((key, memoryview(data)))
        assert client.put_many(mixed) == [Stored()] * 12
        buffer.view[:] = bytes(buffer.size_bytes)
        rooms = [buffer[index // 2 * 8192 :][:8192] if index % 2 else bytearray(8192) for index in range(12)]
        results = client.get_into([key for key, _ in items], rooms)
        assert [bytes(result.payload) for result in results if isinstance(result, Hit)] == [data for _, data in items]
        del mixed, rooms, results, part


def test_more_registered_buffers_than_regions(client: Client) -> None:
    """A session has 16 regions; a batch over 40 buffers, and 40 batches over one each, work all the same."""
    items = fresh(40, 3000)
    buffers = [client.allocate(4096) for _ in items]
    for buffer, (_, data) in zip(buffers, items, strict=True):
        buffer[:3000][:] = data
    assert client.put_many([(key, b[:3000]) for b, (key, _) in zip(buffers, items, strict=True)]) == [Stored()] * 40
    for buffer, (key, data) in zip(buffers, items, strict=True):
        buffer[:3000][:] = bytes(3000)
        [result] = client.get_into([key], [buffer.view])
        assert isinstance(result, Hit) and result.payload == data
    for buffer in buffers:
        buffer.close()
    assert all(isinstance(result, Hit) for result in client.get_many([key for key, _ in items]))


def test_a_key_twice_in_one_batch_keeps_the_first_bytes(client: Client) -> None:
    [(key, data)] = fresh(1, 1000)
    assert client.put_many([(key, data), (key, bytes(1000)), (key, data)]) == [
        Stored(),
        AlreadyStored(),
        AlreadyStored(),
    ]
    results = client.get_many([key, key])
    assert [result.payload for result in results if isinstance(result, Hit)] == [data, data]


def test_entries_longer_than_those_before_them_are_found(client: Client) -> None:
    """The client guesses sizes from what it read last; a wrong guess costs a round trip, never an entry."""
    for sizes in ([100] * 5, [100, 5000, 100, MIB, 7], [200, 20], [5001], [1]):
        items = [fresh(1, size_bytes)[0] for size_bytes in sizes]
        client.put_many(items)
        results = client.get_many([key for key, _ in items])
        assert [result.payload for result in results if isinstance(result, Hit)] == [data for _, data in items]


def test_a_buffer_that_is_too_small_is_a_miss_with_a_cause(client: Client) -> None:
    items = fresh(3, 1000)
    client.put_many(items)
    results = client.get_into([key for key, _ in items], [bytearray(1000), bytearray(999), bytearray(5000)])
    assert isinstance(results[0], Hit) and results[0].payload == items[0][1]
    assert isinstance(results[1], Miss) and isinstance(results[1].cause, EntryTooLargeError)
    assert isinstance(results[2], Hit) and results[2].payload == items[2][1]


def test_i4_a_full_tenant_is_refused_with_its_books(node: StaticNode, client: Client) -> None:
    with node_client(node, client.transport or "tcp", tenant="tiny") as tiny:
        [big, *_] = tiny.put_many([block(1, 256 * KIB + 1)])
        assert isinstance(big, Refused) and isinstance(big.error, EntryTooLargeError)
        node.change("tiny", tiers=dict(tenant_policy(limit_bytes=0).tiers))
        [result] = tiny.put_many([block(2, 1000)])
        node.change("tiny", tiers=dict(tenant_policy(limit_bytes=MIB).tiers))
    assert isinstance(result, Refused) and isinstance(result.error, ResourceExhaustedError)
    assert result.error.metadata["limit_bytes"] == "0"
    assert "tenant" in result.error.metadata


def test_a_reader_reads_and_may_not_write(node: StaticNode, client: Client) -> None:
    items = fresh(1, 100)
    client.put_many(items)
    with node_client(node, client.transport, role=Role.READER) as reader:
        assert isinstance(reader.get_many([items[0][0]])[0], Hit)
        [result] = reader.put_many(fresh(1, 100))
        assert isinstance(result, Error) and isinstance(result.error, PermissionDeniedError)
        deleted = reader.delete([items[0][0]])
        assert deleted.count == 0 and isinstance(deleted.error, PermissionDeniedError)
        assert isinstance(reader.get_many([items[0][0]])[0], Hit)


def test_i2_tenants_do_not_see_each_other(node: StaticNode, client: Client) -> None:
    items = fresh(5, 100)
    keys = [key for key, _ in items]
    client.put_many(items)
    with node_client(node, client.transport, tenant="tiny") as other:
        assert other.get_many(keys) == [Miss()] * 5
        assert other.lookup(keys) == Lookup(0, (False,) * 5)
        assert other.delete(keys) == Deleted(0)
    assert client.longest_prefix(keys) == 5


def test_ping_names_node_and_transport(client: Client) -> None:
    pong = client.ping()
    assert isinstance(pong, Pong)
    assert pong.node == "node-1"
    assert pong.transport == client.transport


def test_auto_takes_shared_memory_and_falls_back_to_tcp(node: StaticNode) -> None:
    with node_client(node, "auto") as near:
        assert isinstance(near.ping(), Pong)
        assert near.transport == "shm"
    endpoint = endpoint_of(node)
    elsewhere = [
        type(endpoint)("node-1", endpoint.wire_endpoint, "/nonexistent/node.sock"),
        type(endpoint)("node-1", endpoint.wire_endpoint, endpoint.shm_path, host_id="another-host"),
    ]
    for far in elsewhere:
        with static_client(far, node.token("acme", "chat")) as client:
            assert isinstance(client.ping(), Pong)
            assert client.transport == "tcp"


def test_shm_never_falls_back_when_it_is_asked_for(node: StaticNode) -> None:
    endpoint = endpoint_of(node)
    far = type(endpoint)("node-1", endpoint.wire_endpoint, endpoint.shm_path, host_id="another-host")
    with static_client(far, node.token("acme", "chat"), transport="shm") as client:
        result = client.ping()
    assert isinstance(result, Error) and result.error.reason == "HOST_MISMATCH"


@pytest.mark.parametrize(
    "payload",
    [b"", memoryview(bytes(100))[::2], "text", 7],
    ids=["empty", "with gaps", "text", "number"],
)
def test_wrong_payloads_raise(client: Client, payload: object) -> None:
    with pytest.raises(InvalidArgumentError):
        client.put_many([(BlockKey(bytes(32)), payload)])  # type: ignore[list-item]


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), "k" * 32, None])
def test_wrong_keys_raise(client: Client, key: object) -> None:
    for call in (client.get_many, client.exists, client.longest_prefix, client.delete):
        with pytest.raises(InvalidArgumentError):
            call([key])  # type: ignore[list-item]


def test_wrong_rooms_raise(client: Client) -> None:
    key = BlockKey(bytes(32))
    for rooms in ([], [bytes(10)], [bytearray(0)], [bytearray(1), bytearray(1)]):
        with pytest.raises(InvalidArgumentError):
            client.get_into([key], rooms)


def test_any_contiguous_buffer_will_do(client: Client) -> None:
    [(key, _)] = fresh(1, 1)
    numbers = array.array("Q", range(100))
    assert client.put_many([(key, numbers)]) == [Stored()]
    room = array.array("Q", bytes(800))
    [result] = client.get_into([key], [room])
    assert isinstance(result, Hit)
    assert room == numbers


def test_many_threads_share_one_client(client: Client) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        items = blocks(30, 20_000, first=(1 << 200) + number * 1000)
        for _ in range(3):
            puts = client.put_many(items)
            gets = client.get_many([key for key, _ in items])
            if not all(isinstance(put, Stored | AlreadyStored) for put in puts):
                failures.append(puts)
            if [getattr(get, "payload", None) for get in gets] != [data for _, data in items]:
                failures.append(gets)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_client_says_so(node: StaticNode) -> None:
    client = node_client(node)
    client.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        client.get_many([])
    with pytest.raises(FailedPreconditionError, match="closed"):
        client.allocate(1)
    client.close()


def test_block_keys_are_those_of_the_salt(client: Client) -> None:
    hashes = [BlockHash(b"one"), BlockHash(b"two")]
    keys = client.block_keys(hashes)
    assert keys == [client.block_key(block_hash) for block_hash in hashes]
    assert len({*keys}) == 2
    assert all(len(key) == 32 for key in keys)


def test_a_deadline_of_nothing_is_a_miss(client: Client) -> None:
    [(key, data)] = fresh(1, 10)
    assert isinstance(client.get_many([key], deadline_ms=0)[0], Miss)
    assert isinstance(client.put_many([(key, data)], deadline_ms=-5)[0], Refused)
    assert client.lookup([key], deadline_ms=0).error is not None
    assert client.get_many([key], deadline_ms=DEADLINE_MS) == [Miss()]


def test_reprs_show_no_secret(node: StaticNode) -> None:
    token = node.token("acme", "chat")
    with static_client(endpoint_of(node), token) as client:
        texts = repr(client) + repr(client._router.grant) + repr(client._router._credentials)
        assert token not in texts
        assert repr(bytes(32)) not in texts


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_i7_what_is_found_damaged_is_deleted_and_can_be_stored_anew(transport: str) -> None:
    tenants = {"acme": tenant_policy(limit_bytes=MIB, block_bytes=64 * KIB)}
    with static_node(tenants, dram_bytes=MIB) as node, node_client(node, transport) as client:
        [(key, payload), (other, _)] = items = fresh(2, 64 * KIB)
        assert client.put_many(items) == [Stored(), Stored()]
        node.flip_byte_of(payload)
        [result, good] = client.get_many([key, other])
        assert isinstance(result, Miss) and isinstance(result.cause, DataLossError)
        assert isinstance(good, Hit)
        assert client.exists([key, other]) == [False, True]
        assert client.put_many(items[:1]) == [Stored()]
        [again] = client.get_many([key])
        assert isinstance(again, Hit) and again.payload == payload
        node.check_invariants()
