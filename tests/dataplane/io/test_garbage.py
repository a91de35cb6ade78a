"""A node makes no cyclic garbage of its own, and no full pass of the collector comes while it serves."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import dataplane
from dataplane.io import garbage
from dataplane.settings import SsdSettings
from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.errors import SalternError
from saltern.keys import BlockKey, SaltKey
from saltern.names import TenantId
from tenants.policy import TenantPolicy, TenantState
from tenants.quota import RateLimits, Tier
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until

SOURCES = str(Path(dataplane.__file__).parent)
BLOCK = 4096
LIMITED = tenant_policy(limit_bytes=2 * MIB)


def below(epoch: int) -> TenantPolicy:
    """A tenant with SSD, whose namespace has limits of its own; a rotation is a policy with the next epoch alone."""
    policy = tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=4 * MIB, epochs=(epoch,))
    limits = {Tier.DRAM: MIB, Tier.SSD: 3 * MIB}
    return replace(
        policy, namespaces={name: replace(one, tier_limits=limits) for name, one in policy.namespaces.items()}
    )


@contextmanager
def client_of(node: StaticNode, deadline_ms: float = 5000, *, tenant: str = "a", epoch: int = 1) -> Iterator[Client]:
    credentials = StaticCredentials(
        node.token(tenant, "chat"),
        namespace="chat",
        epoch=epoch,
        nodes=(NodeEndpoint("node-1", node.wire_endpoint, node.shm_path),),
        salt_key=SaltKey(bytes(32)),
        model_fingerprint=b"model",
    )
    with Client.from_credentials(credentials, transport="tcp", deadline_ms=deadline_ms, sessions_max=1) as client:
        yield client


def keys(first: int, count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "little")) for number in range(first, first + count)]


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_ours(one: object) -> bool:
    return str(type(one).__module__).startswith("dataplane.")


def ours(garbage_objects: list[object]) -> Counter[str]:
    """What of it is the node's: objects of its classes, and frames of its functions."""
    found: Counter[str] = Counter()
    for one in garbage_objects:
        if is_ours(one):
            found[type(one).__qualname__] += 1
        elif isinstance(one, types.FrameType) and one.f_code.co_filename.startswith(SOURCES):
            found[one.f_code.co_name] += 1
    return found


def unreachable() -> list[object]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def all_kinds_of_work(node: StaticNode, rounds: int) -> None:
    """Sessions that come and go, entries that come and go, requests that are refused, policies that change."""
    for number in range(rounds):
        with client_of(node) as client:
            client.put_many([(key, bytes(BLOCK)) for key in keys(number * 600, 600)])
            client.get_many(keys(number * 600 + 300, 300))
            client.lookup(keys(number * 600, 600))
            client.delete(keys(number * 600 + 500, 50))
            client.put_many([(keys(0, 1)[0], bytes(3 * MIB))])
        with socket.create_connection(node.wire_address) as bare:
            bare.sendall(b"nonsense" * 8)
            while bare.recv(4096):
                pass
        with client_of(node, deadline_ms=200) as client, suppress(SalternError):
            node.change("a", state=TenantState.SUSPENDED)
            client.lookup(keys(0, 1))
        node.change("a", state=TenantState.ACTIVE, rates=RateLimits(operations_per_s=1))
        with client_of(node, deadline_ms=200) as client:
            for _ in range(3):
                with suppress(SalternError):
                    client.lookup(keys(0, 5_000))
        node.apply({"a": LIMITED})
    wait_until(lambda: node.session_count() == 0)


def test_a_node_makes_no_cyclic_garbage() -> None:
    with static_node({"a": LIMITED}, dram_bytes=4 * MIB) as node:
        all_kinds_of_work(node, 1)
        with no_collector():
            all_kinds_of_work(node, 5)
            found = ours(unreachable())
        assert not found, f"the collector would have to find {found}"


def work_below_dram(node: StaticNode, rounds: range) -> None:
    """Entries that are demoted, read back and deleted; segments that are reclaimed; epochs and tenants that end."""
    for number in rounds:
        node.apply({"a": below(number), "passing": below(1)})
        with client_of(node, epoch=number) as client, client_of(node, tenant="passing") as other:
            for first in range(0, 3_000, 500):
                client.put_many([(key, bytes(BLOCK)) for key in keys(first, 500)])
                client.get_many(keys(max(0, first - 500), 200))
                client.delete(keys(first + 100, 20))
                other.put_many([(key, bytes(BLOCK)) for key in keys(first, 500)])
        node.apply({"a": below(number)})
    wait_until(lambda: node.session_count() == 0)


def test_the_tier_below_dram_makes_no_cyclic_garbage(tmp_path: Path) -> None:
    ssd = SsdSettings(tmp_path / "ssd", 32 * MIB, tmp_path)
    with static_node({"a": LIMITED}, dram_bytes=8 * MIB, ssd=ssd) as node:
        work_below_dram(node, range(1, 3))
        with no_collector():
            work_below_dram(node, range(3, 6))
            usage = node.usage().tenants[TenantId("a")]
            assert usage.ssd is not None and usage.ssd.counters.evictions, "no segment was reclaimed"
            found = ours(unreachable())
        assert not found, f"the collector would have to find {found}"


def test_memory_stays_flat_without_the_collector() -> None:
    """300 sessions and 30,000 puts leave no more objects than they found."""
    with static_node({"a": LIMITED}, dram_bytes=4 * MIB) as node:

        def work(rounds: int) -> None:
            for number in range(rounds):
                with client_of(node) as client:
                    client.put_many([(key, bytes(BLOCK)) for key in keys(number * 100, 100)])
            wait_until(lambda: node.session_count() == 0)

        def node_objects() -> int:
            return sum(map(is_ours, gc.get_objects()))

        work(20)  # the tenant is at its limit from here on
        with no_collector():
            before = node_objects()
            work(300)
            assert node_objects() <= before + 20


_FILL = """
import gc, sys
from dataplane.io import garbage
from dataplane.core.entry import Link

garbage.settle()
passes = []
gc.callbacks.append(lambda phase, told: passes.append(told["generation"]) if phase == "start" else None)
kept = [Link() for _ in range(400_000)]
print(passes.count(0) > 100, passes.count(1) > 100, passes.count(2))
garbage.settle()
print(passes.count(2), gc.get_freeze_count() > len(kept))
"""


def test_no_full_pass_comes_by_itself_and_what_it_has_seen_is_frozen() -> None:
    told = subprocess.run([sys.executable, "-c", _FILL], capture_output=True, text=True, check=True).stdout
    assert told.split("\n")[:2] == ["True True 0", "1 True"]


def test_a_full_pass_waits_until_nobody_has_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    turns = 0

    async def run() -> None:
        nonlocal turns
        monkeypatch.setattr(garbage, "settle", lambda: settled.append(turns))
        monkeypatch.setattr(garbage, "_LOOK_S", 0.001)
        monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1_000))

        def count_busy() -> int:
            nonlocal turns
            turns += turns < 5  # busy for the first five looks
            return turns

        passes = garbage.IdlePasses(count_busy)
        passes.start()
        while not settled:
            await asyncio.sleep(0.001)
        passes.close()
        passes.close()

    asyncio.run(run())
    assert settled[0] == 5
