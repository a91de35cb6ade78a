"""The shared-memory door: transfers through a client's region, and everything a client can do to its own memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.io.regions import TENANT_REGIONS_MAX_BYTES
from dataplane.io.shm import listen_unix
from dataplane.io.stream import Script
from dataplane.io.transfers import Transfers
from saltern import wire
from saltern.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, SalternError
from saltern.wire import Opcode
from tests.support.static_node import MIB, StaticNode
from tests.support.waiting import open_descriptors, wait_until
from tests.support.wire_client import F_ADD_SEALS, Segment, WireClient, block, connect_tcp, connect_unix, key

F_SEAL_GROW, F_SEAL_WRITE = 0x0004, 0x0008
MFD_HUGETLB = 0x0004


@pytest.fixture
def local(node: StaticNode) -> Iterator[WireClient]:
    with connect_unix(node) as client:
        client.hello(node.token("acme", "chat"))
        yield client


def test_i2_a_tenant_cannot_map_every_address_of_the_node(node: StaticNode) -> None:
    """A sparse memfd of 64 GiB costs nothing: thousands of regions of it must not keep others from theirs."""
    with contextlib.ExitStack() as stack:
        sparse = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        stack.callback(os.close, sparse)
        os.ftruncate(sparse, wire.REGION_MAX_BYTES)
        fcntl.fcntl(sparse, F_ADD_SEALS, 0x0002)
        regions, first = 0, None
        with pytest.raises(ResourceExhaustedError) as caught:
            for _ in range(128):
                client = stack.enter_context(connect_unix(node))
                client.hello(node.token("acme", "chat"))
                first = first or client
                for number in range(wire.REGIONS_MAX):
                    client.register([sparse], wire.REGION_MAX_BYTES, region=number)
                    regions += 1
        assert caught.value.reason == "REGION_SPACE_EXHAUSTED"
        assert regions == TENANT_REGIONS_MAX_BYTES // wire.REGION_MAX_BYTES
        assert first is not None
        first.register([sparse], 4096, region=0)  # what a region gives back may be taken again
        first.register([sparse], wire.REGION_MAX_BYTES, region=0)
        with connect_unix(node) as other:
            other.hello(node.token("blue", "chat"))
            other.register([sparse], wire.REGION_MAX_BYTES)


@pytest.mark.parametrize("opcode", [Opcode.PUT, Opcode.GET])
def test_i2_one_request_does_not_keep_the_node_copying(node: StaticNode, segment: Segment, opcode: Opcode) -> None:
    """A body of a few kilobytes asks for 4 GiB of copies, all to and from one place."""
    with connect_unix(node) as client:
        client.hello(node.token("acme", "chat"))
        client.register([segment.descriptor], 8 * MIB)
        client.put({key(1): block(1, MIB)})
        count = wire.KEYS_MAX
        if opcode is Opcode.GET:
            client.send(opcode, wire.Get(key(1) * count, [MIB] * count, 0, [0] * count))
        else:
            client.send(opcode, wire.Put(key(2) * count, [MIB] * count, wire.join_sums([0] * count), 0, [0] * count))
        assert client.error().reason == "PAYLOAD_TOO_LARGE"
        assert client.is_closed()


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment(8 * MIB) as made:
        yield made


def put_regional(
    client: WireClient, keys: bytes, sizes: list[int], sums: list[int], offsets: list[int]
) -> wire.PutReply:
    client.send(Opcode.PUT, wire.Put(keys, sizes, wire.join_sums(sums), 0, offsets))
    return client.answer(wire.PutReply)[0]


def get_regional(client: WireClient, keys: bytes, max_sizes: list[int], offsets: list[int]) -> wire.GetReply:
    client.send(Opcode.GET, wire.Get(keys, max_sizes, 0, offsets))
    return client.answer(wire.GetReply)[0]


def test_entries_travel_through_the_region(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    first, second = block(1, MIB + 1), block(2, 700_000)
    segment.memory[: len(first)] = first
    segment.memory[2 * MIB : 2 * MIB + len(second)] = second
    sizes, sums = [len(first), len(second)], [wire.checksum(first), wire.checksum(second)]
    assert put_regional(local, key(1) + key(2), sizes, sums, [0, 2 * MIB]).codes == bytes(2)
    reply = get_regional(local, key(2) + key(9) + key(1), [MIB, MIB, 2 * MIB], [4 * MIB, 5 * MIB, 6 * MIB])
    assert reply.codes == bytes([0, 5, 0])
    assert reply.sizes == [len(second), 0, len(first)]
    assert segment.memory[4 * MIB : 4 * MIB + len(second)] == second
    assert segment.memory[6 * MIB : 6 * MIB + len(first)] == first
    assert segment.memory[5 * MIB : 6 * MIB] == bytes(MIB)
    assert local.get(key(1)) == {key(1): first}  # inline, over the same socket


def test_i2_a_get_writes_nothing_past_the_entry(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    local.put({key(1): block(1, 100)})
    segment.memory[:4096] = b"\xee" * 4096
    assert get_regional(local, key(1), [4096], [10]).codes == b"\x00"
    assert segment.memory[:10] == b"\xee" * 10
    assert segment.memory[10:110] == block(1, 100)
    assert segment.memory[110:4096] == b"\xee" * (4096 - 110)


@pytest.mark.parametrize(
    ("offset", "size"), [(8 * MIB, 1), (8 * MIB - 1, 2), (2**63, 1), (2**64 - 1, 1), (0, 8 * MIB + 1), (-1, 4)]
)
def test_nothing_outside_the_region_is_touched(local: WireClient, segment: Segment, offset: int, size: int) -> None:
    local.register([segment.descriptor], 8 * MIB)
    for opcode, body in (
        (Opcode.PUT, wire.Put(key(1), [size], wire.join_sums([0]), 0, [offset])),
        (Opcode.GET, wire.Get(key(1), [size], 0, [offset])),
    ):
        local.send(opcode, body)
        assert local.error().reason == "OUT_OF_REGION"
    local.ping()


def test_i7_a_wrong_sum_in_a_region_stores_nothing(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    reply = put_regional(local, key(1), [MIB], [123], [0])
    assert reply.codes == bytes([15])
    assert local.lookup(key(1)).found == b"\x00"


@pytest.mark.parametrize("copied", [0, 1], ids=["before the copy", "in the middle of it"])
def test_i7_a_segment_rewritten_during_the_put_is_stored_as_claimed_or_not_at_all(
    local: WireClient, segment: Segment, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """The sum is taken over the node's own copy, so a torn copy can never pass for the claimed bytes."""
    local.register([segment.descriptor], 8 * MIB)
    claimed, other = block(1, 4 * MIB), block(2, 4 * MIB)
    copy_and_sum = Transfers._copy_and_sum

    def rewritten(transfers: Transfers, source: memoryview, target: memoryview) -> Script[int]:
        copying = copy_and_sum(transfers, source, target)
        for _ in range(copied):
            yield next(copying)
        segment.memory[: 4 * MIB] = other
        return (yield from copying)

    monkeypatch.setattr(Transfers, "_copy_and_sum", rewritten)
    segment.memory[: 4 * MIB] = claimed
    assert put_regional(local, key(1), [4 * MIB], [wire.checksum(claimed)], [0]).codes == bytes([15])
    assert local.get(key(1)) == {}
    segment.memory[: 4 * MIB] = claimed
    code = put_regional(local, key(1), [4 * MIB], [wire.checksum(other)], [0]).codes
    assert (code, local.get(key(1))) == ((bytes([15]), {}) if copied else (bytes([0]), {key(1): other}))


def test_i7_a_segment_that_is_rewritten_all_the_time_is_never_stored_torn(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    claimed, other = block(1, 4 * MIB), block(2, 4 * MIB)
    done = threading.Event()

    def rewrite() -> None:
        while not done.is_set():
            segment.memory[: 4 * MIB] = other
            segment.memory[: 4 * MIB] = claimed

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        codes = set()
        for _ in range(12):
            codes.add(put_regional(local, key(1), [4 * MIB], [wire.checksum(claimed)], [0]).codes[0])
            found = local.get(key(1))
            assert found in ({}, {key(1): claimed})
            local.delete(key(1))
        assert codes <= {0, 15}
    finally:
        done.set()
        writer.join()


def test_a_hole_punched_into_the_segment_reads_as_zeros(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    segment.memory[:MIB] = block(1, MIB)
    keep_size_punch_hole = 0x01 | 0x02
    begin, length = ctypes.c_long(0), ctypes.c_long(MIB)
    assert ctypes.CDLL(None).fallocate(segment.descriptor, keep_size_punch_hole, begin, length) == 0
    assert put_regional(local, key(1), [MIB], [wire.checksum(block(1, MIB))], [0]).codes == bytes([15])
    assert put_regional(local, key(1), [MIB], [wire.checksum(bytes(MIB))], [0]).codes == bytes([0])


def test_a_sealed_segment_cannot_be_shrunk_under_the_node(local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], 8 * MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    os.ftruncate(segment.descriptor, 9 * MIB)  # growing does no harm
    assert put_regional(local, key(1), [MIB], [wire.checksum(bytes(MIB))], [0]).codes == bytes([0])


# ---- descriptors


def refusal(client: WireClient, descriptors: list[int], region_bytes: int = MIB) -> str:
    with pytest.raises(SalternError) as caught:
        client.register(descriptors, region_bytes)
    assert caught.value.hint
    return caught.value.reason


def test_only_memfds_sealed_against_shrinking_are_accepted(local: WireClient, tmp_path: Path) -> None:
    with Segment(MIB, sealed=False) as unsealed:
        assert refusal(local, [unsealed.descriptor]) == "REGION_NOT_SEALED"
        fcntl.fcntl(unsealed.descriptor, F_ADD_SEALS, F_SEAL_GROW)
        assert refusal(local, [unsealed.descriptor]) == "REGION_NOT_SEALED"
    with Segment(MIB) as short:
        assert refusal(local, [short.descriptor], MIB + 1) == "REGION_TOO_SHORT"
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(MIB)
        assert refusal(local, [file.fileno()]) in {"REGION_NOT_MEMFD", "REGION_NOT_SEALED"}
    with tempfile.TemporaryFile(dir="/dev/shm") as on_tmpfs:
        on_tmpfs.truncate(MIB)
        assert refusal(local, [on_tmpfs.fileno()]) in {"REGION_NOT_MEMFD", "REGION_NOT_SEALED"}
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing):
        assert refusal(local, [reading]) == "REGION_NOT_MEMFD"
    assert refusal(local, []) == "REGION_DESCRIPTORS"
    local.ping()


def test_a_memfd_on_hugetlbfs_is_refused(local: WireClient) -> None:
    try:
        descriptor = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no hugetlbfs")
    try:
        os.ftruncate(descriptor, 2 * MIB)
        fcntl.fcntl(descriptor, F_ADD_SEALS, 0x0002)
        assert refusal(local, [descriptor]) == "REGION_NOT_MEMFD"
    finally:
        os.close(descriptor)


def test_a_memfd_that_cannot_be_written_is_refused(local: WireClient) -> None:
    descriptor = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MIB)
        fcntl.fcntl(descriptor, F_ADD_SEALS, 0x0002 | F_SEAL_WRITE)
        assert refusal(local, [descriptor]) == "REGION_NOT_MAPPED"
    finally:
        os.close(descriptor)


def test_two_descriptors_are_one_too_many(local: WireClient, segment: Segment) -> None:
    before = open_descriptors()
    assert refusal(local, [segment.descriptor] * 2) == "REGION_DESCRIPTORS"
    assert local.is_closed()
    local.sock.close()
    wait_until(lambda: open_descriptors() < before)


def test_descriptors_where_none_belong_are_closed(node: StaticNode, local: WireClient, segment: Segment) -> None:
    ping = wire.encode_request(Opcode.PING, 1, wire.encode_body(wire.Empty()))
    local.ping()
    before = open_descriptors()
    for _ in range(20):
        socket.send_fds(local.sock, [ping], [segment.descriptor])
        local.answer(wire.Empty)
    wait_until(lambda: open_descriptors() == before)
    socket.send_fds(local.sock, [ping[:3]], [segment.descriptor])
    local.sock.sendall(ping[3:])
    local.answer(wire.Empty)
    wait_until(lambda: open_descriptors() == before)
    with connect_unix(node) as stranger:  # before HELLO, in a frame that never ends
        socket.send_fds(stranger.sock, [ping[:3]], [segment.descriptor])
    wait_until(lambda: open_descriptors() == before)


def test_a_descriptor_belongs_to_its_own_frame_when_requests_are_pipelined(local: WireClient, segment: Segment) -> None:
    ping = wire.encode_request(Opcode.PING, 1, wire.encode_body(wire.Empty()))
    register = wire.encode_request(Opcode.REGISTER, 2, wire.encode_body(wire.Register(3, MIB)))
    for _ in range(20):
        local.sock.sendall(ping)
        socket.send_fds(local.sock, [register], [segment.descriptor])
        local.sock.sendall(ping)
    for _ in range(60):
        local.answer(wire.Empty)


def test_regions_are_replaced_unregistered_and_unmapped(node: StaticNode, local: WireClient, segment: Segment) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:segment")

    own = mappings()
    for _ in range(3):
        local.register([segment.descriptor], MIB, region=15)
    wait_until(lambda: mappings() == own + 1)  # unmapped away from the event loop
    local.send(Opcode.UNREGISTER, wire.Unregister(15))
    local.answer(wire.Empty)
    wait_until(lambda: mappings() == own)
    local.register([segment.descriptor], MIB)
    local.sock.close()
    wait_until(lambda: mappings() == own)


def test_a_session_over_tcp_has_no_regions(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        client.hello(node.token("acme", "chat"))
        client.send(Opcode.REGISTER, wire.Register(0, MIB))
        assert client.error().reason == "REGION_DESCRIPTORS"


def test_another_sessions_region_is_not_reachable(node: StaticNode, local: WireClient, segment: Segment) -> None:
    local.register([segment.descriptor], MIB)
    with connect_unix(node) as other:
        other.hello(node.token("blue", "chat"))
        other.send(Opcode.GET, wire.Get(key(1), [10], 0, [0]))
        assert other.error().reason == "UNKNOWN_REGION"


# ---- the socket file


def test_the_socket_file_is_private(node: StaticNode) -> None:
    assert stat.S_IMODE(Path(node.shm_path).stat().st_mode) == 0o600


def test_a_dead_nodes_socket_file_is_replaced_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with listen_unix(path, mode=0o600):
        with pytest.raises(FailedPreconditionError) as caught:
            listen_unix(path, mode=0o600)
        assert caught.value.reason == "SHM_PATH_TAKEN"
    assert path.exists()
    with listen_unix(path, mode=0o660):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_another_kind_of_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    path.write_text("precious")
    with pytest.raises(FailedPreconditionError):
        listen_unix(path, mode=0o600)
    assert path.read_text() == "precious"
    with pytest.raises(InvalidArgumentError):
        listen_unix(tmp_path / ("x" * 200), mode=0o600)
    with pytest.raises(FailedPreconditionError):
        listen_unix(tmp_path / "absent" / "node.sock", mode=0o600)
