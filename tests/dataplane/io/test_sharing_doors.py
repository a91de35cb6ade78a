"""Sharing groups behind real doors, on both tiers: TCP, shared memory and gRPC (I2, I4, I5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.settings import SsdSettings
from saltern import wire
from saltern.cache.v1 import cache_pb2, cache_pb2_grpc
from saltern.errors import PermissionDeniedError, SalternError
from saltern.names import NamespaceId, TenantId
from saltern.rpc_errors import error_from_rpc
from saltern.wire import Opcode
from tenants.policy import GroupPeer, GroupPolicy, TenantPolicy
from tests.dataplane.io.conftest import wait_until
from tests.support.live_files import live_sizes
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.wire_client import block, connect_tcp, connect_unix, key

CHAT = NamespaceId("chat")
SIZE = 64 * 1024
COUNT = 100
ENTRIES = {key(n): block(n, SIZE - n) for n in range(COUNT)}
CONNECT = {"tcp": connect_tcp, "unix": connect_unix}


def member(tenant: str, *peers: str, epochs: tuple[int, ...] = (7,)) -> TenantPolicy:
    """A tenant in the group ``g`` with others, at the group's epochs; its own salt's epoch is 1."""
    policy = tenant_policy(limit_bytes=2 * MIB, ssd_limit_bytes=32 * MIB, uid=f"uid-{tenant}")
    group = GroupPolicy(epochs, tuple(GroupPeer(TenantId(peer), CHAT, f"uid-{peer}") for peer in peers))
    return replace(policy, namespaces={CHAT: replace(policy.namespaces[CHAT], groups={"g": group})})


TENANTS = {
    "acme": member("acme", "blue"),
    "blue": member("blue", "acme"),
    "coal": tenant_policy(limit_bytes=2 * MIB),
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StaticNode]:
    settings = SsdSettings(tmp_path / "ssd", 64 * MIB, tmp_path)
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings) as running:
        yield running
        wait_until(lambda: running.session_count() == 0)
        running.check_invariants()
        for books in running.usage().tenants.values():
            assert books.in_flight_bytes == books.held_bytes == 0


@pytest.mark.parametrize("door", CONNECT)
def test_i2_peers_are_read_on_both_tiers_and_the_reader_pays(node: StaticNode, door: str) -> None:
    with CONNECT[door](node) as acme, CONNECT[door](node) as blue:
        acme.hello(node.token("acme", "chat"), epoch=7, group="g")
        blue.hello(node.token("blue", "chat"), epoch=7, group="g")
        for name, value in ENTRIES.items():  # three times what DRAM holds
            assert acme.put({name: value}).codes == b"\0"
        wait_until(lambda: acme.lookup(*ENTRIES).prefix == COUNT)
        before = node.usage().tenants[TenantId("acme")]
        assert before.ssd is not None and before.ssd.entries >= 60
        assert blue.lookup(*ENTRIES) == acme.lookup(*ENTRIES)

        for name, value in ENTRIES.items():
            assert blue.get(name) == {name: value}

        usage = node.usage().tenants
        after, reader = usage[TenantId("acme")], usage[TenantId("blue")]
        assert reader.ssd is not None and after.ssd is not None
        assert (reader.counters.get_hits, reader.counters.get_misses) == (COUNT, 0)
        assert reader.counters.peer_hits >= 20  # in acme's DRAM; the others came from its SSD into blue's own
        assert reader.ssd.counters.reads >= 60 and after.ssd.counters.reads == before.ssd.counters.reads
        assert (after.used_bytes, after.counters.evictions) == (before.used_bytes, before.counters.evictions)
        assert 0 < reader.used_bytes <= reader.limit_bytes
        # What blue has now is its own: acme's delete is acme's.
        assert acme.delete(*ENTRIES) == COUNT
        newest = list(ENTRIES)[-40:-25]
        assert len(blue.get(*newest)) > 0


def test_i2_the_old_epoch_opens_nothing_and_its_files_are_gone(node: StaticNode, tmp_path: Path) -> None:
    with connect_tcp(node) as acme, connect_tcp(node) as blue:
        acme.hello(node.token("acme", "chat"), epoch=7, group="g")
        blue.hello(node.token("blue", "chat"), epoch=7, group="g")
        for name, value in ENTRIES.items():
            acme.put({name: value})
        wait_until(lambda: bool(live_sizes(tmp_path / "ssd", ".seg")))
        node.apply({**TENANTS, "acme": member("acme", epochs=(8,)), "blue": TENANTS["coal"]})
        with pytest.raises(SalternError) as left:
            blue.get(*ENTRIES)
        with pytest.raises(SalternError) as stayed:
            acme.get(*ENTRIES)
        assert (left.value.reason, stayed.value.reason) == ("GROUP_NOT_AVAILABLE", "EPOCH_NOT_AVAILABLE")
        wait_until(lambda: not live_sizes(tmp_path / "ssd", ".seg"))
        assert node.usage().tenants[TenantId("acme")].used_bytes == 0


def test_i2_refresh_keeps_the_group_and_a_stranger_opens_none(node: StaticNode) -> None:
    with connect_tcp(node) as acme:
        acme.hello(node.token("acme", "chat"), epoch=7, group="g")
        acme.put({key(1): block(1)})
        acme.send(Opcode.REFRESH, wire.Refresh(node.token("acme", "chat")))
        acme.answer(wire.RefreshReply)
        assert acme.get(key(1)) == {key(1): block(1)}
    for tenant, epoch, group, reason in (
        ("coal", 7, "g", "GROUP_NOT_AVAILABLE"),
        ("coal", 1, "g", "GROUP_NOT_AVAILABLE"),
        ("acme", 7, "h", "GROUP_NOT_AVAILABLE"),
        ("acme", 1, "g", "EPOCH_NOT_AVAILABLE"),
        ("acme", 7, "", "EPOCH_NOT_AVAILABLE"),
    ):
        with connect_tcp(node) as client, pytest.raises(PermissionDeniedError) as refused:
            client.hello(node.token(tenant, "chat"), epoch=epoch, group=group)
        assert refused.value.reason == reason


def test_i2_grpc_shares_by_the_same_rules(node: StaticNode) -> None:
    with grpc.insecure_channel(node.grpc_endpoint) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)

        def call(tenant: str, method: str, request: object) -> object:
            metadata = (("authorization", f"Bearer {node.token(tenant, 'chat')}"),)
            try:
                return getattr(stub, method)(request, metadata=metadata, timeout=20)
            except grpc.RpcError as error:
                raise error_from_rpc(error) from None

        where = {"namespace_id": "chat", "epoch": 7, "group_uid": "g"}
        put = cache_pb2.PutBlocksRequest(blocks=[cache_pb2.Block(key=key(1), payload=b"shared")], **where)
        call("acme", "PutBlocks", put)
        get = cache_pb2.GetBlocksRequest(keys=[key(1)], **where)
        found = call("blue", "GetBlocks", get)
        assert isinstance(found, cache_pb2.GetBlocksResponse) and found.blocks[0].payload == b"shared"
        lookup = call("blue", "LookupBlocks", cache_pb2.LookupBlocksRequest(keys=[key(1)], **where))
        assert isinstance(lookup, cache_pb2.LookupBlocksResponse) and lookup.prefix_blocks == 1
        deleted = call("blue", "DeleteBlocks", cache_pb2.DeleteBlocksRequest(keys=[key(1)], **where))
        assert isinstance(deleted, cache_pb2.DeleteBlocksResponse) and deleted.deleted_blocks == 0
        with pytest.raises(PermissionDeniedError) as refused:
            call("coal", "GetBlocks", get)
        assert refused.value.reason == "GROUP_NOT_AVAILABLE"


def test_i12_a_restart_finds_on_ssd_what_is_still_shared_and_no_more(tmp_path: Path) -> None:
    settings = SsdSettings(tmp_path / "ssd", 64 * MIB, tmp_path)
    signing_key = Ed25519PrivateKey.generate()
    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings, signing_key=signing_key) as node:
        with connect_tcp(node) as acme:
            acme.hello(node.token("acme", "chat"), epoch=7, group="g")
            for name, value in ENTRIES.items():
                acme.put({name: value})
            wait_until(lambda: acme.lookup(*ENTRIES).prefix == COUNT)
        wait_until(lambda: node.session_count() == 0)

    with static_node(TENANTS, dram_bytes=8 * MIB, ssd=settings, signing_key=signing_key) as node:
        with connect_tcp(node) as blue:
            blue.hello(node.token("blue", "chat"), epoch=7, group="g")
            wait_until(lambda: sum(blue.lookup(*ENTRIES).found) >= 60)
            there = [name for name, found in zip(ENTRIES, blue.lookup(*ENTRIES).found, strict=True) if found]
            assert blue.get(there[0]) == {there[0]: ENTRIES[there[0]]}
        wait_until(lambda: node.session_count() == 0)

    later = {**TENANTS, "acme": member("acme", epochs=(8,)), "blue": TENANTS["coal"]}
    with static_node(later, dram_bytes=8 * MIB, ssd=settings, signing_key=signing_key) as node:
        with connect_tcp(node) as acme:
            acme.hello(node.token("acme", "chat"), epoch=8, group="g")
            wait_until(lambda: not live_sizes(tmp_path / "ssd", ".seg"))  # keys first, then files
            assert sum(acme.lookup(*ENTRIES).found) == 0
        wait_until(lambda: node.session_count() == 0)
