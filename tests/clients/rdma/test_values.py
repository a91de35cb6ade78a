"""Endpoints from peers, splitting by limits, failed verbs as errors, and that no binding is imported unasked."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltern.errors import FailedPreconditionError, InvalidArgumentError, ProtocolError, SalternError
from saltern.rdma import ENDPOINT_BYTES, Endpoint, Gid, LocalSpan, Read, RemoteSpan, Write, split
from saltern.rdma.bindings import load_binding
from saltern.rdma.bindings.interface import VerbsError
from saltern.rdma.faults import error_of
from saltern.rdma.splitting import Verb

GID = Gid.parse("::ffff:10.0.0.1")


def test_importing_the_package_imports_no_binding() -> None:
    code = "import sys, saltern.rdma; assert not {'pyverbs', 'ibverbs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_binding_of_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_binding("libfabric")
    assert caught.value.reason == "RDMA_BINDING_UNKNOWN"
    assert "pyverbs, ibverbs" in caught.value.hint


def test_no_library_is_said_with_the_reason_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyverbs", "ibverbs"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        monkeypatch.delitem(sys.modules, f"saltern.rdma.bindings.{name}_binding", raising=False)
    with pytest.raises(FailedPreconditionError) as caught:
        load_binding()
    assert caught.value.reason == "RDMA_NO_LIBRARY"
    assert "pyverbs: " in caught.value.message
    assert "ibverbs: " in caught.value.message
    assert "saltern[rdma]" in caught.value.hint


@given(
    qpn=st.integers(1, 2**24 - 1),
    psn=st.integers(0, 2**24 - 1),
    mtu_bytes=st.sampled_from((256, 512, 1024, 2048, 4096)),
    lid=st.integers(0, 2**16 - 1),
    gid=st.binary(min_size=16, max_size=16).filter(lambda value: any(value) and not Gid(value).is_of_many),
)
def test_endpoints_are_packed_and_unpacked_alike(qpn: int, psn: int, mtu_bytes: int, lid: int, gid: bytes) -> None:
    endpoint = Endpoint(qpn=qpn, gid=Gid(gid), psn=psn, mtu_bytes=mtu_bytes, lid=lid)
    packed = endpoint.pack()
    assert len(packed) == ENDPOINT_BYTES
    assert Endpoint.unpack(packed) == endpoint


@given(st.binary(max_size=2 * ENDPOINT_BYTES))
def test_any_bytes_of_a_peer_are_an_endpoint_or_a_protocol_error(data: bytes) -> None:
    try:
        endpoint = Endpoint.unpack(data)
    except ProtocolError as error:
        assert error.reason == "RDMA_ENDPOINT_INVALID"
    else:
        assert endpoint.pack() == data


@pytest.mark.parametrize(
    "wrong",
    [
        {"qpn": 0},
        {"qpn": 2**24},
        {"psn": -1},
        {"mtu_bytes": 1500},
        *({"gid": Gid.parse(gid)} for gid in ("::", "ff02::1", "::ffff:224.0.0.1", "::ffff:255.255.255.255")),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        Endpoint(**({"qpn": 1, "gid": GID, "psn": 0, "mtu_bytes": 1024} | wrong))  # type: ignore[arg-type]


def test_gids_are_written_as_addresses() -> None:
    assert str(GID) == "::ffff:10.0.0.1"
    assert GID.exploded == "0000:0000:0000:0000:0000:ffff:0a00:0001"
    assert Gid.parse("fe80::1").is_link_local
    assert not Gid.parse("2001:db8::1").is_link_local
    with pytest.raises(InvalidArgumentError):
        Gid.parse("10.0.0.1")


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from((Read, Write)),
        st.lists(st.integers(0, 40), max_size=5),
        st.sampled_from((None, 7)),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    operations=_OPERATIONS,
    message_bytes=st.integers(1, 60),
    spans=st.integers(1, 4),
    requests=st.integers(1, 5),
)
def test_chains_move_every_byte_once_in_order_and_keep_to_the_limits(
    operations: list[tuple[type[Read | Write], list[int], int | None]], message_bytes: int, spans: int, requests: int
) -> None:
    asked: list[tuple[str, int, int]] = []
    told = 0
    values = []
    for number, (kind, lengths, immediate) in enumerate(operations):
        local = tuple(LocalSpan(10_000 * number + 1000 * at, length, at) for at, length in enumerate(lengths))
        remote = RemoteSpan(1_000_000 + 10_000 * number, sum(lengths), number)
        tells = kind is Write and immediate is not None
        values.append(Write(local, remote, immediate) if tells else kind(local, remote))
        told += tells
        address = remote.address
        for span in local:
            for offset in range(span.length_bytes):
                asked.append((kind.__name__, span.address + offset, address))
                address += 1

    chains = split(values, max_message_bytes=message_bytes, max_spans=spans, max_requests=requests)
    done: list[tuple[str, int, int]] = []
    for chain in chains:
        assert 1 <= len(chain) <= requests
        for request in chain:
            assert len(request.local) <= spans
            assert sum(span.length_bytes for span in request.local) <= message_bytes
            assert all(span.length_bytes for span in request.local), "some devices take a span of 0 for 2^31 bytes"
            address = request.remote_address
            for span in request.local:
                for offset in range(span.length_bytes):
                    done.append(("Read" if request.verb is Verb.READ else "Write", span.address + offset, address))
                    address += 1
    assert done == asked
    verbs = [request.verb for chain in chains for request in chain]
    assert verbs.count(Verb.WRITE_WITH_IMMEDIATE) == told


def test_lengths_that_differ_and_ranges_that_wrap_are_refused() -> None:
    span = LocalSpan(0, 10, 1)
    for remote, reason in (
        (RemoteSpan(0, 9, 1), "RDMA_LENGTHS_DIFFER"),
        (RemoteSpan(2**64 - 9, 10, 1), "RDMA_RANGE_INVALID"),
        (RemoteSpan(-1, 10, 1), "RDMA_RANGE_INVALID"),
        (RemoteSpan(0, 10, 2**32), "RDMA_RANGE_INVALID"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            split([Write((span,), remote)], max_message_bytes=100, max_spans=1, max_requests=1)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("verb", "number", "reason", "hint"),
    [
        ("ibv_reg_mr", errno.ENOMEM, "RDMA_MEMLOCK", "ulimit -l"),
        ("ibv_reg_mr", errno.EFAULT, "RDMA_MEMORY_INVALID", "mapped"),
        ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP, "RDMA_NOT_OFFERED", "offer"),
        ("ibv_open_device", errno.EACCES, "RDMA_NOT_PERMITTED", "/dev/infiniband"),
        ("ibv_open_device", errno.ENOENT, "RDMA_NO_DEVICE", "doctor"),
        ("ibv_create_qp", errno.ENOMEM, "RDMA_RESOURCES", "close"),
        ("ibv_modify_qp", errno.ENETUNREACH, "RDMA_GID_UNREACHABLE", "GID"),
        ("ibv_modify_qp", errno.EINVAL, "RDMA_CONNECT_REFUSED", "GID"),
        ("ibv_post_send", 0, "RDMA_VERB_FAILED", "report"),
    ],
)
def test_failed_verbs_say_what_to_do(verb: str, number: int, reason: str, hint: str) -> None:
    error = error_of(VerbsError(verb, number), "trying")
    assert isinstance(error, SalternError)
    assert error.reason == reason
    assert hint in error.hint
    assert error.message.startswith("trying failed: ")
    assert error.metadata["verb"] == verb
