"""I7 on both sides: memory that a transfer names serves nothing else before its completion has come or its queue pair
is gone, however late the completion is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from dataplane.io.rdma import Link
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.errors import DeadlineExceededError
from saltern.names import TenantId
from saltern.results import Hit, Miss
from saltern.transport.rdma import RdmaSession
from tests.rdma.attacker import RdmaClient, rdma_node, sdk_client
from tests.support.clients import block
from tests.support.static_node import MIB, StaticNode, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import block as wire_block
from tests.support.wire_client import key

TINY = TenantId("tiny")


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    tenants = {"acme": tenant_policy(limit_bytes=16 * MIB), "tiny": tenant_policy(limit_bytes=MIB)}
    with rdma_node(32 * MIB, tenants, limits=SessionLimits(stall_s=3)) as running:
        yield running


class Delay:
    """While it ``is_on`` the node's device goes on, but what it has completed is not looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        look = Link._on_completions
        monkeypatch.setattr(Link, "_on_completions", lambda link: None if self.is_on else look(link))


@pytest.fixture
def delay(monkeypatch: pytest.MonkeyPatch) -> Delay:
    """For queue pairs that are connected from now on."""
    return Delay(monkeypatch)


def test_i7_an_extent_is_not_given_out_again_before_its_completion_has_been_seen(
    node: StaticNode, delay: Delay
) -> None:
    """The bytes have long been there; as long as the node does not know it, the extent is nobody else's."""
    with RdmaClient(node, "tiny") as late, RdmaClient(node, "tiny") as other:
        delay.is_on = True
        late.send_put({key(1): wire_block(1, MIB)})
        wait_until(lambda: node.usage().tenants[TINY].in_flight_bytes == MIB)
        other.send_put({key(2): wire_block(2, MIB)})  # the tenant has room for one
        wait_until(lambda: node.call(lambda: _has_ended(node)))
        assert node.usage().tenants[TINY].in_flight_bytes == MIB
        delay.is_on = False
        assert late.wire.answer(wire.PutReply)[0].codes == b"\0", "published once it was known to be whole"
        assert other.wire.answer(wire.PutReply)[0].codes == b"\0", "and evicted for the next"
        assert other.get(key(2), MIB) == wire_block(2, MIB)


def _has_ended(node: StaticNode) -> bool:
    """Whether the device has completed what some session has posted, and nobody has looked at it yet."""
    fabric = node._node._state.fabric
    assert fabric is not None
    return any(link._completions.wait(0) for link in fabric._links.values())


def test_i7_a_session_that_is_cancelled_gives_memory_back_after_its_queue_pair_is_gone(
    node: StaticNode, delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def told(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def tell(*arguments: object) -> object:
            result = function(*arguments)
            order.append(name)
            return result

        return tell

    with RdmaClient(node, "tiny") as leaving:
        (link,) = node.call(lambda: list(node._node._state.fabric._links.values()))  # type: ignore[union-attr]
        core = node._node._core
        monkeypatch.setattr(link._queue_pair, "_destroy", told("queue pair destroyed", link._queue_pair._destroy))
        monkeypatch.setattr(core, "put_abort", told("extent free", core.put_abort))
        delay.is_on = True
        leaving.send_put({key(3): wire_block(3, MIB)})
        wait_until(lambda: node.usage().tenants[TINY].in_flight_bytes == MIB)
    wait_until(lambda: node.session_count() == 0)
    assert order == ["queue pair destroyed", "extent free"]
    assert node.usage().tenants[TINY].in_flight_bytes == 0


def test_i7_a_client_that_gave_up_has_its_memory_for_itself(node: StaticNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stands still beyond the client's deadline and then writes: into nothing, for that queue pair is gone."""
    name, value = block(7, MIB)
    go_on, stands = threading.Event(), threading.Event()
    closed: list[RdmaSession] = []
    close = RdmaSession.close

    def close_and_tell(session: RdmaSession) -> None:
        close(session)
        closed.append(session)

    def stand_still() -> None:
        stands.set()
        go_on.wait(25)

    monkeypatch.setattr(RdmaSession, "close", close_and_tell)
    with sdk_client(node) as client, client.allocate(MIB) as buffer:
        assert client.put_many([(name, value)])
        (warm,) = client.get_into([name], [buffer.view])
        assert isinstance(warm, Hit) and warm.payload == value
        held = threading.Thread(target=node.call, args=(stand_still,))
        held.start()
        try:
            assert stands.wait(25)
            (late,) = client.get_into([name], [buffer.view], deadline_ms=300)
            assert isinstance(late, Miss) and isinstance(late.cause, DeadlineExceededError)
            assert closed, "the session was closed with the call"
            buffer.view[:] = bytes(MIB)
        finally:
            go_on.set()
            held.join()
        wait_until(lambda: node.session_count() == 0)  # the node has tried, and its queue pair is gone as well
        assert bytes(buffer.view) == bytes(MIB)
        (again,) = client.get_into([name], [buffer.view])
        assert isinstance(again, Hit) and again.payload == value, "a new session serves the same buffer"
