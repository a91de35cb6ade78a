"""What metering lives on: tokens that hits saved, and counters that are one tenant's alone (I8)."""

from __future__ import annotations

from dataclasses import replace

from dataplane.core.report import ALL_REPORTED_TENANTS_MAX
from dataplane.core.usage import TenantUsage
from dataplane.policy_codec import encode_usage
from saltern.names import NamespaceId, TenantId
from tenants.policy import NodePolicy
from tests.support.cache_node import Node, key_of, make_policy

ACME, NS = TenantId("acme"), NamespaceId("ns")


def policy(version: int, *, uid: str, block_tokens: int = 16, namespace_uid: str = "uid-1") -> NodePolicy:
    plain = make_policy(version, {"acme": (0, 10)}, uid=namespace_uid)
    rules = plain.tenants[ACME]
    namespaces = {NS: replace(rules.namespaces[NS], block_tokens=block_tokens)}
    return NodePolicy(version, {ACME: replace(rules, uid=uid, namespaces=namespaces)})


def usage(node: Node) -> TenantUsage:
    return node.core.usage().tenants[ACME]


def read(node: Node, *numbers: int) -> None:
    node.core.get_end(node.core.get_start(node.partition("acme"), [key_of(number) for number in numbers], node.tick()))


def test_i8_a_hit_saves_the_tokens_of_a_block_and_a_miss_none() -> None:
    node = Node(10, policy(1, uid="first"))
    node.fill("acme", range(3))
    read(node, 0, 1, 2, 7)
    read(node, 2)
    assert (usage(node).counters.get_hits, usage(node).counters.hit_tokens) == (4, 64)
    (report,) = encode_usage(node.core.usage())
    assert (report.hit_tokens, report.tenant_uid) == (64, "first")
    (part,) = report.namespaces
    assert (part.get_hits, part.hit_tokens) == (4, 64)


def test_a_policy_that_does_not_say_how_many_tokens_saves_none() -> None:
    node = Node(10, policy(1, uid="first", block_tokens=0))
    node.fill("acme", range(1))
    read(node, 0)
    assert (usage(node).counters.get_hits, usage(node).counters.hit_tokens) == (1, 0)
    node.apply(policy(2, uid="first"))
    read(node, 0)
    assert usage(node).counters.hit_tokens == 16


def test_i8_a_namesake_begins_at_0_and_a_changed_tenant_goes_on() -> None:
    node = Node(10, policy(1, uid="first"))
    node.fill("acme", range(3))
    read(node, 0, 9)
    node.apply(policy(2, uid="first", block_tokens=32))
    assert usage(node).counters.puts_stored == 3
    node.apply(policy(3, uid="second", namespace_uid="uid-2"))  # deleted and made anew in one step
    counters = usage(node).counters
    assert usage(node).uid == "second"
    assert (counters.puts_stored, counters.get_hits, counters.get_misses, counters.hit_tokens) == (0, 0, 0, 0)
    assert usage(node).used_bytes == 0


def test_i8_of_very_many_tenants_only_those_with_nothing_to_tell_are_left_out_of_reports() -> None:
    names = [f"t-{number}" for number in range(ALL_REPORTED_TENANTS_MAX)]
    few = make_policy(1, dict.fromkeys(names, (0, 10)))
    node = Node(100, few)
    assert set(node.core.reported_tenants()) == few.tenants.keys()
    many = make_policy(2, {**dict.fromkeys(names, (0, 10)), "holds": (0, 10), "missed": (0, 10), "reserves": (1, 10)})
    node.apply(many)
    assert node.core.reported_tenants() == ["reserves"]
    node.fill("holds", range(1))
    node.core.get_end(node.core.get_start(node.partition("missed"), [key_of(1)], node.tick()))
    assert set(node.core.reported_tenants()) == {"holds", "missed", "reserves"}
    told = {tenant for tenant, books in node.core.usage().tenants.items() if books.used_bytes or books.reserved_bytes}
    assert told <= set(node.core.reported_tenants())
