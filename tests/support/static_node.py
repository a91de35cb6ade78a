"""A real cache node with a fixed policy and its own signing key, for tests that need no control plane.

::

    with static_node({"acme": quota(limit_bytes=8 * MIB)}, dram_bytes=32 * MIB) as node:
        connect(node.wire_endpoint, node.token("acme", "chat"))

The node runs in a thread of the test's process, so that a test can look at its books; its doors are real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dataplane.core.reservations import DEFAULT_RESERVATIONS, Reservations
from dataplane.core.usage import NodeUsage
from dataplane.io.clock import Clock
from dataplane.io.ssd import SsdStatus
from dataplane.io.traffic import TenantTraffic
from dataplane.node import Node, NodeEndpoints
from dataplane.settings import ArenaSettings, NodeSettings, SessionLimits, SsdSettings
from saltern.endpoints import Endpoint
from saltern.names import NamespaceId, NodeId, TenantId
from saltern.rdma import DeviceChoice
from saltern.tls import ServerTls
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota
from tenants.roles import Role
from tenants.tokens import Audience, Claims, KeySet, sign_token

MIB = 1024 * 1024
ISSUER = "saltern-test"
KID = "test-key"
T = TypeVar("T")


def tenant_policy(
    *,
    limit_bytes: int,
    reserved_bytes: int = 0,
    ssd_limit_bytes: int = 0,
    ssd_reserved_bytes: int = 0,
    namespaces: tuple[str, ...] = ("chat",),
    block_bytes: int = 8 * MIB,
    epochs: tuple[int, ...] = (1,),
    uid: str = "uid-1",
    state: TenantState = TenantState.ACTIVE,
    min_issue_time_s: int = 0,
) -> TenantPolicy:
    """One tenant's policy; every namespace has the same block size and epochs."""
    return TenantPolicy(
        state=state,
        tiers={
            Tier.DRAM: TierQuota(reserved_bytes, limit_bytes),
            Tier.SSD: TierQuota(ssd_reserved_bytes, ssd_limit_bytes),
        },
        namespaces={NamespaceId(name): NamespacePolicy(uid, block_bytes, epochs) for name in namespaces},
        min_issue_time_s=min_issue_time_s,
    )


class StaticNode:
    """A running node. Thread-safe: everything that touches the core runs on the node's own loop."""

    def __init__(
        self,
        node: Node,
        endpoints: NodeEndpoints,
        loop: asyncio.AbstractEventLoop,
        stopping: asyncio.Event,
        signing_key: Ed25519PrivateKey | None,
    ) -> None:
        self._node = node
        self._stopping = stopping
        self._loop = loop
        self._version = 0
        self.endpoints = endpoints
        self.wire_endpoint = endpoints.wire_endpoint
        self.grpc_endpoint = endpoints.grpc_endpoint
        self.metrics_endpoint = endpoints.metrics_endpoint
        self.shm_path = endpoints.shm_path
        self.signing_key = signing_key or Ed25519PrivateKey.generate()
        self.key_set = KeySet(issuer=ISSUER, keys={KID: self.signing_key.public_key()})
        self.tenants: dict[TenantId, TenantPolicy] = {}

    @property
    def wire_address(self) -> tuple[str, int]:
        host, port = self.wire_endpoint.rsplit(":", 1)
        return host, int(port)

    def flip_byte_of(self, payload: bytes) -> None:
        """Let one bit of an entry that holds ``payload`` rot in the node's memory."""

        def flip() -> None:
            memory = self._node._arena.view(0, self._node.settings.dram_bytes)
            memory[bytes(memory).index(payload)] ^= 1

        self.call(flip)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the node's loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def apply(self, tenants: Mapping[str, TenantPolicy], *, key_set: KeySet | None = None) -> None:
        """Replace the whole policy by ``tenants``; it is in force when this returns."""
        self._version += 1
        self.tenants = {TenantId(name): policy for name, policy in tenants.items()}
        self.key_set = key_set or self.key_set
        policy = NodePolicy(self._version, dict(self.tenants))
        self.call(lambda: self._node.apply(policy, self.key_set))

    def change(self, tenant: str, **changes: object) -> None:
        """Replace attributes of one tenant's policy."""
        changed = replace(self.tenants[TenantId(tenant)], **changes)  # type: ignore[arg-type]
        self.apply({**self.tenants, tenant: changed})

    def stop(self) -> None:
        """Let the node drain and stop, as SIGTERM does; the end of :func:`static_node` waits for it."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def token(self, tenant: str, namespace: str, role: Role = Role.WRITER, **overrides: object) -> str:
        """A signed node token; ``overrides`` replace attributes of :class:`tenants.tokens.Claims`."""
        now_s = int(time.time())
        claims = Claims(
            issuer=ISSUER,
            subject=f"tenants/{tenant}/apiKeys/test",
            audience=Audience.NODE,
            tenant=TenantId(tenant),
            namespace=NamespaceId(namespace),
            role=role,
            issued_at_s=now_s,
            expires_at_s=now_s + 600,
            token_id=secrets.token_hex(16),
        )
        return sign_token(self.signing_key, KID, replace(claims, **overrides))  # type: ignore[arg-type]

    def usage(self) -> NodeUsage:
        return self.call(self._node.usage)

    def session_count(self) -> int:
        return self.call(lambda: self._node.session_count)

    def traffic(self) -> Mapping[TenantId, TenantTraffic]:
        """What the tenants ask of the node now; read it on the node's loop where it must not move meanwhile."""
        return self._node.traffic

    def is_settled(self) -> bool:
        """Whether no tenant has more than the policy in force allows."""
        return self.call(lambda: self._node.settled_version == self._node.applied_version)

    def ssd_status(self) -> SsdStatus | None:
        return self.call(lambda: self._node.ssd_status)

    def check_invariants(self) -> None:
        """Assert that the node's books agree with what is there (I8)."""
        self.call(self._node.check_invariants)


@contextmanager
def static_node(
    tenants: Mapping[str, TenantPolicy] | None = None,
    *,
    dram_bytes: int = 64 * MIB,
    limits: SessionLimits | None = None,
    soft_mark_percent: int = 100,
    clock: Clock | None = None,
    apply_policy: bool = True,
    prefault: bool = False,
    ssd: SsdSettings | None = None,
    arena: ArenaSettings | None = None,
    drain_s: float = 5.0,
    metrics_tenants_max: int | None = None,
    tls: ServerTls | None = None,
    rdma: DeviceChoice | None = None,
    node_id: str = "node-1",
    port: int = 0,
    signing_key: Ed25519PrivateKey | None = None,
    reservations: Reservations = DEFAULT_RESERVATIONS,
    trace_batches: float = 0.0,
) -> Iterator[StaticNode]:
    """Run a node with the given tenants (one tenant ``acme`` with the namespace ``chat`` by default).

    ``metrics_tenants_max`` opens the metrics door, with so many tenants by name.
    ``signing_key`` is that of other nodes too, where one token is to be good at several; ``port`` of the wire protocol.
    ``prefault`` takes the arena's memory at start, as a real node does: wanted where speed is measured.
    """
    with tempfile.TemporaryDirectory(prefix="saltern-node-") as folder:
        settings = NodeSettings(
            node_id=NodeId(node_id),
            listen=Endpoint("127.0.0.1", port),
            grpc_listen=Endpoint("127.0.0.1", 0),
            dram_bytes=dram_bytes,
            shm_path=Path(folder) / "node.sock",
            prefault=prefault,
            limits=limits or SessionLimits(),
            soft_mark_percent=soft_mark_percent,
            ssd=ssd,
            arena=arena or ArenaSettings(),
            drain_s=drain_s,
            metrics_listen=None if metrics_tenants_max is None else Endpoint("127.0.0.1", 0),
            metrics_tenants_max=metrics_tenants_max or 0,
            tls=tls,
            rdma=rdma,
            reservations=reservations,
            trace_batches=trace_batches,
        )
        node = Node(settings, clock=clock)
        ready = threading.Event()
        outcome: list[StaticNode | BaseException] = []
        stop: list[Callable[[], None]] = []

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            stopping = asyncio.Event()
            stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
            async with node.serving() as endpoints:
                outcome.append(StaticNode(node, endpoints, loop, stopping, signing_key))
                ready.set()
                await stopping.wait()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                outcome.append(error)
                ready.set()

        thread = threading.Thread(target=run, name="static-node")
        thread.start()
        assert ready.wait(30)
        try:
            running = outcome[0]
            if isinstance(running, BaseException):
                raise running
            if apply_policy:
                running.apply({"acme": tenant_policy(limit_bytes=dram_bytes)} if tenants is None else tenants)
            yield running
        finally:
            for request_stop in stop:
                with contextlib.suppress(RuntimeError):  # the loop is closed: the test has stopped the node itself
                    request_stop()
            thread.join(30)
            assert not thread.is_alive()
            if isinstance(outcome[-1], BaseException):
                raise outcome[-1]
