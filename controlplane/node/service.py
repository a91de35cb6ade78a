"""NodeService: the gRPC face of :mod:`controlplane.node.registry` and of the policy stream. Contract: node.proto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Final, Protocol

import structlog

from controlplane.audit import DenialLog, record
from controlplane.caller import Caller, authorise, current_caller
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, bump_policy_version, models
from controlplane.node import registry
from controlplane.node.answers import Answer, AnswerBook
from controlplane.node.decode import ReportChecker, decode_facts
from controlplane.node.identity import require_node
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.policy_feed import PolicyFeed
from controlplane.node.policy_rows import read_version
from controlplane.node.push import NodeStream, PolicyPusher, PolicyReader
from controlplane.node.report_intake import Report, ReportIntake
from controlplane.restored import RestoreWatch
from controlplane.rpc import Context, stream, unary
from saltern.errors import InvalidArgumentError, PermissionDeniedError
from saltern.names import NodeId, node_name, parse_node_id
from saltern.node.v1 import node_pb2, node_pb2_grpc
from tenants.roles import Permission

_SERVICE: Final = "saltern.node.v1.NodeService"
_ERROR_MESSAGE_MAX_CHARS: Final = 500

_log = structlog.get_logger(__name__)


class _NamesNode(Protocol):
    node_id: str


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """Serves cache nodes; every method needs the role node."""

    def __init__(
        self,
        *,
        database: Database,
        feed: PolicyFeed,
        keeper: LeaseKeeper,
        denials: DenialLog,
        restored: RestoreWatch,
        allow_unbound_keys: bool = False,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._allow_unbound_keys = allow_unbound_keys
        self._restored = restored
        self._checker = ReportChecker()
        self._reports = ReportIntake(database)
        self._answers = AnswerBook(database, feed, keeper)
        self._keeper = keeper
        self._denials = denials
        self._clock = clock
        self._pusher = PolicyPusher(PolicyReader(database, keeper), feed, keeper, clock)

    @unary
    async def RegisterNode(  # noqa: N802 (gRPC's spelling)
        self, request: node_pb2.RegisterNodeRequest, context: Context
    ) -> node_pb2.RegisterNodeResponse:
        caller, node = await self._authorise("RegisterNode", request)
        facts = decode_facts(request)
        now = self._clock()
        async with self._database.transaction() as session:
            registered = await registry.register(session, node, facts, now)
            row = registered.row

            async def begin_lease() -> int:
                """The shares of every node depend on this one's capacity; and a stream of the node's previous process
                wakes up and finds itself fenced."""
                concern = models.Concern.MEMBERS if registered.is_member_change else models.Concern.NOBODY
                version = await bump_policy_version(session, now, concern=concern)
                registry.begin_lease(row, facts.state_id, now, self._keeper.lease_duration, version)
                return version

            await record(
                session,
                tenant=None,
                actor=caller.subject,
                method=f"{_SERVICE}/RegisterNode",
                resource=node_name(node),
                now=now,
                after={
                    "fencing_epoch": row.fencing_epoch,
                    "wire_endpoint": facts.wire_endpoint,
                    "tls_server_name": facts.tls_server_name,
                    "capacities_bytes": {tier.value: size for tier, size in facts.capacities_bytes.items()},
                },
                bump_policy=begin_lease,
            )
        _log.info(
            "node registered",
            node=node,
            fencing_epoch=row.fencing_epoch,
            waits_until=row.lease_from_time and row.lease_from_time.isoformat(),
        )
        response = node_pb2.RegisterNodeResponse(
            name=node_name(node), fencing_epoch=row.fencing_epoch, lease_version=row.lease_version
        )
        response.lease_duration.FromTimedelta(self._keeper.lease_duration)
        response.report_interval.FromTimedelta(timedelta(seconds=registry.REPORT_INTERVAL_S))
        return response

    @stream
    async def StreamPolicy(  # noqa: N802
        self, requests: AsyncIterator[node_pb2.StreamPolicyRequest], context: Context
    ) -> AsyncIterator[node_pb2.StreamPolicyResponse]:
        await self._authorise_role("StreamPolicy")
        first = await anext(aiter(requests), None)
        if first is None:
            raise InvalidArgumentError(
                "the stream ended before its first message",
                reason="NODE_MISSING",
                hint="say first which node follows the policy",
            )
        _, node_id = await self._authorise("StreamPolicy", first)
        async with self._database.transaction() as session:
            await registry.require_current(session, node_id, first.fencing_epoch)
            opened_version = await read_version(session)
        node = NodeStream(node_id, first.fencing_epoch, first.accepts_deltas, opened_version)
        answers = asyncio.create_task(self._follow_answers(requests, node), name=f"policy answers of {node.node}")
        try:
            async for push in self._pusher.pushes(node, answers):
                yield push
        finally:
            answers.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({answers})

    @unary
    async def ReportUsage(  # noqa: N802
        self, request: node_pb2.ReportUsageRequest, context: Context
    ) -> node_pb2.ReportUsageResponse:
        _, node = await self._authorise("ReportUsage", request)
        said = await self._checker.check(node, request)
        now = self._clock()
        async with self._database.transaction() as session:
            row = await registry.require_current(session, node, request.fencing_epoch, lock=True)
            row.last_report_time = now
            registry.go_by(row, request.applied_version)
            has_settled = registry.settle(row, request.settled_version)
            newest_version = await read_version(session)
            registry.renew_lease(row, now, self._keeper.lease_duration, newest_version)
        if request.applied_version > newest_version:
            await self._restored.told(request.applied_version, node)
        if has_settled:
            self._keeper.wake()
        response = node_pb2.ReportUsageResponse(lease_version=row.lease_version, policy_version=newest_version)
        response.lease_duration.FromTimedelta(self._keeper.lease_duration)
        await self._reports.take_in(Report(node, request, said, now))
        return response

    async def finish_reports(self) -> None:
        """Return when everything that was reported is stored."""
        await self._reports.finish()

    async def _authorise(self, method: str, message: _NamesNode) -> tuple[Caller, NodeId]:
        """The caller and the node that ``message`` names, if its key may serve as that; else audited (I11)."""
        caller = await self._authorise_role(method)
        node = parse_node_id(message.node_id)
        try:
            require_node(caller, node, allow_unbound=self._allow_unbound_keys)
        except PermissionDeniedError as error:
            await self._record_denied(error, method, node_name(node))
            raise
        return caller, node

    async def _authorise_role(self, method: str) -> Caller:
        """The caller, if it is a node; an attempt by anybody else is audited (I11)."""
        try:
            return authorise(Permission.NODE_SERVE, None)
        except PermissionDeniedError as error:
            await self._record_denied(error, method)
            raise

    async def _record_denied(self, error: PermissionDeniedError, method: str, resource: str = "") -> None:
        caller = current_caller()
        await self._denials.record_denied(
            error, method=f"{_SERVICE}/{method}", resource=resource, tenant=caller.tenant, actor=caller.subject
        )

    async def _follow_answers(self, requests: AsyncIterator[node_pb2.StreamPolicyRequest], stream: NodeStream) -> None:
        """Store what the node says of each push until it closes its side."""
        async for answer in requests:
            if (answer.node_id, answer.fencing_epoch) != (stream.node, stream.fencing_epoch):
                raise InvalidArgumentError(
                    "a policy stream belongs to one node and fencing epoch",
                    reason="STREAM_OF_ANOTHER_NODE",
                    hint="open a stream for each registration",
                )
            if answer.error_message:
                _log.warning(
                    "node refused a policy",
                    node=stream.node,
                    applied_version=answer.applied_version,
                    error_message=answer.error_message[:_ERROR_MESSAGE_MAX_CHARS],
                )
            await self._answers.store(
                Answer(stream.node, answer.fencing_epoch, answer.applied_version, answer.settled_version)
            )
            stream.take_answer(answer.applied_version, is_refusal=bool(answer.error_message))
