"""The measured engine, as the command line makes it: real nodes are started, filled, restarted and killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Final, TypeVar

from saltern.errors import InvalidArgumentError, SalternError, UnavailableError
from saltern.names import TenantId
from saltern.replay.arrivals import Arrivals
from saltern.replay.collector import Collector
from saltern.replay.engines import Progress
from saltern.replay.interrupts import held_interrupts, raise_end
from saltern.replay.measured.calls import READ_MAX_BYTES, Payloads, PromptCalls
from saltern.replay.measured.cast import Cast, made_cast
from saltern.replay.measured.cluster import Cluster, running_cluster
from saltern.replay.measured.driver import Driver, Failure
from saltern.replay.measured.node_books import NodeBooks
from saltern.replay.measured.options import MeasuredOptions, Scale
from saltern.replay.naming import tenant_name
from saltern.replay.prefill import STATEMENT
from saltern.replay.results import Column, ColumnResult, EngineKind
from saltern.replay.room import Room, Share
from saltern.replay.setup import ReplaySetup, Restart, Use
from saltern.replay.survey import Survey, loss_after, lost_node, survey
from saltern.traces.request import Trace
from saltern.transport.memory import RegisteredBuffer

_V = TypeVar("_V")
#: Of a column's time, for asking nodes what they hold.
_LOOKING_PART: Final = 0.02


class MeasuredEngine:
    """Implements :class:`saltern.replay.engines.ReplayEngine` with a cluster of its own, which is gone afterwards.

    Args:
        say: told what is being done besides serving.
    """

    kind: Final = EngineKind.MEASURED

    def __init__(self, options: MeasuredOptions | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        self._options, self._say = options or MeasuredOptions(), say

    def assumptions(self, setup: ReplaySetup) -> Sequence[tuple[str, str, str]]:
        """Name, value and source of everything that is modelled or scaled although real nodes serve."""
        options = self._options
        pace = (
            "as fast as calls are answered" if options.speed is None else f"{options.speed:g} s of traffic in a second"
        )
        return [
            ("measured", "hits, bytes, evictions, the seconds of every call, CPU seconds, failures", ""),
            (
                "blocks",
                f"{options.block_bytes:,} bytes moved and kept for each (the model's own where that is less), as many "
                "on each node as its memory holds of the model's own: a read takes less time than at full size, and so "
                "do TTFT and what follows from it",
                "",
            ),
            (
                "calls",
                f"one lookup, one get, one put for each prompt, up to {options.in_flight} at once, one client for each "
                "tenant; the engine waits for what it reads, not for what it stores",
                "",
            ),
            ("time", f"arrivals and prefill virtual, reads as long as they took; {pace}", ""),
            (
                "eviction",
                "by the nodes' own clocks: where ages are weighed (two-queue that thrashes, tenants of other weight or "
                "none that hit), the pace of this run decides; lru and fifo of one tenant go by order alone",
                "",
            ),
            ("prefill and decoding", STATEMENT, setup.hardware.source),
            (
                "nodes",
                "processes of this host, DRAM only; a restart is SIGTERM and a new start, a loss kill -9; "
                + (
                    "traffic stands still until clients know of a loss"
                    if options.speed is None
                    else "traffic goes on while a loss is found out"
                ),
                "",
            ),
            ("last block", "a partial one is moved and kept as a whole one, and counts by its tokens in rates", ""),
        ]

    def replay(
        self, trace: Trace, setup: ReplaySetup, columns: Sequence[Column], progress: Progress
    ) -> Generator[ColumnResult, None, None]:
        """As the protocol says. ``warm`` without ``cold`` serves the traffic twice and yields the second time.

        Raises:
            InvalidArgumentError, ResourceExhaustedError: this machine cannot do that.
            SalternError: the cluster does not start, or a step of setting it up was refused.
        """
        _check_setup(setup)
        room = Room.of(trace, setup)
        found = survey(trace)
        with ExitStack() as resources:
            served: _Served | None = None
            if trace.block_tokens and any(column is not Column.NO_CACHE for column in columns):
                keeps = Column.AFTER_RESTART in columns and setup.restart is Restart.KEPT
                served = self._open(resources, trace, setup, found, room=room, keeps=keeps)
            for column in columns:
                run = _Run(trace, setup, found, options=self._options, served=served, progress=progress)
                if served is None or column is Column.NO_CACHE:
                    yield from run.serve(column, with_cache=False)
                    continue
                if column is Column.WARM and served.holds is Column.COLD:
                    pass
                elif column in (Column.COLD, Column.WARM):
                    served.begin(room.walls(setup, found.tenants), column, self._say)
                    if column is Column.WARM:
                        for _ in run.serve(Column.COLD):
                            pass
                else:
                    served.begin(room.shared(setup, found.tenants), column, self._say)
                yield from run.serve(column)

    def _open(
        self, resources: ExitStack, trace: Trace, setup: ReplaySetup, found: Survey, *, room: Room, keeps: bool
    ) -> _Served:
        scale = Scale.of(room, self._options.block_bytes)
        self._say("starting a control plane")
        cluster = resources.enter_context(
            running_cluster(
                nodes=setup.nodes,
                dram_bytes=scale.dram_bytes,
                eviction=setup.eviction,
                reservations=setup.reservations,
                keeps=keeps,
            )
        )
        cast = made_cast(
            cluster.admin,
            found.tenants,
            block_tokens=trace.block_tokens,
            block_bytes=scale.block_bytes,
            transport=self._options.transport,
            sessions_max=self._options.in_flight,
        )
        is_shared = self._options.transport != "tcp"
        payloads = Payloads(scale.block_bytes, is_shared=is_shared)
        room_blocks = max(1, min(found.longest_blocks, READ_MAX_BYTES // scale.block_bytes))
        rooms = [
            RegisteredBuffer(room_blocks * scale.block_bytes, shared=is_shared) for _ in range(self._options.in_flight)
        ]
        return _Served(cluster, cast, scale, payloads, rooms)


def _check_setup(setup: ReplaySetup) -> None:
    """Raises InvalidArgumentError: something is asked for that is only simulated."""
    if setup.use is not Use.CLIENT:
        what, hint = "another order of use than the SDK's", "use `--use client`"
    elif setup.node_ssd_bytes:
        what, hint = "an SSD tier", "leave --node-ssd out"
    else:
        return
    raise InvalidArgumentError(
        f"cannot measure {what}", reason="INVALID_REPLAY", hint=f"{hint}, or replay it simulated (--engine simulated)"
    )


class _Served:
    """Cluster, tenants and memory of all columns.

    Attributes:
        holds: the column that filled the nodes; None where they are empty or mixed.
    """

    def __init__(
        self,
        cluster: Cluster,
        cast: Cast,
        scale: Scale,
        payloads: Payloads,
        rooms: Sequence[RegisteredBuffer],
    ) -> None:
        self.cluster, self.cast, self.scale, self.rooms = cluster, cast, scale, rooms
        self._payloads = payloads
        self.books = NodeBooks(cluster)
        self.holds: Column | None = None

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.cluster.nodes]

    def begin(self, shares: Mapping[str, Share], column: Column, say: Callable[[str], None]) -> None:
        """Empty nodes under these quotas: they are all started anew."""
        say(f"starting {len(self.cluster.nodes)} nodes for column {column}")
        self.cluster.stop()
        self.cluster.forget()
        self.cluster.start()
        limit_bytes = self.cast.allot(shares, len(self.cluster.nodes), self.scale.charged_bytes)
        self.books.wait_for_limits(limit_bytes)
        self.holds = column

    @contextmanager
    def connected(self) -> Iterator[Mapping[str, PromptCalls]]:
        """Calls of every tenant through new clients that reach every node, for the time of the block."""
        with self.cast.connected() as members:
            for member in members.values():
                for buffer in (self._payloads.region, *self.rooms):
                    member.client.register(buffer)
            self.cast.wait_for(self.names)
            yield {
                name: PromptCalls(member.client, self._payloads, number)
                for number, (name, member) in enumerate(members.items())
            }


class _Run:
    """One column after the other of one trace under one setup."""

    def __init__(
        self,
        trace: Trace,
        setup: ReplaySetup,
        found: Survey,
        *,
        options: MeasuredOptions,
        served: _Served | None,
        progress: Progress,
    ) -> None:
        self._trace, self._setup, self._found, self._options = trace, setup, found, options
        self._served, self._progress = served, progress
        self._cpu = _NodeCpu(served.cluster if served else None)

    def serve(self, column: Column, *, with_cache: bool = True) -> Iterator[ColumnResult]:
        """Yield one result; where serving ended early, raise why after that."""
        served = self._served if with_cache else None
        with nullcontext() if served is None else served.connected() as calls:
            yield from self._serve(column, served, calls)

    def _serve(
        self, column: Column, served: _Served | None, calls: Mapping[str, PromptCalls] | None
    ) -> Iterator[ColumnResult]:
        books = None if served is None else served.books

        def death() -> SalternError | None:
            return None if served is None else _death(served.cluster)

        looked = _Looked(books)
        collector = Collector(column, self._setup.slo, looked.held_bytes)
        arrivals = Arrivals(self._trace, self._setup.delays)
        driver = Driver(
            self._setup,
            self._trace.block_tokens,
            calls=calls,
            rooms=() if served is None else served.rooms,
            collector=collector,
            speed=None if served is None else self._options.speed,  # without nodes there is nothing to wait for
            progress=lambda requests: self._progress(column, requests),
            why_failed=death,
        )
        if served is not None and books is not None:
            driver.measures.block_bytes = served.scale.block_bytes
            driver.measures.bytes_scale = served.scale.bytes_scale
            driver.measures.nodes = len(served.cluster.nodes)
            driver.fail(self._failures(column, served, driver))
            books.begin()
        self._cpu.begin()
        began_s = time.process_time()
        with held_interrupts(driver.stop) as interrupt:
            is_whole = driver.run(arrivals)
            driver_cpu_s = time.process_time() - began_s
            driver.measures.node_cpu_s = self._cpu.spent_s()
            sums = None if books is None else books.sums()
            error = driver.error or arrivals.error or death() or (None if sums is None else sums.error)
            if served is not None and not (is_whole and error is None):
                served.holds = None
            result = collector.result(
                complete=is_whole and error is None,
                recorded_s=self._found.recorded_s,
                shed=driver.shed,
                evictions={} if sums is None else _named(sums.evictions()),
                occupancy_bytes={} if sums is None else _named(sums.held_bytes()),
                nodes={} if sums is None else sums.nodes(),
                read_s=driver.read_s,
                written_s=driver.written_s,
                block_accesses=driver.block_accesses,
                driver_cpu_s=driver_cpu_s,
            )
            result.measures = driver.measures
        yield result
        raise_end(interrupt, error)

    def _failures(self, column: Column, served: _Served, driver: Driver) -> list[tuple[int, Failure]]:
        """(requests that have arrived before, what happens then)."""
        cluster, books, cpu = served.cluster, served.books, self._cpu

        def restart(now_s: float) -> tuple[float, Callable[[], None]]:
            began_s = time.perf_counter()
            books.close(cluster.running)
            cpu.pause()
            cluster.stop()
            if self._setup.restart is Restart.LOST:
                cluster.forget()
            stopped_s = time.perf_counter() - began_s

            def come_back() -> None:
                began_s = time.perf_counter()
                cluster.start()
                served.cast.wait_for(served.names)
                driver.measures.restart_s = stopped_s + time.perf_counter() - began_s
                cpu.resume()

            return now_s + self._setup.restart_s, come_back

        def lose(_: float) -> None:
            node = cluster.nodes[lost_node(self._setup)]
            books.close([node])
            cpu.pause()
            node.kill()
            cpu.resume()
            if self._options.speed is None:
                began_s = time.perf_counter()
                served.cast.wait_for([other.name for other in cluster.running])
                driver.measures.detection_s = time.perf_counter() - began_s

        at = loss_after(self._setup, self._found)
        failure = {Column.AFTER_RESTART: restart, Column.NODE_LOST: lose}.get(column)
        return [] if failure is None else [(at, failure)]


def _death(cluster: Cluster) -> UnavailableError | None:
    """A node that has ended by itself; None while there is none."""
    node = next((node for node in cluster.running if node.has_died), None)
    if node is None:
        return None
    return UnavailableError(
        f"{node.name} has ended by itself",
        reason="NODE_ENDED",
        hint=f"find out why, and replay again; it said: {node.last_words()}",
    )


class _NodeCpu:
    """CPU seconds of nodes while they serve, not while they start or stop."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._spent_s = self._since_s = 0.0

    def begin(self) -> None:
        self._spent_s = 0.0
        self.resume()

    def resume(self) -> None:
        self._since_s = self._now_s()

    def pause(self) -> None:
        self._spent_s = self.spent_s()
        self._since_s = 0.0

    def spent_s(self) -> float:
        return self._spent_s + self._now_s() - self._since_s

    def _now_s(self) -> float:
        return 0.0 if self._cluster is None else sum(node.cpu_s for node in self._cluster.running)


class _Looked:
    """What tenants hold, asked for not too often: asking costs the nodes time that is not the traffic's."""

    def __init__(self, books: NodeBooks | None) -> None:
        self._books = books
        self._held: dict[str, int] = {}
        self._next_s = 0.0

    def held_bytes(self) -> Mapping[str, int]:
        now_s = time.perf_counter()
        if self._books is not None and now_s >= self._next_s:
            self._held = _named(self._books.held_bytes())
            took_s = time.perf_counter() - now_s
            self._next_s = now_s + took_s / _LOOKING_PART
        return self._held


def _named(by_tenant: Mapping[str, _V]) -> dict[str, _V]:
    return {tenant_name(TenantId(tenant)): value for tenant, value in by_tenant.items()}
