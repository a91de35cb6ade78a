"""What the control plane tells over HTTP to those who watch it: ``/metrics``, ``/livez`` and ``/readyz``."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from time import monotonic, perf_counter
from typing import Any, Final, TypeAlias

import grpc
import structlog
from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    GC_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from controlplane.clock import Clock
from controlplane.console.metrics import ConsoleMetrics
from controlplane.core.readiness import DatabaseSeen, NodeSeen, Readiness, ReadyState, judge
from controlplane.db import Database, models
from controlplane.db.looks import look_at
from controlplane.node.registry import LOST_AFTER
from controlplane.trust import TrustWatch
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError
from saltern.http_door import Answer, HttpDoor

_log = structlog.get_logger(__name__)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: What was read from the database is told again for so long: whoever scrapes costs no more than this.
_KEEP_S: Final = 2.0
#: More nodes than this are not told apart.
_NODES_SHOWN_MAX: Final = 256
#: A database that does not answer within this is not one to be ready with.
_DATABASE_S: Final = 2.0
_BACKLOG: Final = 64


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What the database says of the nodes; None where it does not answer."""

    live: int
    lost: int
    behind: int
    policy_version: int
    nodes: tuple[NodeSeen, ...]


class ControlMetrics(grpc.aio.ServerInterceptor):
    """Counts calls as the outermost interceptor of the server, and collects the rest when somebody scrapes.

    Attributes:
        is_draining: set when the control plane begins to stop.
        ended_task: work in the background that has ended by itself, which none ever does; empty for none.
    """

    def __init__(self, database: Database, clock: Clock, console: ConsoleMetrics) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._database = database
        self._clock = clock
        self._cluster: _Cluster | None = None
        self._database_seen: DatabaseSeen | None = None
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()
        self._handlers: dict[str, tuple[Handler, Handler]] = {}  # by method: the last one, and the same counted
        self.is_draining = False
        self.ended_task = ""
        self._trust: TrustWatch | None = None
        self._console = console
        self._registry = registry = CollectorRegistry()
        labels = ("method", "code")
        self._requests = Counter("saltern_control_requests", "Calls answered.", labels, registry=registry)
        self._seconds = Histogram(
            "saltern_control_request_duration_seconds",
            "How long calls took, but for streams.",
            ("method",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._streams = Gauge("saltern_control_streams", "Streams that are open.", ("method",), registry=registry)
        self._nodes = Gauge("saltern_control_nodes", "Registered nodes, by state.", ("state",), registry=registry)
        self._behind = Gauge("saltern_control_nodes_behind", "Live nodes with an older policy.", registry=registry)
        silent = "Since the last report of a node that may go by its leases."
        self._node_silent = Gauge("saltern_control_node_report_age_seconds", silent, ("node",), registry=registry)
        lag = "Policy versions that such a node is behind."
        self._node_lag = Gauge("saltern_control_node_policy_lag", lag, ("node",), registry=registry)
        self._behind_since_s: dict[str, float] = {}
        self._version = Gauge("saltern_control_policy_version", "The newest policy.", registry=registry)
        self._up = Gauge("saltern_control_database_up", "1 while the database answers.", registry=registry)
        in_use = "Connections of the pool that are in use."
        self._in_use = Gauge("saltern_control_database_connections_in_use", in_use, registry=registry)
        health = "1 for the state of /readyz."
        self._health = Gauge("saltern_control_health_state", health, ("state",), registry=registry)
        self._build = Info("saltern_control_build", "What runs here.", registry=registry)
        self._build.info({"version": version("saltern-server")})
        registry.register(console)
        ProcessCollector(registry=registry)
        registry.register(GC_COLLECTOR)

    def watch(self, trust: TrustWatch) -> None:
        """Tell of ``trust`` too."""
        self._trust = trust
        self._registry.register(trust)

    # ---- calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # a method that is not here: its name is the caller's, and must not become a label
        method = handler_call_details.method.lstrip("/").rpartition(".")[2]
        inner, counted = self._handlers.get(method, (None, None))
        if counted is None or inner is not handler:  # the door gives open methods the same one for every call
            counted = self._counting(handler, method)
            self._handlers[method] = handler, counted
        return counted

    def _counting(self, handler: Handler, method: str) -> Handler:
        """The same handler, its calls counted and timed."""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.stream_unary is not None:
            inner_call: Any = handler.stream_unary

            async def call(requests: AsyncIterator[Any], context: Context) -> Any:
                began_s = perf_counter()
                with self._counted(method, context):
                    try:
                        return await inner_call(requests, context)
                    finally:
                        self._seconds.labels(method).observe(perf_counter() - began_s)

            return grpc.stream_unary_rpc_method_handler(call, **codec)
        assert handler.stream_stream is not None, "the door inside turns every other handler into one of these two"
        inner_stream: Any = handler.stream_stream

        async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            with self._counted(method, context), self._streams.labels(method).track_inprogress():
                async for response in inner_stream(requests, context):
                    yield response

        return grpc.stream_stream_rpc_method_handler(stream, **codec)

    @contextmanager
    def _counted(self, method: str, context: Context) -> Iterator[None]:
        code = grpc.StatusCode.OK
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code = _code_of(context) or grpc.StatusCode.UNKNOWN
            raise
        finally:
            self._requests.labels(method, code.name).inc()

    # ---- pages

    async def metrics(self, accept: str) -> Answer:
        """The page of ``/metrics``."""
        cluster = await self._look()
        self._up.set(cluster is not None)
        if cluster is not None:
            self._nodes.labels("live").set(cluster.live)
            self._nodes.labels("lost").set(cluster.lost)
            self._behind.set(cluster.behind)
            self._version.set(cluster.policy_version)
            self._node_silent.clear()
            self._node_lag.clear()
            for seen in cluster.nodes:
                self._node_silent.labels(seen.node).set(seen.silent_s)
                self._node_lag.labels(seen.node).set(seen.lag)
        self._in_use.set(self._database.connections_in_use)
        readiness = self._judged(cluster)
        for state in ReadyState:
            self._health.labels(state.value).set(state is readiness.state)
        if "application/openmetrics-text" in accept.lower():
            page = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return Answer(HTTPStatus.OK, page, openmetrics.CONTENT_TYPE_LATEST)
        return Answer(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4)

    async def readyz(self, _accept: str) -> Answer:
        """Whether to send calls here, with what is not as it should be; see :mod:`controlplane.core.readiness`."""
        readiness = self._judged(await self._look())
        status = HTTPStatus.OK if readiness.is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        reasons = [{"reason": finding.reason, "message": finding.message} for finding in readiness.findings]
        return Answer.of_json(status, {"state": readiness.state, "reasons": reasons})

    def _judged(self, cluster: _Cluster | None) -> Readiness:
        if cluster is None:
            return judge(None, self.is_draining)
        trust = () if self._trust is None else self._trust.findings()
        return judge(self._database_seen, self.is_draining, cluster.nodes, trust, ended_task=self.ended_task)

    async def _look(self) -> _Cluster | None:
        async with self._lock:
            if monotonic() >= self._read_s + _KEEP_S:
                try:
                    async with asyncio.timeout(_DATABASE_S):
                        self._database_seen = await look_at(self._database)
                        self._cluster = await self._read()
                        await self._console.look()
                except (SQLAlchemyError, OSError, TimeoutError):
                    self._cluster = None
                self._read_s = monotonic()
            return self._cluster

    async def _read(self) -> _Cluster:
        is_live = models.Node.last_report_time > self._clock() - LOST_AFTER
        async with self._database.transaction() as session:
            newest = await session.scalar(select(models.PolicyState.version)) or 0
            is_behind = is_live & (models.Node.applied_version < newest)
            statement = select(func.count().filter(is_live), func.count(), func.count().filter(is_behind)).select_from(
                models.Node
            )
            row = (await session.execute(statement)).one()
            live, nodes, behind = row[0], row[1], row[2]
            holders = await session.scalars(
                select(models.Node)
                .where(models.Node.lease_expire_time > self._clock())
                .order_by(models.Node.id)
                .limit(_NODES_SHOWN_MAX)
            )
            shown = tuple(self._seen(node, newest) for node in holders)
        self._behind_since_s = {seen.node: self._behind_since_s[seen.node] for seen in shown if seen.lag}
        return _Cluster(live=live, lost=nodes - live, behind=behind, policy_version=newest, nodes=shown)

    def _seen(self, node: models.Node, newest: int) -> NodeSeen:
        lag = max(0, newest - node.applied_version)
        since_s = self._behind_since_s.setdefault(node.id, monotonic()) if lag else monotonic()
        silent_s = max(0.0, (self._clock() - node.last_report_time).total_seconds())
        return NodeSeen(node.id, lag, monotonic() - since_s, silent_s)


@asynccontextmanager
async def serving_metrics(metrics: ControlMetrics, listen: Endpoint | None) -> AsyncIterator[str]:
    """Serve over HTTP for the time of the block; gives where, or an empty text for ``listen`` None.

    Raises:
        FailedPreconditionError: CANNOT_LISTEN.
    """
    if listen is None:
        yield ""
        return
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        listener = socket.create_server((listen.host, listen.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot listen on {listen} for metrics: {(error.strerror or 'not usable').lower()}",
            reason="CANNOT_LISTEN",
            hint="choose another address with --metrics-listen; port 0 takes any free one, 'off' serves none",
        ) from None

    async def livez(_accept: str) -> Answer:
        return Answer.of_json(HTTPStatus.OK, {"state": "alive"})

    pages = {"/metrics": metrics.metrics, "/livez": livez, "/readyz": metrics.readyz}
    door = HttpDoor(listener, pages, on_failure=functools.partial(_log.exception, "metrics request failed"))
    endpoint = Endpoint(listen.host, listener.getsockname()[1])
    await door.open()
    try:
        yield str(endpoint)
    finally:
        await door.close()


def _code_of(context: Context) -> grpc.StatusCode | None:
    """The status that the call was ended with, or None: grpc.aio keeps its number."""
    number = context.code()
    for code in grpc.StatusCode:
        if number in (code, code.value[0]) and code is not grpc.StatusCode.OK:
            return code
    return None
