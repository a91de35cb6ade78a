"""Which transport a session takes: rdma before shm before tcp; what was forced, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from saltern import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.errors import InvalidArgumentError, SalternError
from saltern.transport import opening
from tests.support.certificates import Authority
from tests.support.clients import block, node_client
from tests.support.static_node import static_node

ENTRY = block(1, 4096)


@pytest.fixture
def pretended_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lists a device, so that RDMA is worth a try; opening it fails where there is none."""
    (tmp_path / "pretended0").mkdir()
    monkeypatch.setattr(opening, "_RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(opening, "_no_rdma_until_s", {})


def test_auto_tells_why_rdma_was_not_taken_and_tries_it_once_a_minute(
    pretended_device: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    with static_node() as node:
        for _ in range(2):
            with node_client(node) as client:
                assert client.put_many([ENTRY]) and client.transport == "shm"
    assert [record.getMessage() for record in caplog.records].count(
        "node node-1: rdma not usable (TRANSPORT_NOT_OFFERED: node node-1 offers no RDMA)"
    ) == 1


def test_off_and_a_forced_transport_leave_rdma_alone(
    pretended_device: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    with static_node() as node:
        for transport in ("tcp", "shm"):
            with node_client(node, transport) as client:
                client.put_many([ENTRY])
                assert client.transport == transport
        monkeypatch.setenv(opening.RDMA_DEVICE_VARIABLE, "off")
        with node_client(node) as client:
            client.put_many([ENTRY])
            assert client.transport == "shm"
    assert not [record for record in caplog.records if "rdma" in record.getMessage()]


@pytest.mark.parametrize(("device", "tried"), [("", False), ("auto", False), ("pretended0", True)])
def test_i10_a_client_that_uses_tls_leaves_it_for_a_device_that_is_named_only(
    pretended_device: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    tried: bool,
) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    monkeypatch.setenv(opening.RDMA_DEVICE_VARIABLE, device)
    authority = Authority(tmp_path / "ca")
    with static_node(tls=authority.server()) as node:
        endpoint = NodeEndpoint("node-1", node.wire_endpoint, tls_server_name="127.0.0.1")
        credentials = StaticCredentials(node.token("acme", "chat"), namespace="chat", nodes=(endpoint,))
        with Client.from_credentials(credentials, tls=authority.client()) as client:
            client.put_many([ENTRY])
            assert client.transport == "tcp"
    assert any("rdma not usable" in record.getMessage() for record in caplog.records) is tried


def test_rdma_that_was_asked_for_is_not_replaced_by_another() -> None:
    with static_node() as node, node_client(node, "rdma") as client:
        result = client.put_many([ENTRY])[0]
        error = getattr(result, "error", None)
        assert isinstance(error, SalternError) and error.reason == "TRANSPORT_NOT_OFFERED", result
        assert client.transport == ""


def test_an_unknown_transport_is_refused_by_name() -> None:
    with static_node() as node, pytest.raises(InvalidArgumentError) as caught:
        node_client(node, "carrier pigeon")
    assert caught.value.reason == "INVALID_TRANSPORT" and "rdma" in caught.value.hint
