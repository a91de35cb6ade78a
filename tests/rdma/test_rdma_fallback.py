"""RDMA, else shared memory, else TCP: negotiated when a session opens, logged, counted, forced by option; and a node
that cannot use its device says why and serves."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog.testing
from prometheus_client.parser import text_string_to_metric_families as parse_text

from saltern.cli import rdma_facts
from saltern.cli.finding import State
from saltern.credentials import NodeEndpoint
from saltern.errors import SalternError
from saltern.rdma import BINDING_NAMES, Device, DeviceChoice, choose
from saltern.rdma.bindings import Binding
from saltern.transport import opening
from tests.rdma.attacker import rdma_node, sdk_client
from tests.support.clients import block, static_client
from tests.support.scraping import ask
from tests.support.static_node import StaticNode, static_node
from tests.support.waiting import wait_until

ENTRY = block(1, 4096)


@pytest.fixture(autouse=True)
def _nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_no_rdma_until_s", {})


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    with rdma_node() as running:
        yield running


def taken(node: StaticNode, transport: str, endpoint: NodeEndpoint | None = None) -> str:
    """The transport that a client takes which was told ``transport``."""
    token = node.token("acme", "chat")
    with sdk_client(node, transport) if endpoint is None else static_client(endpoint, token) as client:
        assert client.put_many([ENTRY])
        (found,) = client.get_many([ENTRY[0]])
        assert found.payload == ENTRY[1]  # type: ignore[union-attr]
        return client.transport


def test_auto_takes_rdma_then_shared_memory_then_tcp(
    node: StaticNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    assert taken(node, "auto") == "rdma"
    assert "node node-1: session over rdma" in caplog.messages
    monkeypatch.setenv("SALTERN_RDMA_DEVICE", "off")
    assert taken(node, "auto") == "shm"
    assert taken(node, "auto", NodeEndpoint("node-1", node.wire_endpoint)) == "tcp"


@pytest.mark.parametrize("transport", ["rdma", "shm", "tcp"])
def test_what_was_forced_is_taken(node: StaticNode, transport: str) -> None:
    assert taken(node, transport) == transport


def test_metrics_tell_the_transport_of_sessions_and_requests(node: StaticNode) -> None:
    opened, moved = "sessions_opened_total", "sessions_closed_total"
    labels = {"transport": "tcp", "reason": "CONNECTED"}
    opened_before, moved_before = _of(node, opened, transport="rdma"), _of(node, moved, **labels)
    with sdk_client(node) as client:
        assert client.put_many([ENTRY])
        wait_until(lambda: _of(node, "sessions", transport="rdma") == 1)
    assert _of(node, opened, transport="rdma") == opened_before + 1
    assert _of(node, moved, **labels) == moved_before + 1
    count = "request_duration_seconds_count"
    wait_until(lambda: _of(node, count, transport="rdma", operation="put") > 0)


def _of(node: StaticNode, name: str, **labels: str) -> float:
    """One sample, 0 if it is not there. The rest of the page is long, and is not parsed."""
    page = ask(node.metrics_endpoint, "/metrics").body.decode()
    lines = [line for line in page.splitlines() if line.startswith(f"saltern_node_{name}{{")]
    families = parse_text("\n".join([*lines, ""]))
    return sum(sample.value for family in families for sample in family.samples if sample.labels == labels)


def test_a_node_that_offers_none_is_told_of_once_and_served_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    with static_node() as plain:
        assert [taken(plain, "auto"), taken(plain, "auto")] == ["shm", "shm"]
        assert _forced_reason(plain) == "TRANSPORT_NOT_OFFERED"
    assert len([said for said in caplog.messages if "rdma not usable (TRANSPORT_NOT_OFFERED" in said]) == 1


@pytest.mark.parametrize("reason", ["RDMA_GID_MISMATCH", "RDMA_GID_UNKNOWN", "RDMA_DEVICE_UNKNOWN"])
def test_a_client_with_a_wrong_gid_says_so_and_is_served_by_the_next(
    node: StaticNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    caplog.set_level(logging.INFO, logger="saltern")
    monkeypatch.setenv("SALTERN_RDMA_DEVICE", wrongly_named(reason))
    assert taken(node, "auto") == "shm"
    assert [said for said in caplog.messages if f"rdma not usable ({reason}" in said]
    fabric = node.call(lambda: node._node._state.fabric)
    assert fabric is not None
    node.call(fabric._held_until_s.clear)
    assert _forced_reason(node) == reason
    node.call(fabric._held_until_s.clear)


def wrongly_named(reason: str) -> str:
    """What a client could be told to use on this host that is refused with ``reason``."""
    if reason == "RDMA_DEVICE_UNKNOWN":
        return "nobody_has_it"
    chosen = choose(Device.discover())
    port, is_ipv4 = chosen.port, chosen.entry.gid.is_ipv4
    if reason == "RDMA_GID_UNKNOWN":
        return f"{port.device}:{port.port}:9999"
    others = [entry.index for entry in port.gids if entry.gid.is_ipv4 != is_ipv4]
    return f"{port.device}:{port.port}:{others[0]}" if others else pytest.skip("this port has GIDs of one kind only")


def _forced_reason(node: StaticNode) -> str:
    with sdk_client(node) as client:
        error = getattr(client.put_many([ENTRY])[0], "error", None)
        assert isinstance(error, SalternError)
        return error.reason


@pytest.mark.parametrize(
    ("choice", "reason"),
    [(DeviceChoice(gid_index=9999), "RDMA_GID_UNKNOWN"), (DeviceChoice("nobody_has_it"), "RDMA_DEVICE_UNKNOWN")],
)
def test_a_node_told_to_use_what_is_not_there_says_so_and_serves(choice: DeviceChoice, reason: str) -> None:
    with structlog.testing.capture_logs() as logged, static_node(rdma=choice) as running:
        assert taken(running, "auto") == "shm"
    assert [(entry["log_level"], entry["reason"]) for entry in logged if entry["event"] == "no rdma"] == [
        ("warning", reason)
    ]


def test_a_node_without_a_library_says_so_and_serves_and_doctor_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_not_installed() -> Binding:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("saltern.rdma.bindings._LOADERS", dict.fromkeys(BINDING_NAMES, is_not_installed))
    with structlog.testing.capture_logs() as logged, static_node(rdma=DeviceChoice()) as running:
        assert taken(running, "auto") == "shm"
    (said,) = [entry for entry in logged if entry["event"] == "no rdma"]
    assert (said["log_level"], said["reason"]) == ("warning", "RDMA_NO_LIBRARY")
    found = {finding.check: finding for finding in rdma_facts.examine()}["RDMA library"]
    assert found.state is State.WARN and "libibverbs.so.1" in found.detail and "apt install" in found.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its right to lock memory, and take it back")
def test_a_node_that_may_not_lock_its_arena_says_so_and_serves_and_doctor_names_it() -> None:
    with _nobody(memlock_bytes=1 << 20):
        with structlog.testing.capture_logs() as logged, static_node(rdma=DeviceChoice()) as running:
            assert taken(running, "auto") == "shm"
        found = {finding.check: finding for finding in rdma_facts.examine()}["RDMA locked memory"]
    (said,) = [entry for entry in logged if entry["event"] == "no rdma"]
    assert (said["log_level"], said["reason"]) == ("warning", "RDMA_MEMLOCK")
    assert "LimitMEMLOCK" in said["hint"]
    assert found.state is State.WARN and "1 MiB is too low" in found.detail


@contextmanager
def _nobody(memlock_bytes: int) -> Iterator[None]:
    """For a while this process is not root, whose right to lock memory knows no limit."""
    user = os.geteuid()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, hard))
    try:
        os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
