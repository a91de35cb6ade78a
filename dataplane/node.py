"""One cache node, put together: arena, core, gate, doors, and whoever tells it the policy.

::

    ControlClient --apply--> Gate --> CacheCore <-- sessions <-- doors (tcp, unix, gRPC)
                  <--usage--              |
                                      SsdStore --> worker threads --> files

Everything but the workers' jobs runs on one event loop; the core needs no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Final

import structlog

from dataplane.core.cache import CacheCore
from dataplane.core.lease import Lease
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import NodeUsage, PolicyApplied
from dataplane.io.batch_spans import TracedCacheService, spans_of
from dataplane.io.batches import Blocks
from dataplane.io.clock import Clock
from dataplane.io.engines import EngineName
from dataplane.io.engines.objects import ObjectEngine
from dataplane.io.engines.opening import open_engine
from dataplane.io.gate import Gate
from dataplane.io.grpc_door import start_grpc_door
from dataplane.io.health import HealthService, HealthWatch
from dataplane.io.metrics_door import metrics_door
from dataplane.io.rdma import Fabric
from dataplane.io.session import NodeIdentity, NodeState
from dataplane.io.session_table import Door, SessionTable
from dataplane.io.shm import listen_unix, remove_socket_file
from dataplane.io.ssd import SsdLimits, SsdStatus, SsdStore
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_outdated import OutdatedPartitions
from dataplane.io.tcp import bound_endpoint, listen_tcp
from dataplane.io.traffic import TenantTraffic, Traffic
from dataplane.io.trimming import Trimmer
from dataplane.io.warm import DramStart, WarmRestart, open_arena
from dataplane.io.workers import ThreadWorkers
from dataplane.metrics.collector import EngineFacts, NodeCollector, NodeFacts
from dataplane.metrics.exposition import Exposition
from dataplane.metrics.health import ControlLink, Health, judge
from dataplane.metrics.loop_lag import LoopLag
from dataplane.metrics.readings import Rates
from dataplane.settings import NodeSettings, SsdSettings
from saltern import tracing
from saltern.endpoints import Endpoint
from saltern.errors import SalternError
from saltern.http_door import HttpDoor
from saltern.names import TenantId
from saltern.rdma import DeviceChoice
from saltern.tls_reload import ReloadingTls
from tenants.policy import NodePolicy
from tenants.tokens import KeySet

_log = structlog.get_logger(__name__)
#: Books taken in one go, about 1 ms with their encoding.
_TENANTS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class NodeEndpoints:
    """Where a running node can be reached."""

    node_id: str
    wire_endpoint: str
    grpc_endpoint: str
    shm_path: str
    host_id: str
    metrics_endpoint: str = ""
    tls_server_name: str = ""


class Node:
    """A cache node. Use :meth:`serving`; inside it the doors are open.

    Args:
        settings: checked settings.
        clock: both clocks; tests pass their own.

    Raises:
        SalternError: a file of ``settings.tls`` or the arena cannot be used.
    """

    def __init__(self, settings: NodeSettings, *, clock: Clock | None = None) -> None:
        self.settings: Final = settings
        clock = clock or Clock()
        self._tls = None if settings.tls is None else ReloadingTls(settings.tls, _log)
        self._arena, folder = open_arena(settings)
        self._clock = clock
        ssd = settings.ssd
        self._tier = None if ssd is None else SsdTier(ssd.capacity_bytes, write_bytes_per_s=ssd.write_bytes_per_s)
        self._core = CacheCore(
            settings.dram_bytes,
            eviction=settings.eviction,
            reservations=settings.reservations,
            ssd=self._tier,
            soft_mark_percent=settings.soft_mark,
        )
        self._warm = None if folder is None else WarmRestart(folder, self._arena, self._core, clock)
        self._state = NodeState(
            identity=NodeIdentity(settings.node_id, secrets.token_hex(16)),
            blocks=Blocks(self._core, self._arena, clock),
            gate=Gate(self._core, clock),
            traffic=Traffic(settings.limits, arena_bytes=settings.dram_bytes, clock=clock),
        )
        self._state.blocks.after_put = Trimmer(self._state.traffic.scheduler, self._core, clock).look
        self._spans = spans_of(settings.trace_batches)
        self._sessions = SessionTable(self._state, settings.limits, self._tls, self._spans)
        self._policy_applied_unix_s = 0.0
        #: Where the tier below DRAM is in a store; known once the node serves.
        self._engine: ObjectEngine | None = None
        #: How the line to the control plane fares; set by whoever holds the line.
        self.control: ControlLink | None = None
        self._lag = LoopLag()
        self._health = HealthWatch(self._judge)

    @property
    def applied_version(self) -> int:
        """Version of the policy in force; 0 before the first."""
        return self._core.policy.version

    @property
    def traffic(self) -> Mapping[TenantId, TenantTraffic]:
        """What tenants ask of the node now: turns, rates, bytes in flight."""
        return self._state.traffic.tenants

    @property
    def turns(self) -> int:
        """How many turns sessions and calls have had; only ever grows."""
        return self._state.traffic.scheduler.turns

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def policy(self) -> NodePolicy:
        """The policy in force; version 0 without tenants before the first."""
        return self._core.policy

    def apply(
        self, policy: NodePolicy, key_set: KeySet, *, touched: Collection[TenantId] | None = None
    ) -> PolicyApplied:
        """Serve ``policy`` from now on, in open sessions too.

        Args:
            touched: tenants that may differ from the policy in force, of which it was made; None for all.

        Raises:
            FailedPreconditionError: the policy is stale or reserves more than this node has; the old one stays.
        """
        with tracing.span("apply policy", policy_version=policy.version, tenants=len(policy.tenants)):
            return self._apply(policy, key_set, touched)

    def _apply(self, policy: NodePolicy, key_set: KeySet, touched: Collection[TenantId] | None) -> PolicyApplied:
        if self._warm is not None:
            self._warm.before_policy()
        applied = self._state.gate.apply(policy, key_set, touched=touched)
        self._state.meters.retain(policy.tenants.keys())
        self._policy_applied_unix_s = self._clock.unix_s()
        self._health.refresh()
        if self._warm is not None:
            self._warm.after_policy()
        self._state.traffic.apply(policy, touched=touched)
        self._state.blocks.after_put()  # what the policy has left to do begins
        _log.info(
            "policy applied",
            policy_version=applied.version,
            tenants=len(policy.tenants),
            purged_entries=applied.purged_entries,
            evicted_entries=applied.evicted_entries,
        )
        return applied

    def renew(self, lease: Lease) -> None:
        """Grow until ``lease`` runs out, on the monotonic clock, and then no more (I9)."""
        self._core.renew(lease, self._clock.monotonic_ns())

    @property
    def settled_version(self) -> int:
        """The newest policy that was in force with no tenant above its limits (I4)."""
        return self._core.settled_version

    def usage(self) -> NodeUsage:
        """Books and counters, absolute."""
        return self._core.usage()

    def usages(self) -> Iterator[NodeUsage]:
        """The same of the tenants that a report names, some at a time, for whoever lets others have the loop."""
        tenants = self._core.reported_tenants()
        for at in range(0, len(tenants), _TENANTS_AT_ONCE):
            yield self._core.usage(tenants[at : at + _TENANTS_AT_ONCE])

    @property
    def ssd_status(self) -> SsdStatus | None:
        """How the SSD tier fares; None without one."""
        store = self._state.blocks.ssd
        return None if store is None else store.status

    @property
    def dram_start(self) -> DramStart:
        """How the DRAM tier began: cold, or with what an earlier process left; known once a policy is in force."""
        return DramStart() if self._warm is None else self._warm.start

    @property
    def health(self) -> Health:
        """Whether the node is ready, and what is not as it should be."""
        return self._health.refresh()

    def check_invariants(self) -> None:
        """Recompute the books from what is there and assert that they agree (I8)."""
        self._core.check_invariants()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[NodeEndpoints]:
        """Open the doors; on the way out drain: refuse new requests, let running ones end, close.

        Raises:
            SalternError: a door cannot be opened; nothing is left open then.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            stack.callback(self._arena.close)
            if self._warm is not None:
                stack.push(self._leave_warm)
            self._log_memory()
            self._open_fabric(stack)
            if settings.ssd is not None:
                self._state.blocks.ssd = await self._open_ssd(settings.ssd, stack)
            self._lag.start()
            stack.callback(self._lag.close)
            self._health.start()
            stack.callback(self._health.close)
            metrics_endpoint = await self._open_metrics(settings.metrics_listen, stack)
            wire_listener = listen_tcp(settings.listen, option="--listen")
            doors = [Door(wire_listener, self._sessions, takes_descriptors=False)]
            stack.callback(doors[0].close)
            wire_endpoint = bound_endpoint(wire_listener)
            if settings.shm_path is not None:
                shm_listener = listen_unix(settings.shm_path, mode=settings.shm_mode)
                stack.callback(remove_socket_file, settings.shm_path)
                doors.append(Door(shm_listener, self._sessions, takes_descriptors=True))
                stack.callback(doors[1].close)
            stack.callback(self._sessions.close)
            self._sessions.start()
            grpc_server, grpc_endpoint = await start_grpc_door(
                self._state,
                settings.grpc_listen,
                HealthService(self._health),
                self._tls,
                service=None if self._spans is None else TracedCacheService(self._state, self._spans),
            )
            stack.push_async_callback(grpc_server.stop, None)
            for door in doors:
                door.open()
            identity = self._state.identity
            advertised = wire_endpoint.advertised(settings.advertise_host)
            endpoints = NodeEndpoints(
                node_id=identity.node_id,
                wire_endpoint=str(advertised),
                grpc_endpoint=str(grpc_endpoint.advertised(settings.advertise_host)),
                shm_path=str(settings.shm_path or ""),
                host_id=identity.host_id,
                metrics_endpoint=metrics_endpoint,
                tls_server_name="" if self._tls is None else settings.tls_server_name or advertised.host,
            )
            try:
                yield endpoints
            finally:
                self._state.is_draining = True
                self._health.refresh()
                for door in doors:
                    door.close()
                await asyncio.gather(grpc_server.stop(settings.drain_s), self._sessions.drain(settings.drain_s))

    def _leave_warm(self, fault: type[BaseException] | None, *_: object) -> None:
        """When everything else has ended: leave DRAM to the next process, unless a fault makes its state doubtful."""
        assert self._warm is not None
        if fault is None:
            self._warm.save()
        self._warm.close()

    def _open_fabric(self, stack: AsyncExitStack) -> None:
        """Offer RDMA until ``stack`` ends, if that was asked for and the device can be used; else say why not."""
        choice = self.settings.rdma
        if choice is None:
            return
        if choice == DeviceChoice() and self.settings.tls is not None:
            # I10: whoever asked for TLS is not given a way around it that nobody named.
            _log.info(
                "no rdma",
                reason="RDMA_NOT_ENCRYPTED",
                message="TLS is on, and RDMA moves entries in the clear",
                hint="name a device with --rdma-device if its fabric is trusted",
            )
            return
        try:
            fabric = Fabric(choice, self._arena, self._state.traffic.scheduler)
        except SalternError as error:
            # Without a device there is nothing to mend, unless one was named.
            is_absent = error.reason == "RDMA_NO_DEVICE" and choice == DeviceChoice()
            (_log.info if is_absent else _log.warning)(
                "no rdma", reason=error.reason, message=error.message, hint=error.hint
            )
            return
        stack.callback(fabric.close)
        stack.callback(setattr, self._state, "fabric", None)
        self._state.fabric = fabric
        _log.info("rdma", device=str(fabric.device.chosen), registered_bytes=self._arena.capacity_bytes)

    def _log_memory(self) -> None:
        """Say what the system really gave; what has not been touched yet is nowhere."""
        if self._arena.is_prefaulted:
            placement = self._arena.placement()
            _log.info(
                "arena",
                size_bytes=self._arena.capacity_bytes,
                huge_page_bytes=placement.huge_bytes,
                numa_percent={str(node): share for node, share in placement.nodes.items()},
            )

    async def _open_metrics(self, listen: Endpoint | None, stack: AsyncExitStack) -> str:
        """Serve metrics and health until ``stack`` ends; return where, or an empty text for nowhere.

        Raises:
            FailedPreconditionError: PORT_TAKEN, ADDRESS_NOT_AVAILABLE.
        """
        if listen is None:
            return ""
        collector = NodeCollector(
            self._core,
            self._state.meters,
            self._lag,
            node=self.settings.node_id,
            facts=lambda: self._facts(door),
            tenants_max=self.settings.metrics_tenants_max,
        )
        listener = listen_tcp(listen, option="--metrics-listen")
        door = metrics_door(listener, Exposition(collector), self._health.refresh)
        stack.push_async_callback(door.close)
        await door.open()
        return str(bound_endpoint(listener).advertised(self.settings.advertise_host))

    def _judge(self) -> Health:
        ssd = self.ssd_status
        return judge(
            policy_version=self.applied_version,
            is_draining=self._state.is_draining,
            ssd_state=None if ssd is None else ssd.state.value,
            ssd_reason="" if ssd is None else ssd.reason,
            control=self.control,
            now_s=monotonic(),
        )

    def _facts(self, door: HttpDoor) -> NodeFacts:
        ssd, engine = self.ssd_status, self._engine
        return NodeFacts(
            health=self.health,
            policy_applied_unix_s=self._policy_applied_unix_s,
            ssd_state=None if ssd is None else ssd.state.value,
            engine=None if engine is None else EngineFacts(EngineName.MOONCAKE, engine.is_connected, engine.counts),
            control=self.control,
            sessions_by_tenant=self._sessions.by_tenant,
            rates=self._rates_of,
            http_requests=door.requests,
        )

    def _rates_of(self, tenant: TenantId) -> Rates | None:
        traffic = self._state.traffic.tenants.get(tenant)
        if traffic is None:
            return None
        return Rates(
            waiting=traffic.waiting,
            delayed=traffic.rates.delayed,
            refused=traffic.rates.refused,
            waited_ns=traffic.throttled_ns,
            served_bytes=traffic.served_bytes,
        )

    async def _open_ssd(self, settings: SsdSettings, stack: AsyncExitStack) -> SsdStore:
        """Recover the SSD tier before a door opens; on the way out seal what is open and end its threads.

        Raises:
            FailedPreconditionError: SSD_DIR_UNUSABLE, SSD_DIR_IN_USE, SSD_NODE_KEY_UNUSABLE, MOONCAKE_NOT_INSTALLED.
        """
        assert self._tier is not None
        files, loop = Files(), asyncio.get_running_loop()
        disk = await asyncio.to_thread(open_engine, settings, files, lambda: self._engine_returned(loop))
        workers = ThreadWorkers(loop)
        store = SsdStore(
            self._core,
            self._tier,
            arena=self._arena,
            disk=disk,
            clock=self._clock,
            workers=workers,
            outdated=OutdatedPartitions(settings.node_key_folder, files),
            limits=SsdLimits(prefault=self.settings.prefault),
        )
        stack.callback(store.release)
        stack.callback(workers.close)
        stack.push_async_callback(_close_store, store, self.settings.drain_s)
        self._engine = disk if isinstance(disk, ObjectEngine) else None
        store.recover()
        _log.info(
            "ssd tier",
            engine=EngineName.LOCAL if settings.mooncake is None else EngineName.MOONCAKE,
            state=store.status.state.value,
            reason=store.status.reason,
            is_direct=store.status.is_direct,
            used_bytes=self._tier.used_bytes,
        )
        return store

    def _engine_returned(self, loop: asyncio.AbstractEventLoop) -> None:
        """From the engine's thread: what failed while its store was out of reach is tried now."""

        def try_again() -> None:
            if self._state.blocks.ssd is not None:
                self._state.blocks.ssd.try_again()

        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(try_again)


async def _close_store(store: SsdStore, limit_s: float) -> None:
    idle = asyncio.Event()
    store.close(idle.set)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(idle.wait(), limit_s)
