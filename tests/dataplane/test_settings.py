"""Wrong options are refused before anything starts, with help."""

from __future__ import annotations

import socket

import pytest

from dataplane.settings import Endpoint, NodeSettings, parse_endpoint, parse_mode
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId

LOOPBACK = Endpoint("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("text", "endpoint", "is_loopback"),
    [
        ("127.0.0.1:7701", Endpoint("127.0.0.1", 7701), True),
        ("localhost:0", Endpoint("localhost", 0), True),
        ("[::1]:7701", Endpoint("::1", 7701), True),
        ("0.0.0.0:7701", Endpoint("0.0.0.0", 7701), False),
        ("node-1.example:7701", Endpoint("node-1.example", 7701), False),
    ],
)
def test_addresses(text: str, endpoint: Endpoint, is_loopback: bool) -> None:
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text
    assert endpoint.is_loopback is is_loopback


@pytest.mark.parametrize("text", ["", "7701", ":7701", "host:", "host:x", "host:65536", "host:-1", "host:\uff17"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_endpoint(text)
    assert caught.value.hint


def test_modes() -> None:
    assert parse_mode("0660") == parse_mode("660") == 0o660
    for text in ("", "8", "0o660", "99999", "rw"):
        with pytest.raises(InvalidArgumentError):
            parse_mode(text)


def test_plain_text_beyond_this_host_needs_to_be_asked_for() -> None:
    everywhere = Endpoint("0.0.0.0", 0)
    for listen, grpc_listen in ((everywhere, LOOPBACK), (LOOPBACK, everywhere)):
        arguments = {"node_id": NodeId("n"), "listen": listen, "grpc_listen": grpc_listen, "dram_bytes": 2**20}
        with pytest.raises(InvalidArgumentError) as caught:
            NodeSettings(**arguments)  # type: ignore[arg-type]
        assert caught.value.reason == "PLAINTEXT_REFUSED"
        NodeSettings(**arguments, allow_plaintext=True)  # type: ignore[arg-type]


def test_a_node_that_listens_everywhere_tells_clients_a_name_to_call() -> None:
    assert Endpoint("127.0.0.1", 7).advertised("") == Endpoint("127.0.0.1", 7)
    assert Endpoint("0.0.0.0", 7).advertised("node-1") == Endpoint("node-1", 7)
    assert Endpoint("::", 7).advertised("") == Endpoint(socket.gethostname(), 7)


def test_a_node_needs_some_memory() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        NodeSettings(NodeId("n"), LOOPBACK, LOOPBACK, dram_bytes=4096)
    assert caught.value.reason == "DRAM_TOO_SMALL"
