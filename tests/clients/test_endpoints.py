"""Endpoints: one parser for those who listen and those who call."""

from __future__ import annotations

import socket

import pytest

from saltern.endpoints import Endpoint, parse_endpoint
from saltern.errors import InvalidArgumentError


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7701",
        ":7701",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "host:\uff17",
        "http://h:1",
        "a:b:1",
        "[::1",
        "::1:7",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_endpoint(text)
    assert caught.value.hint


def test_a_caller_cannot_call_port_0() -> None:
    assert parse_endpoint("127.0.0.1:0").port == 0
    with pytest.raises(InvalidArgumentError):
        parse_endpoint("127.0.0.1:0", port_min=1)


def test_a_node_that_listens_everywhere_tells_clients_a_name_to_call() -> None:
    assert Endpoint("127.0.0.1", 7).advertised("") == Endpoint("127.0.0.1", 7)
    assert Endpoint("0.0.0.0", 7).advertised("node-1") == Endpoint("node-1", 7)
    assert Endpoint("::", 7).advertised("") == Endpoint(socket.gethostname(), 7)
