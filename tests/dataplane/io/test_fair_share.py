"""Turns between real sessions: shares by weight, whatever the number of sessions, and nobody is stalled (DESIGN 7).

Rounds are run by hand, so that what is asserted is order and share, and no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from dataplane.core.work import TOKEN_WORK
from dataplane.io.scheduler import ROUND_WORK
from dataplane.settings import SessionLimits
from saltern import wire
from saltern.wire import Opcode
from tenants.policy import TenantPolicy
from tenants.quota import Tier, TierQuota
from tests.support.static_node import MIB, tenant_policy
from tests.support.stepwise_node import StepwiseClient, StepwiseNode, stepwise_node
from tests.support.wire_client import block, key

LIMITS = SessionLimits()


def weighing(weight: int) -> TenantPolicy:
    policy = tenant_policy(limit_bytes=64 * MIB)
    return replace(policy, tiers={**policy.tiers, Tier.DRAM: TierQuota(0, 64 * MIB, weight)})


TENANTS = {"acme": weighing(100), "blue": weighing(100), "cyan": weighing(300)}


def stepwise(test: Callable[[StepwiseNode], Awaitable[None]]) -> None:
    async def run() -> None:
        async with stepwise_node(TENANTS) as node:
            await test(node)

    asyncio.run(run())


def fill(client: StepwiseClient, node: StepwiseNode, entries: int) -> None:
    """Store entries of 1 MiB, one at a time."""
    for number in range(entries):
        value = block(number, MIB)
        body = wire.encode_body(wire.Put(key(number), [MIB], wire.join_sums([wire.checksum(value)])))
        frame = memoryview(wire.encode_request(Opcode.PUT, 1, body, MIB) + value)
        while frame:
            try:
                frame = frame[client.sock.send(frame) :]
            except BlockingIOError:
                node.round()
        while not client.receive():
            node.round()


@pytest.mark.parametrize(("crowd", "expected"), [("blue", 1.0), ("cyan", 3.0)])
def test_requests_are_shared_by_weight_and_not_by_sessions(crowd: str, expected: float) -> None:
    async def test(node: StepwiseNode) -> None:
        loner, *crowded = node.connect("acme"), *(node.connect(crowd) for _ in range(30))
        one, many = node.traffic("acme").flow, node.traffic(crowd).flow
        for client in (loner, *crowded):
            client.send_pings(400)
        before = one.work, many.work
        answered = {loner: 0, **dict.fromkeys(crowded, 0)}
        for _ in range(40):
            node.round()
            for client in answered:
                answered[client] += client.receive()
        assert one.waiting and many.waiting, "both had something to do all the time"
        shares = (many.work - before[1]) / (one.work - before[0])
        turn = 2 * LIMITS.short_turn_bytes / (one.work - before[0])
        assert abs(shares - expected) <= expected * turn + turn
        in_bytes = sum(answered[client] for client in crowded) / answered[loner]
        assert abs(in_bytes - expected) <= expected * 0.2, "what came back over the sockets agrees"
        counts = [answered[client] for client in crowded]
        assert max(counts) - min(counts) <= 2 * max(counts) / 3 + 1000, "and its sessions take turns among themselves"

    stepwise(test)


def test_bytes_sent_are_shared_by_weight() -> None:
    async def test(node: StepwiseNode) -> None:
        names = ("acme", "cyan")
        clients = {name: [node.connect(name) for _ in range(12)] for name in names}
        get = wire.encode_body(wire.Get(b"".join(key(n) for n in range(4)), [MIB] * 4))
        for name in names:
            fill(clients[name][0], node, 4)
            for client in clients[name]:
                for _ in range(60):
                    client.send(Opcode.GET, get)
        flows = {name: node.traffic(name).flow for name in names}
        before = {name: flow.work for name, flow in flows.items()}
        sent = dict.fromkeys(names, 0)
        for _ in range(120):
            node.round()
            for name in names:
                sent[name] += sum(client.receive() for client in clients[name])
        worked = {name: flows[name].work - before[name] for name in names}
        assert abs(worked["cyan"] / worked["acme"] - 3) <= 0.3
        assert abs(sent["cyan"] / sent["acme"] - 3) <= 0.3

    stepwise(test)


def test_a_victim_is_answered_after_a_few_turns_of_a_crowd() -> None:
    async def test(node: StepwiseNode) -> None:
        victim = node.connect("acme")
        crowd = [node.connect("blue") for _ in range(250)]
        for client in crowd:
            client.send_pings(200)
        for _ in range(5):
            node.round()
        flow = node.traffic("blue").flow
        assert flow.waiting >= 200
        for _ in range(20):
            turns, work = flow.turns, flow.work
            victim.send_pings(1)
            while not victim.receive():
                node.round()
            assert flow.turns - turns <= 3
            assert flow.work - work <= ROUND_WORK + LIMITS.turn_bytes, "a long turn, if any, comes after the victim's"
            for client in crowd:
                client.receive()
        assert flow.waiting >= 200

    stepwise(test)


def test_a_huge_batch_of_one_is_cut_into_turns() -> None:
    """4,096 keys looked for and deleted: a neighbour's small requests are answered in between."""

    async def test(node: StepwiseNode) -> None:
        victim, huge = node.connect("acme"), node.connect("blue")
        keys = b"".join(key(number) for number in range(4096))
        for opcode, body in (
            (Opcode.GET, wire.encode_body(wire.Get(keys, [MIB] * 4096))),
            (Opcode.DELETE, wire.encode_body(wire.Delete(keys))),
        ):
            frame = memoryview(wire.encode_request(opcode, 1, body))
            while frame:
                try:
                    frame = frame[huge.sock.send(frame) :]
                except BlockingIOError:
                    node.round()
            answered = 0
            while not huge.receive():
                victim.send_pings(1)
                while not victim.receive():
                    node.round()
                answered += 1
            assert answered >= 5

    stepwise(test)


def test_connections_that_never_open_are_one_small_class() -> None:
    """I2: a flood of connects and half hellos takes nothing from tenants worth naming."""

    async def test(node: StepwiseNode) -> None:
        victim = node.connect("acme")
        flood = [node.plug() for _ in range(LIMITS.unopened_max)]
        hello = wire.encode_request(Opcode.HELLO, 1, wire.encode_body(wire.Hello("no token", "chat", 1)))
        for client in flood:
            client.sock.send(hello)
        victim.send_pings(64)
        unopened, mine = node.state.traffic.unopened, node.traffic("acme").flow
        before = unopened.work, mine.work
        received = 0
        while received < 64 * (wire.HEADER_BYTES + 1):
            node.round()
            received += victim.receive()
        share = LIMITS.unopened_weight / mine.weight
        assert unopened.work - before[0] <= share * (mine.work - before[1]) + 2 * TOKEN_WORK

    stepwise(test)


def test_a_new_weight_counts_for_open_sessions() -> None:
    async def test(node: StepwiseNode) -> None:
        first, second = node.connect("acme"), node.connect("blue")
        one, other = node.traffic("acme").flow, node.traffic("blue").flow
        node.state.traffic.apply(replace(node.core.policy, tenants={**node.core.policy.tenants, "acme": weighing(500)}))
        for client in (first, second):
            client.send_pings(500)
        before = one.work, other.work
        for _ in range(25):
            node.round()
            first.receive(), second.receive()
        assert one.waiting and other.waiting
        assert 4 <= (one.work - before[0]) / (other.work - before[1]) <= 6

    stepwise(test)
