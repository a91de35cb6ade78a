"""What a node without a device answers to those who ask for RDMA: no, in a session that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing

from saltern import wire
from saltern.rdma import DeviceChoice, Endpoint, Gid
from saltern.wire import Opcode
from tests.support.certificates import Authority
from tests.support.static_node import StaticNode, static_node
from tests.support.wire_client import WireClient, block, connect_tcp, key

ENDPOINT = Endpoint(qpn=17, gid=Gid.parse("::ffff:10.0.0.1"), psn=1, mtu_bytes=1024)


def test_connect_is_refused_and_the_session_goes_on(client: WireClient) -> None:
    client.send(Opcode.CONNECT, wire.Connect(ENDPOINT.pack()))
    assert client.error().reason == "RDMA_NOT_OFFERED"
    client.put({key(1): block(1)})
    assert client.get(key(1)) == {key(1): block(1)}


def test_i1_connect_comes_after_hello(stranger: WireClient) -> None:
    stranger.send(Opcode.CONNECT, wire.Connect(ENDPOINT.pack()))
    assert stranger.error().reason == "HELLO_REQUIRED"
    assert stranger.is_closed()


def test_rdma_memory_is_registered_only_where_there_is_a_queue_pair(client: WireClient) -> None:
    client.send(Opcode.REGISTER, wire.Register(0, 4096, 4096, 1))
    assert client.error().reason == "REGION_NOT_CONNECTED"
    client.send(Opcode.GET, wire.Get(key(1), [4096], 0, [0]))
    assert client.error().reason == "UNKNOWN_REGION"


def test_hello_offers_no_rdma(node: StaticNode) -> None:
    with connect_tcp(node) as client:
        assert not client.hello(node.token("acme", "chat")).rdma


@pytest.mark.parametrize(("choice", "level"), [(DeviceChoice(), "info"), (DeviceChoice("pretended0"), "warning")])
def test_a_node_without_the_device_says_so_and_serves(
    choice: DeviceChoice, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltern.rdma.sysfs.read_ports", lambda **_: ())
    with structlog.testing.capture_logs() as logged, static_node(rdma=choice) as node:
        with connect_tcp(node) as client:
            client.hello(node.token("acme", "chat"))
            client.put({key(1): block(1)})
    (said,) = [entry for entry in logged if entry["event"] == "no rdma"]
    assert (said["log_level"], said["reason"]) == (level, "RDMA_NO_DEVICE") and said["hint"]


@pytest.mark.parametrize(
    ("choice", "reason"), [(DeviceChoice(), "RDMA_NOT_ENCRYPTED"), (DeviceChoice("pretended0"), "RDMA_NO_DEVICE")]
)
def test_i10_with_tls_only_a_device_that_is_named_is_used(
    choice: DeviceChoice, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltern.rdma.sysfs.read_ports", lambda **_: ())
    authority = Authority(tmp_path / "ca")
    with structlog.testing.capture_logs() as logged, static_node(rdma=choice, tls=authority.server()):
        pass
    assert [entry["reason"] for entry in logged if entry["event"] == "no rdma"] == [reason]
