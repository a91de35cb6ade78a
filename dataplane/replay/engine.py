"""The simulated engine, as the command line finds it: one trace and one setup in, column by column out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from dataplane.core.eviction import Eviction
from dataplane.core.reservations import Reservations
from dataplane.replay.fleet import ClientPlacement, Fleet, Locator, SoleNode
from dataplane.replay.node import CacheNode
from dataplane.replay.quotas import partitions_of, policy_of, quotas_of
from dataplane.replay.simulation import Simulation
from dataplane.replay.ssd import STAGING_BYTES, NodeSsd
from saltern.names import TenantId
from saltern.replay.arrivals import Arrivals
from saltern.replay.collector import Collector, Evictions
from saltern.replay.engines import Progress
from saltern.replay.interrupts import held_interrupts, raise_end
from saltern.replay.naming import node_id, tenant_name
from saltern.replay.prefill import STATEMENT
from saltern.replay.profiles import SSD_SOURCE
from saltern.replay.results import Column, ColumnResult, EngineKind
from saltern.replay.room import Room, Share
from saltern.replay.setup import ReplaySetup, Restart, Use
from saltern.replay.survey import Survey, loss_after, lost_node, survey
from saltern.traces.request import Trace

_V = TypeVar("_V")
#: Between two columns over the same nodes.
_PAUSE_NS: Final = 1_000_000_000
LocatorMaker = Callable[[Sequence[CacheNode], int], Locator]


def client_placement(nodes: Sequence[CacheNode], block_tokens: int) -> Locator:
    """The SDK's rules; of one node there is nothing to decide."""
    return SoleNode(nodes[0]) if len(nodes) == 1 else ClientPlacement(nodes, block_tokens)


class SimulatedEngine:
    """Implements :class:`saltern.replay.engines.ReplayEngine`.

    Args:
        placement: the rule over nodes; the SDK's, unless another is to be compared with it.
    """

    kind: Final = EngineKind.SIMULATED

    def __init__(self, placement: LocatorMaker = client_placement) -> None:
        self._placement = placement

    def assumptions(self, setup: ReplaySetup) -> Sequence[tuple[str, str, str]]:
        """Name, value and source of everything that this engine models."""
        use = (
            "what is read is touched, what was missing is put and put in order, as the SDK does"
            if setup.use is Use.CLIENT
            else "every block of a prompt is touched or stored, tail first, as in reference hit rates"
        )
        return [
            ("time", "virtual; nothing is measured", ""),
            ("prefill and decoding", STATEMENT, setup.hardware.source),
            (
                "transfer",
                "latency, then bytes over each node's link, one batch after the other; both nodes of a chain at once; "
                "each direction by itself; the engine waits for what it reads, not for what it stores",
                "",
            ),
            ("lookup", "when the engine turns to a request; nodes that are away are not waited for", ""),
            ("nodes", "the node's own core, one granule for each block", ""),
            *_ssd_assumptions(setup),
            ("use", use, ""),
            ("last block", "a partial one counts as whole in memory and transfer, by its tokens in rates", ""),
        ]

    def replay(
        self, trace: Trace, setup: ReplaySetup, columns: Sequence[Column], progress: Progress
    ) -> Generator[ColumnResult, None, None]:
        """As the protocol says. ``warm`` without ``cold`` serves the traffic twice and yields the second time."""
        room = Room.of(trace, setup)
        found = survey(trace)
        run = _Run(trace, setup, found, room, self._placement, progress)
        walls: Fleet | None = None
        clock_ns = 1
        for at, column in enumerate(columns):
            if not {Column.COLD, Column.WARM}.intersection(columns[at:]):
                walls = None  # an index of all its blocks: memory for the nodes of the columns that are left
            if column is Column.NO_CACHE or not trace.block_tokens:
                yield from run.serve(column, None, 1)
            elif column in (Column.COLD, Column.WARM):
                if walls is None:
                    walls = run.fleet(room.walls(setup, found.tenants), Reservations.STRICT)
                    if column is Column.WARM:
                        yield from run.discard(run.serve(Column.COLD, walls, clock_ns))
                        clock_ns = run.ended_ns + _PAUSE_NS
                walls.begin()
                yield from run.serve(column, walls, clock_ns)
                clock_ns = run.ended_ns + _PAUSE_NS
            else:
                yield from run.serve(
                    column, run.fleet(room.shared(setup, found.tenants), Reservations(setup.reservations)), 1
                )


@dataclass(slots=True)
class _Run:
    """All columns of one trace under one setup.

    Attributes:
        ended_ns: what the nodes' clocks read when the last column ended.
    """

    trace: Trace
    setup: ReplaySetup
    found: Survey
    room: Room
    placement: LocatorMaker
    progress: Progress
    ended_ns: int = 1

    def fleet(self, shares: Mapping[str, Share], reservations: Reservations) -> Fleet:
        """Empty nodes under these quotas, each of which has the same part of each."""
        policy = policy_of(quotas_of(shares))
        nodes = [
            CacheNode(
                node_id(number),
                self.room.node_blocks,
                policy,
                eviction=Eviction(self.setup.eviction),
                reservations=reservations,
                link_bytes_per_s=self.setup.hardware.link_bytes_per_s,
                ssd=self._ssd(),
            )
            for number in range(self.setup.nodes)
        ]
        return Fleet(nodes, self.placement(nodes, self.trace.block_tokens))

    def _ssd(self) -> NodeSsd | None:
        hardware = self.setup.hardware
        if not self.room.ssd_blocks:
            return None
        return NodeSsd(
            self.room.ssd_blocks,
            self.room.block_bytes,
            read_bytes_per_s=hardware.ssd_read_bytes_per_s,
            write_bytes_per_s=hardware.ssd_write_bytes_per_s,
            tenants=len(self.found.tenants),
        )

    def serve(self, column: Column, fleet: Fleet | None, begin_ns: int) -> Iterator[ColumnResult]:
        """Yield one result; where serving ended early, raise why after that."""
        setup, found = self.setup, self.found

        def occupancy() -> dict[str, int]:
            if fleet is None:
                return {}
            return {name: count * self.room.block_bytes for name, count in _named(fleet.occupancy_blocks()).items()}

        collector = Collector(column, setup.slo, occupancy)
        simulation = Simulation(
            setup,
            self.trace.block_tokens,
            fleet=fleet,
            partitions={} if fleet is None else partitions_of(found.tenants),
            collector=collector,
            begin_ns=begin_ns,
            failures=[] if fleet is None else failures_of(column, setup, found, fleet),
            progress=lambda requests: self.progress(column, requests),
        )
        began_s = time.process_time()
        arrivals = Arrivals(self.trace, setup.delays)
        with held_interrupts(simulation.stop) as interrupt:
            is_whole = simulation.run(arrivals)
            self.ended_ns = simulation.now_ns
            nodes = {} if fleet is None else fleet.results(self.room.block_bytes)
            evictions: Mapping[TenantId, Evictions] = {} if fleet is None else fleet.evictions()
            result = collector.result(
                complete=is_whole and arrivals.error is None,
                recorded_s=found.recorded_s,
                shed=simulation.shed,
                evictions=_named(evictions),
                occupancy_bytes=occupancy(),
                nodes=nodes,
                ssd=None if fleet is None else fleet.ssd_result(self.room.block_bytes, simulation.ssd_hit_tokens),
                read_s=0.0 if fleet is None else sum(node.out.busy_s for node in fleet.nodes),
                written_s=0.0 if fleet is None else sum(node.into.busy_s for node in fleet.nodes),
                block_accesses=simulation.block_accesses,
                driver_cpu_s=time.process_time() - began_s,
            )
        yield result
        raise_end(interrupt, arrivals.error)

    def discard(self, results: Iterator[ColumnResult]) -> Iterator[ColumnResult]:
        """Serve, and give nothing; as a generator, so that what is raised comes through."""
        for _ in results:
            pass
        return iter(())


def _ssd_assumptions(setup: ReplaySetup) -> list[tuple[str, str, str]]:
    hardware = setup.hardware
    if not setup.node_ssd_bytes:
        return [("SSD", "none", "")]
    read, write = hardware.ssd_read_bytes_per_s / 1e9, hardware.ssd_write_bytes_per_s / 1e9
    said = (
        "the node's own books of segments, a sixteenth of what a tenant may have each; what memory gives up is "
        f"written, and dropped while more than {STAGING_BYTES // 2**20} MiB wait; what is read goes back to memory; "
        f"reads {read:g} GB/s, writes {write:g} GB/s; it outlives a restart, whatever memory does"
    )
    return [("SSD", said, SSD_SOURCE)]


def _named(by_tenant: Mapping[TenantId, _V]) -> dict[str, _V]:
    return {tenant_name(tenant): value for tenant, value in by_tenant.items()}


def failures_of(
    column: Column, setup: ReplaySetup, found: Survey, fleet: Fleet
) -> list[tuple[int, Callable[[float], None]]]:
    """(requests that have arrived before, what happens then at a time in seconds)."""
    at = loss_after(setup, found)
    if column is Column.AFTER_RESTART:
        keeps = setup.restart is Restart.KEPT
        return [(at, lambda now_s: fleet.restart(now_s + setup.restart_s, keeps=keeps))]
    if column is Column.NODE_LOST:
        lost = lost_node(setup)
        return [(at, lambda _: fleet.lose(lost))]
    return []
