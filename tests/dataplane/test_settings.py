"""Wrong options are refused before anything starts, with help."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.settings import SSD_MIN_BYTES, NodeSettings, SsdSettings, parse_mode
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.names import NodeId
from saltern.tls import ServerTls

LOOPBACK = Endpoint("127.0.0.1", 0)


def test_modes() -> None:
    assert parse_mode("0660") == parse_mode("660") == 0o660
    for text in ("", "8", "0o660", "99999", "rw"):
        with pytest.raises(InvalidArgumentError):
            parse_mode(text)


def test_plain_text_beyond_this_host_needs_to_be_asked_for() -> None:
    everywhere = Endpoint("0.0.0.0", 0)
    for listen, grpc_listen in ((everywhere, LOOPBACK), (LOOPBACK, everywhere)):
        arguments = {"node_id": NodeId("n"), "listen": listen, "grpc_listen": grpc_listen, "dram_bytes": 2**20}
        with pytest.raises(FailedPreconditionError) as caught:
            NodeSettings(**arguments)  # type: ignore[arg-type]
        assert caught.value.reason == "PLAINTEXT_REFUSED"
        NodeSettings(**arguments, allow_plaintext=True)  # type: ignore[arg-type]


def test_with_tls_other_hosts_are_served_without_asking_but_metrics_are_not() -> None:
    everywhere = Endpoint("0.0.0.0", 0)
    tls = ServerTls(Path("cert.pem"), Path("key.pem"))
    settings = NodeSettings(NodeId("n"), everywhere, everywhere, 2**20, tls=tls, metrics_listen=LOOPBACK)
    assert settings.listening_in_plain_text == {"--metrics-listen": LOOPBACK}
    with pytest.raises(FailedPreconditionError) as caught:
        NodeSettings(NodeId("n"), everywhere, everywhere, 2**20, tls=tls, metrics_listen=everywhere)
    assert caught.value.reason == "PLAINTEXT_REFUSED" and "--metrics-listen" in caught.value.message


def test_a_node_needs_some_memory() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        NodeSettings(NodeId("n"), LOOPBACK, LOOPBACK, dram_bytes=4096)
    assert caught.value.reason == "DRAM_TOO_SMALL"


def test_a_soft_mark_is_set_only_where_evictions_cost_puts_something() -> None:
    ssd = SsdSettings(Path("ssd"), SSD_MIN_BYTES, Path("state"))
    settings = {"node_id": NodeId("n"), "listen": LOOPBACK, "grpc_listen": LOOPBACK, "dram_bytes": 2**20}
    assert NodeSettings(**settings).soft_mark == 100  # type: ignore[arg-type]
    assert NodeSettings(**settings, ssd=ssd).soft_mark == 98  # type: ignore[arg-type]
    assert NodeSettings(**settings, ssd=ssd, soft_mark_percent=90).soft_mark == 90  # type: ignore[arg-type]
    assert NodeSettings(**settings, soft_mark_percent=90).soft_mark == 90  # type: ignore[arg-type]
