"""Saltern behind the suite's interface: a real node on real doors, a frozen one, and the whole service."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.core.entry import Entry
from dataplane.io.engines import MooncakeSettings
from dataplane.settings import SsdSettings
from saltern import wire
from saltern.admin_client import open_channel
from saltern.async_client import AsyncClient
from saltern.cache.v1.cache_pb2 import GetBlocksRequest
from saltern.cache.v1.cache_pb2_grpc import CacheServiceStub
from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.errors import InvalidArgumentError, SalternError
from saltern.keys import BlockKey, SaltKey
from saltern.names import NamespaceId, TenantId, parse_namespace_id, parse_tenant_id
from saltern.results import AlreadyStored, Error, Hit, Miss, PutResult, Stored
from saltern.wire import Opcode
from tenants.policy import GroupPeer, GroupPolicy, NamespacePolicy
from tenants.quota import Tier, TierQuota
from tenants.tokens import Audience
from tests.isolation.adapter import (
    MIB,
    Attempt,
    Deployment,
    FrozenStore,
    NotOfferedError,
    Over,
    Put,
    Quota,
    Store,
    StoreAdapter,
    TenantClient,
)
from tests.isolation.blocks import key_of
from tests.isolation.saltern_deployment import running_deployment
from tests.support.bad_tokens import bad_tokens
from tests.support.clients import endpoint_of
from tests.support.node_process import NodeProcess, node_process
from tests.support.static_node import ISSUER, KID, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import Segment, WireClient, connect_tcp, connect_unix

#: A healthy but busy machine must never cut a call short.
DEADLINE_MS = 120_000
FROZEN_DEADLINE_MS = 500
_TICK_S = 0.02
#: What a tenant may have in a store below, where the case does not say.
_STORE_BYTES = 64 * MIB
#: A case with this much DRAM fills it with entries of 8 bytes and counts them; a batch of gets larger than DRAM brings
#: back its head alone (docs/ssd.md), and so the case asks for DRAM alone.
_LARGE_BYTES = 256 * MIB
_CHAT, _GROUP = NamespaceId("chat"), "group-1"
_SMALL_BUFFER_BYTES = 64 * 1024
_SHM_COPIES, _SHM_ENTRY_BYTES = 6, 8 * MIB


class SalternAdapter(StoreAdapter):
    """Starts a node for each case; the whole service, which takes seconds to start, once until :meth:`close`.

    Args:
        transport: of the honest clients, ``shm`` or ``tcp``; the hostile ones use every door.
        mooncake: a store below every node, in which every tenant may have as much as it likes: what DRAM evicts is
            there, and comes back from there.
    """

    def __init__(self, transport: str = "shm", mooncake: MooncakeSettings | None = None) -> None:
        self.name = f"Saltern over {transport}" + (" above Mooncake" if mooncake else "")
        self._mooncake = mooncake
        self._transport = transport
        self._resources = ExitStack()
        self._deployments: dict[str, Deployment] = {}

    def close(self) -> None:
        self._resources.close()

    @contextmanager
    def store(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> Iterator[Store]:
        below = {tenant: quota.ssd_limit_bytes for tenant, quota in tenants.items()}
        if self._mooncake is not None:
            below = {
                tenant: limit_bytes or (_STORE_BYTES if tenants[tenant].limit_bytes < _LARGE_BYTES else 0)
                for tenant, limit_bytes in below.items()
            }
        policies = {
            tenant: tenant_policy(
                limit_bytes=quota.limit_bytes,
                reserved_bytes=quota.reserved_bytes,
                ssd_limit_bytes=below[tenant],
            )
            for tenant, quota in tenants.items()
        }
        ssd_bytes = sum(below.values())
        with ExitStack() as resources:
            ssd = None
            if ssd_bytes:
                folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="saltern-ssd-")))
                ssd = SsdSettings(folder / "ssd", ssd_bytes, folder, mooncake=self._mooncake)
            node = resources.enter_context(static_node(policies, dram_bytes=capacity_bytes, ssd=ssd))
            yield SalternStore(node, self._transport, resources)
            node.check_invariants()

    @contextmanager
    def frozen_store(self) -> Iterator[FrozenStore]:
        with node_process() as process:
            yield FrozenNode(process, self._transport)

    @contextmanager
    def deployment(self, tenants: Mapping[str, Quota], *, capacity_bytes: int) -> Iterator[Deployment]:
        wanted = f"{tenants} in {capacity_bytes}"
        if wanted not in self._deployments:
            starting = running_deployment(
                tenants, capacity_bytes=capacity_bytes, make_client=SalternClient, mooncake=self._mooncake
            )
            self._deployments[wanted] = self._resources.enter_context(starting)
        yield self._deployments[wanted]


class SalternClient(TenantClient):
    """The SDK's client, with keys taken as they are: nothing but the node keeps tenants apart."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[Put]:
        return [_outcome(result) for result in self._client.put_many((BlockKey(key), value) for key, value in items)]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        results = self._client.get_many(map(BlockKey, keys))
        return [bytes(result.payload) if isinstance(result, Hit) else None for result in results]

    def get_into(self, key: bytes, buffer: bytearray) -> int | None:
        [result] = self._client.get_into([BlockKey(key)], [buffer])
        return result.size_bytes if isinstance(result, Hit) else None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._client.exists(map(BlockKey, keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._client.delete(map(BlockKey, keys)).count


def _outcome(result: PutResult) -> Put:
    match result:
        case Stored():
            return Put.STORED
        case AlreadyStored():
            return Put.THERE
        case _:
            return Put.REFUSED


class SalternStore(Store):
    """A node with a fixed policy; every tenant has the namespace ``chat`` and what :meth:`client` asks for besides."""

    def __init__(self, node: StaticNode, transport: str, resources: ExitStack) -> None:
        self._node = node
        self._transport = transport
        self._resources = resources
        self._clients: dict[tuple[str, str], SalternClient] = {}
        self._group_epoch = 1

    def client(self, tenant: str, namespace: str = "chat") -> TenantClient:
        made = self._clients.get((tenant, namespace))
        if made is None:
            self._require_namespace(tenant, namespace)
            credentials = StaticCredentials(
                self._node.token(tenant, namespace),
                namespace=namespace,
                nodes=(endpoint_of(self._node),),
                salt_key=SaltKey(bytes(32)),
                model_fingerprint=b"model",
            )
            client = Client.from_credentials(credentials, transport=self._transport, deadline_ms=DEADLINE_MS)
            made = self._clients[tenant, namespace] = SalternClient(self._resources.enter_context(client))
        return made

    def _require_namespace(self, tenant: str, namespace: str) -> None:
        """What the control plane does: refuse what is no name, else make the namespace."""
        try:
            tenant_id, namespace_id = parse_tenant_id(tenant), parse_namespace_id(namespace)
        except InvalidArgumentError as error:
            raise NotOfferedError(str(error)) from None
        policy = self._node.tenants.get(tenant_id)
        if policy is None:
            raise NotOfferedError(f"there is no tenant {tenant}")
        if namespace_id not in policy.namespaces:
            # One uid for all: the names alone must keep them apart.
            made = {**policy.namespaces, namespace_id: NamespacePolicy("uid-1", 8 * MIB, (1,))}
            self._node.change(tenant, namespaces=made)

    # ---- sharing on purpose

    def agree_to_share(self, tenant: str, other: str) -> None:
        self._set_peers(tenant, (GroupPeer(TenantId(other), _CHAT, "uid-1"),))

    def stop_sharing(self, tenant: str) -> None:
        """What the control plane does when a member leaves: it is out, and the others get a new epoch."""
        self._group_epoch += 1
        for other, policy in list(self._node.tenants.items()):
            if policy.namespaces[_CHAT].groups:
                self._set_peers(other, None if other == tenant else ())

    def _set_peers(self, tenant: str, peers: tuple[GroupPeer, ...] | None) -> None:
        policy = self._node.tenants[TenantId(tenant)]
        groups = {} if peers is None else {_GROUP: GroupPolicy((self._group_epoch,), peers)}
        chat = replace(policy.namespaces[_CHAT], groups=groups)
        self._node.change(tenant, namespaces={**policy.namespaces, _CHAT: chat})

    def shared_client(self, tenant: str) -> TenantClient:
        credentials = StaticCredentials(
            self._node.token(tenant, _CHAT),
            namespace=_CHAT,
            nodes=(endpoint_of(self._node),),
            epoch=self._group_epoch,
            salt_key=SaltKey(bytes(32)),
            model_fingerprint=b"model",
            sharing_group_uid=_GROUP,
        )
        client = Client.from_credentials(credentials, transport=self._transport, deadline_ms=DEADLINE_MS)
        return SalternClient(self._resources.enter_context(client))

    def used_bytes(self, tenant: str) -> int:
        usage = self._node.usage().tenants.get(TenantId(tenant))
        return usage.used_bytes if usage else 0

    def ssd_used_bytes(self, tenant: str) -> int:
        usage = self._node.usage().tenants.get(TenantId(tenant))
        return usage.ssd.used_bytes if usage and usage.ssd else 0

    def set_limit(self, tenant: str, limit_bytes: int) -> None:
        # Nothing below DRAM any more, either: the case counts what is left in DRAM by what can still be read.
        self._node.change(tenant, tiers={Tier.DRAM: TierQuota(0, limit_bytes)})
        if self._node.ssd_status() is not None:
            # What leaves DRAM is copied on its way out, some MiB at a time: the control plane waits for this, too.
            wait_until(self._node.is_settled)

    def limit_namespace(self, tenant: str, namespace: str, limit_bytes: int) -> None:
        self._require_namespace(tenant, namespace)
        policy = self._node.tenants[TenantId(tenant)]
        name = NamespaceId(namespace)
        # Books of namespaces are told apart by uid, which no two have in common outside of this suite.
        limited = replace(policy.namespaces[name], uid=f"uid-{name}", tier_limits={Tier.DRAM: limit_bytes})
        self._node.change(tenant, namespaces={**policy.namespaces, name: limited})

    def remove_all(self, tenant: str) -> None:
        self._node.apply({name: policy for name, policy in self._node.tenants.items() if name != tenant})

    # ---- the hostile client

    def impersonate(self, victim: str, by: str, key: bytes, forged: bytes) -> list[Attempt]:
        own = self._node.token(by, "chat")
        table = bad_tokens(
            self._node.signing_key,
            Ed25519PrivateKey.generate(),
            KID,
            ISSUER,
            int(time.time()),
            Audience.NODE,
            tenant=victim,
            subject=f"tenants/{victim}/apiKeys/test",
        )
        tokens = {"own token and a field tenant": own, "no token": ""} | {row.name: row.token for row in table}
        attempts = [
            self._over_wire(f"{how}, {door.__name__}", door, token, victim, key, forged)
            for how, token in tokens.items()
            for door in (connect_tcp, connect_unix)
        ]
        attempts += [self._over_grpc(f"{how}, gRPC", token, victim, by, key) for how, token in tokens.items()]
        attempts.append(self._without_hello(key))
        return attempts

    def _over_wire(
        self, how: str, connect: Callable[[StaticNode], WireClient], token: str, victim: str, key: bytes, forged: bytes
    ) -> Attempt:
        with connect(self._node) as client:
            hello = {"token": token, "namespace": "chat", "epoch": 1, "tenant": victim, "tenant_id": victim}
            body = msgspec.msgpack.encode(hello)
            client.sock.sendall(wire.encode_request(Opcode.HELLO, 1, body))
            try:
                reply, _ = client.answer(wire.HelloReply)
            except (SalternError, EOFError):
                return Attempt(how, opened=False, value=None)
            value = client.get(key).get(key)
            client.put({key: forged})
            client.delete(key)
            return Attempt(how, opened=reply.tenant == victim, value=value)

    def _over_grpc(self, how: str, token: str, victim: str, by: str, key: bytes) -> Attempt:
        metadata = (("tenant", victim), ("x-tenant-id", victim), ("authorization", f"Bearer {token}"))
        request = GetBlocksRequest(namespace_id="chat", epoch=1, keys=[key])
        with open_channel(self._node.grpc_endpoint) as channel:
            try:
                reply = CacheServiceStub(channel).GetBlocks(request, timeout=30, metadata=metadata)
            except (grpc.RpcError, UnicodeError, ValueError):
                return Attempt(how, opened=False, value=None)
        hits = [block.payload for block in reply.blocks if block.payload]
        return Attempt(how, opened=bool(hits), value=hits[0] if hits else None)

    def _without_hello(self, key: bytes) -> Attempt:
        with connect_tcp(self._node) as client:
            try:
                value = client.get(key).get(key)
            except (SalternError, EOFError):
                return Attempt("a get before HELLO", opened=False, value=None)
        return Attempt("a get before HELLO", opened=True, value=value)

    def overwrite(self, victim: str, by: str, key: bytes, forged: bytes) -> list[str]:
        tried = []
        with connect_tcp(self._node) as client:
            client.hello(self._node.token(by, "chat"))
            client.put({key: forged})
            tried.append("the same key over tcp")
            client.delete(key)
            tried.append("a delete of it")
        with connect_unix(self._node) as client, Segment(len(forged)) as segment:
            client.hello(self._node.token(by, "chat"))
            segment.memory[:] = forged
            client.register([segment.descriptor], len(forged))
            sums = wire.join_sums([wire.checksum(forged)])
            for region, offset in ((0, 0), (0, len(forged)), (0, 2**40), (7, 0)):
                client.send(Opcode.PUT, wire.Put(key, [len(forged)], sums, region=region, offsets=[offset]))
                with suppress(SalternError):
                    client.answer(wire.PutReply)
                client.send(Opcode.GET, wire.Get(key, [len(forged)], region=region, offsets=[offset]))
                with suppress(SalternError):
                    client.answer(wire.GetReply)
            segment.memory[:] = bytes(len(forged))  # after the node has taken what it wanted
            tried.append("its own region, inside and outside of it, and scribbling over it afterwards")
        return tried

    def slow_get(self, tenant: str, key: bytes, meanwhile: Callable[[], None], *, over: Over) -> bytes | None:
        return (self._slow_get_tcp if over is Over.TCP else self._slow_get_shm)(tenant, key, meanwhile)

    def _slow_get_tcp(self, tenant: str, key: bytes, meanwhile: Callable[[], None]) -> bytes | None:
        with connect_tcp(self._node) as client:
            # Nobody takes the reply, so the node keeps most of it.
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _SMALL_BUFFER_BYTES)
            client.hello(self._node.token(tenant, "chat"))
            client.send(Opcode.GET, wire.Get(key, [wire.ENTRY_MAX_BYTES]))
            header = wire.decode_header(client.read(wire.HEADER_BYTES))
            reply = wire.decode_body(wire.GetReply, client.read(header.body_bytes))
            first = client.read(min(1000, header.payload_bytes))
            meanwhile()
            payload = first + client.read(header.payload_bytes - len(first))
        return payload if reply.codes == b"\0" else None

    def _slow_get_shm(self, tenant: str, key: bytes, meanwhile: Callable[[], None]) -> bytes | None:
        """The node copies and waits for nobody: so many copies of the entry are asked for that it takes turns."""
        room_bytes = _SHM_COPIES * _SHM_ENTRY_BYTES
        with connect_unix(self._node) as client, Segment(room_bytes) as segment:
            client.hello(self._node.token(tenant, "chat"))
            client.register([segment.descriptor], room_bytes)
            offsets = list(range(0, room_bytes, _SHM_ENTRY_BYTES))
            get = wire.Get(key * _SHM_COPIES, [_SHM_ENTRY_BYTES] * _SHM_COPIES, region=0, offsets=offsets)
            client.send(Opcode.GET, get)
            meanwhile()
            reply, _ = client.answer(wire.GetReply)
            copies = {
                bytes(segment.memory[offset : offset + size]) if code == 0 else None
                for offset, code, size in zip(offsets, reply.codes, reply.sizes, strict=True)
            }
        assert len(copies) == 1, f"{len(copies)} different copies of one entry"
        return copies.pop()

    @contextmanager
    def half_put(self, tenant: str, key: bytes, value: bytes, *, over: Over) -> Iterator[None]:
        """Over shared memory: through that door, and once more from a region that holds only half of it."""

        def in_flight_bytes() -> int:
            return self._node.usage().tenants[TenantId(tenant)].in_flight_bytes

        put = wire.Put(key, [len(value)], wire.join_sums([wire.checksum(value)]))
        half = value[: len(value) // 2]
        if over is Over.SHM:
            with connect_unix(self._node) as client, Segment(len(value)) as segment:
                client.hello(self._node.token(tenant, "chat"))
                client.register([segment.descriptor], len(value))
                segment.memory[: len(half)] = half
                client.send(Opcode.PUT, msgspec.structs.replace(put, region=0, offsets=[0]))
                reply, _ = client.answer(wire.PutReply)
                assert reply.codes != b"\0", "a value whose sum does not match was acknowledged"
        with (connect_tcp if over is Over.TCP else connect_unix)(self._node) as client:
            client.hello(self._node.token(tenant, "chat"))
            frame = wire.encode_request(Opcode.PUT, 1, wire.encode_body(put), len(value))
            client.sock.sendall(frame + half)
            wait_until(lambda: in_flight_bytes() == len(value))
            yield
        wait_until(lambda: in_flight_bytes() == 0)

    def swap_bytes(self, tenant: str, key: bytes, other_tenant: str, other_key: bytes) -> None:
        def swap() -> None:
            target, source = self._entry(tenant, key), self._entry(other_tenant, other_key)
            view = self._node._node._arena.view
            size_bytes = min(target.size_bytes, source.size_bytes)
            view(target.offset, size_bytes)[:] = view(source.offset, size_bytes)

        self._node.call(swap)

    def _entry(self, tenant: str, key: bytes) -> Entry:
        partitions = self._node._node._core._pool.tenants[TenantId(tenant)].partitions
        [index] = [index for partition, index in partitions.items() if partition.namespace == NamespaceId("chat")]
        return index.entries[BlockKey(key)]


class FrozenNode(FrozenStore):
    """A node's process, stopped by SIGSTOP."""

    def __init__(self, process: NodeProcess, transport: str) -> None:
        self._process = process
        self._transport = transport

    def freeze(self) -> None:
        self._process.freeze()

    def call_beside_a_ticking_loop(self) -> tuple[str, int]:
        return asyncio.run(self._call())

    async def _call(self) -> tuple[str, int]:
        endpoint = NodeEndpoint("node-1", self._process.wire_endpoint, self._process.shm_path)
        credentials = StaticCredentials(
            self._process.token, namespace="chat", nodes=(endpoint,), salt_key=SaltKey(bytes(32)), model_fingerprint=b""
        )
        client = AsyncClient.from_credentials(credentials, transport=self._transport)
        async with client:
            reading = asyncio.ensure_future(client.get_many([BlockKey(key_of(1))], deadline_ms=FROZEN_DEADLINE_MS))
            ticks = 0
            while not reading.done():
                await asyncio.wait({reading}, timeout=_TICK_S)
                ticks += 1
            match (await reading)[0]:
                case Miss(cause):
                    return f"miss, {cause.reason if cause else 'absent'}", ticks
                case Error(error):
                    return f"error {error.reason}", ticks
                case _:
                    return "a hit", ticks
