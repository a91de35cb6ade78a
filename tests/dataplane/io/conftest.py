"""One node for a whole module; after each test its books must be exact and it must still serve others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing

from tests.support.ssd_lives import Start, lives
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

TENANTS = {
    "acme": tenant_policy(limit_bytes=16 * MIB, namespaces=("chat", "code")),
    "blue": tenant_policy(limit_bytes=16 * MIB, namespaces=("chat",)),
}
CONNECT = {"tcp": connect_tcp, "unix": connect_unix}


@pytest.fixture(scope="module")
def shared_node() -> Iterator[StaticNode]:
    with static_node(TENANTS, dram_bytes=64 * MIB) as node:
        yield node


@pytest.fixture
def node(shared_node: StaticNode) -> Iterator[StaticNode]:
    """A node without entries, checked afterwards: books exact, no session or held byte left, others served (I8)."""
    shared_node.apply({})
    shared_node.apply(TENANTS)
    with structlog.testing.capture_logs() as logged:
        yield shared_node
        wait_until(lambda: shared_node.session_count() == 0)
    faults = [entry for entry in logged if entry["log_level"] == "error"]
    assert not faults, "the node met an error that it did not expect"
    shared_node.check_invariants()
    for books in shared_node.usage().tenants.values():
        assert books.in_flight_bytes == books.held_bytes == 0
    shared_node.apply(TENANTS)
    with connect_tcp(shared_node) as other:
        other.hello(shared_node.token("blue", "chat"))
        other.put({key(99): block(99)})
        assert other.get(key(99)) == {key(99): block(99)}
    wait_until(lambda: shared_node.session_count() == 0)


@pytest.fixture(params=list(CONNECT))
def client(node: StaticNode, request: pytest.FixtureRequest) -> Iterator[WireClient]:
    """An open session of acme in its namespace chat, over each door."""
    with CONNECT[request.param](node) as opened:
        opened.hello(node.token("acme", "chat"))
        yield opened


@pytest.fixture(params=list(CONNECT))
def stranger(node: StaticNode, request: pytest.FixtureRequest) -> Iterator[WireClient]:
    """A connection that has not said HELLO, over each door."""
    with CONNECT[request.param](node) as connected:
        yield connected


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts core, tiers and files of a node with tenants a and b; starting another one first kills the one before."""
    with lives(tmp_path) as begin:
        yield begin
