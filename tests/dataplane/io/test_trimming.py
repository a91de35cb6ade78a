"""The soft mark: what is above it leaves between requests, in small turns, behind everybody who waits."""

from __future__ import annotations

import asyncio

from dataplane.core.usage import EvictionCause
from dataplane.io.trimming import TRIM_BYTES
from saltern.names import TenantId
from tests.support.static_node import MIB, static_node, tenant_policy
from tests.support.stepwise_node import stepwise_node
from tests.support.waiting import wait_until
from tests.support.wire_client import block, connect_tcp, key

LIMIT = 20 * MIB


def test_after_puts_a_tenant_comes_down_to_its_soft_mark() -> None:
    with (
        static_node({"acme": tenant_policy(limit_bytes=LIMIT)}, soft_mark_percent=90) as node,
        connect_tcp(node) as client,
    ):
        client.hello(node.token("acme", "chat"))
        for number in range(80):
            assert client.put({key(number): block(number, MIB // 4)}).codes == b"\0"
        wait_until(lambda: node.usage().tenants[TenantId("acme")].used_bytes <= LIMIT * 9 // 10)
        usage = node.usage().tenants[TenantId("acme")]
        assert usage.counters.evictions_by_cause[EvictionCause.SOFT_MARK] >= 8
        assert EvictionCause.OWN_LIMIT not in usage.counters.evictions_by_cause, "no put had to evict"
        assert client.lookup(key(79), key(0)).found == b"\x01\x00", "the coldest has gone"
        node.check_invariants()


def test_trimming_is_cut_into_turns_behind_those_who_wait() -> None:
    async def run() -> None:
        async with stepwise_node(
            {"acme": tenant_policy(limit_bytes=LIMIT), "blue": tenant_policy(limit_bytes=MIB)}
        ) as node:
            writer, reader = node.connect("acme"), node.connect("blue")
            for number in range(160):
                writer.put(key(number), block(number, MIB // 8))
                while not writer.receive():
                    node.round()
            before = node.used_bytes("acme")
            reader.send_pings(200)
            for _ in range(4):
                node.round()
            answered = reader.receive()
            trimmed = before - node.used_bytes("acme")
            assert answered and trimmed <= 2 * TRIM_BYTES, "who waits goes first"
            while node.used_bytes("acme") > LIMIT * 9 // 10:
                node.round()

    asyncio.run(run())


def test_what_a_policy_leaves_to_do_is_done_in_turns_and_without_another_request() -> None:
    with (
        static_node({"acme": tenant_policy(limit_bytes=LIMIT), "blue": tenant_policy(limit_bytes=LIMIT)}) as node,
        connect_tcp(node) as client,
    ):
        client.hello(node.token("acme", "chat"))
        for first in range(0, 2_000, 500):
            client.put({key(number): bytes(4096) for number in range(first, first + 500)})
        node.apply({"acme": tenant_policy(limit_bytes=MIB)})
        wait_until(lambda: node.usage().tenants[TenantId("acme")].used_bytes == MIB)
        node.apply({"blue": tenant_policy(limit_bytes=LIMIT)})
        wait_until(lambda: TenantId("acme") not in node.usage().tenants)
        node.check_invariants()
