"""The node's line to the control plane against a scripted one: ACK, NACK, fencing, reconnecting, reports."""

# ruff: noqa: N802 (the methods have gRPC's names)

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from dataplane.control_client import ControlClient
from dataplane.core.cache import CacheCore
from dataplane.core.lease import Lease
from dataplane.core.usage import NodeUsage, PolicyApplied
from dataplane.policy_file import Push
from dataplane.registration import Registration
from saltern.admin_client import ApiKey
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import AbortedError, UnauthenticatedError, UnavailableError
from saltern.names import TenantId
from saltern.node.v1 import node_pb2, node_pb2_grpc
from saltern.rpc_errors import abort
from tenants.policy import NodePolicy
from tenants.tokens import KeySet
from tests.support.snapshots import delta, snapshot

API_KEY = ApiKey(f"sk-saltern-{'0' * 16}-{'A' * 43}")
MIB = 1024 * 1024


class ScriptedControl(auth_pb2_grpc.AuthServiceServicer, node_pb2_grpc.NodeServiceServicer):
    """Does what a test says; notes what the node said."""

    def __init__(self) -> None:
        self.pushes: asyncio.Queue[Push | None] = asyncio.Queue()
        self.answers: asyncio.Queue[node_pb2.StreamPolicyRequest] = asyncio.Queue()
        self.reports: asyncio.Queue[node_pb2.ReportUsageRequest] = asyncio.Queue()
        self.registrations: list[node_pb2.RegisterNodeRequest] = []
        self.exchanges = 0
        self.token_life_s = 600
        self.refuses_key = False

    async def ExchangeApiKey(self, request: Any, context: Any) -> auth_pb2.ExchangeApiKeyResponse:
        self.exchanges += 1
        if self.refuses_key:
            await abort(context, UnauthenticatedError("the API key is not valid", reason="API_KEY_INVALID"))
        response = auth_pb2.ExchangeApiKeyResponse(access_token="token")
        response.expire_time.seconds = int(time.time()) + self.token_life_s
        return response

    async def RegisterNode(self, request: Any, context: Any) -> node_pb2.RegisterNodeResponse:
        assert ("authorization", "Bearer token") in context.invocation_metadata()
        self.registrations.append(request)
        response = node_pb2.RegisterNodeResponse(name="nodes/n", fencing_epoch=len(self.registrations))
        response.report_interval.FromMilliseconds(50)
        return response

    async def StreamPolicy(self, requests: Any, context: Any) -> AsyncIterator[node_pb2.StreamPolicyResponse]:
        async def listen() -> None:
            async for answer in requests:
                await self._check_epoch(answer.fencing_epoch, context)
                await self.answers.put(answer)

        listening = asyncio.create_task(listen())
        try:
            while (push := await self.pushes.get()) is not None:
                if isinstance(push, node_pb2.PolicyDelta):
                    yield node_pb2.StreamPolicyResponse(delta=push)
                else:
                    yield node_pb2.StreamPolicyResponse(snapshot=push)
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    async def ReportUsage(self, request: Any, context: Any) -> node_pb2.ReportUsageResponse:
        await self._check_epoch(request.fencing_epoch, context)
        await self.reports.put(request)
        return node_pb2.ReportUsageResponse()

    async def _check_epoch(self, fencing_epoch: int, context: Any) -> None:
        if fencing_epoch != len(self.registrations):
            await abort(context, AbortedError("fencing epoch is stale", reason="FENCED"))


class Sink:
    """A node without doors."""

    def __init__(self) -> None:
        self.core = CacheCore(MIB)
        self.key_set: KeySet | None = None

    @property
    def applied_version(self) -> int:
        return self.core.policy.version

    @property
    def policy(self) -> NodePolicy:
        return self.core.policy

    def apply(
        self, policy: NodePolicy, key_set: KeySet, *, touched: Collection[TenantId] | None = None
    ) -> PolicyApplied:
        applied = self.core.apply_policy(policy, 0, touched=touched)
        self.key_set = key_set
        return applied

    @property
    def settled_version(self) -> int:
        return self.core.settled_version

    def renew(self, lease: Lease) -> None:
        self.core.renew(lease, time.monotonic_ns())

    def usages(self) -> Iterator[NodeUsage]:
        yield self.core.usage()


@asynccontextmanager
async def talking(token_life_s: int = 600) -> AsyncIterator[tuple[ScriptedControl, Sink, ControlClient]]:
    control, sink = ScriptedControl(), Sink()
    control.token_life_s = token_life_s
    server = grpc.aio.server()
    auth_pb2_grpc.add_AuthServiceServicer_to_server(control, server)
    node_pb2_grpc.add_NodeServiceServicer_to_server(control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    registration = Registration("n", "127.0.0.1:1", "127.0.0.1:2", "/run/n.sock", "host", MIB)
    try:
        async with asyncio.timeout(30), ControlClient(f"127.0.0.1:{port}", API_KEY, registration, sink) as client:
            await client.join(5)
            running = asyncio.create_task(client.run())
            try:
                yield control, sink, client
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
    finally:
        await server.stop(None)


async def answer_to(control: ScriptedControl, push: Push) -> node_pb2.StreamPolicyRequest:
    await control.pushes.put(push)
    return await control.answers.get()


async def test_a_snapshot_is_applied_and_acknowledged() -> None:
    async with talking() as (control, sink, client):
        assert control.registrations[0].capacities[0].capacity_bytes == MIB
        opening = await control.answers.get()
        assert (opening.node_id, opening.fencing_epoch, opening.applied_version) == ("n", 1, 0)
        answer = await answer_to(control, snapshot(version=7))
        assert (answer.applied_version, answer.error_message) == (7, "")
        assert client.has_policy.is_set()
        assert sink.applied_version == 7
        while (await control.reports.get()).applied_version != 7:
            pass


async def test_a_snapshot_that_cannot_be_applied_is_answered_with_why_and_the_old_one_stays() -> None:
    async with talking() as (control, sink, _):
        await control.answers.get()
        await answer_to(control, snapshot(version=7))
        malformed = snapshot(version=8)
        malformed.tenants[0].tenant_id = "NOT AN ID"
        answer = await answer_to(control, malformed)
        assert answer.applied_version == 7
        assert "malformed policy snapshot" in answer.error_message
        too_much = snapshot(version=9)
        too_much.tenants[0].tiers[0].limit_bytes = too_much.tenants[0].tiers[0].reserved_bytes = 2 * MIB
        answer = await answer_to(control, too_much)
        assert "above the capacity" in answer.error_message  # I5
        answer = await answer_to(control, snapshot(version=6))
        assert answer.applied_version == sink.applied_version == 7
        assert (await answer_to(control, snapshot(version=10))).applied_version == 10


async def test_a_delta_changes_what_it_names_and_nothing_else() -> None:
    async with talking() as (control, sink, _):
        assert (await control.answers.get()).accepts_deltas
        await answer_to(control, snapshot(version=5))
        before = sink.core.policy.tenants
        answer = await answer_to(control, delta(5, 7, changed=("blue",)))
        assert (answer.applied_version, answer.error_message) == (7, "")
        assert sink.core.policy.tenants["acme"] is before["acme"], "rules that did not change are the same object"  # type: ignore[index]
        assert set(sink.core.policy.tenants) == {"acme", "blue"}
        answer = await answer_to(control, delta(7, 8, removed=("acme",)))
        assert answer.applied_version == answer.settled_version == 8
        assert set(sink.core.policy.tenants) == {"blue"}


@pytest.mark.parametrize(
    "bad",
    [delta(4, 6), delta(6, 7), delta(5, 5), delta(5, 6, changed=("acme",), removed=("acme",))],
    ids=["from an earlier version", "from a later version", "to the same version", "changed and removed"],
)
async def test_a_delta_that_does_not_fit_is_answered_with_the_version_that_stays(bad: node_pb2.PolicyDelta) -> None:
    async with talking() as (control, sink, _):
        await control.answers.get()
        await answer_to(control, snapshot(version=5))
        before = sink.core.policy
        answer = await answer_to(control, bad)
        assert answer.error_message
        assert answer.applied_version == 5
        assert sink.core.policy is before
        assert (await answer_to(control, snapshot(version=6))).applied_version == 6


async def test_a_closed_stream_is_opened_again_under_the_same_registration() -> None:
    async with talking() as (control, _, _):
        await control.answers.get()
        await answer_to(control, snapshot(version=7))
        await control.pushes.put(None)
        opening = await control.answers.get()
        assert (opening.fencing_epoch, opening.applied_version) == (1, 7)
        assert len(control.registrations) == 1


async def test_i8_a_fenced_node_registers_again() -> None:
    async with talking() as (control, _, _):
        await control.answers.get()
        control.registrations.append(control.registrations[0])  # another process came by under this name
        while (await control.answers.get()).fencing_epoch != 3:
            pass
        while (await control.reports.get()).fencing_epoch != 3:
            pass


async def test_i8_reports_are_numbered_over_every_registration_of_one_process() -> None:
    async with talking() as (control, _, _):
        first = await control.reports.get()
        control.registrations.append(control.registrations[0])
        while (again := await control.reports.get()).fencing_epoch != 3:
            pass
    assert (again.counters_id, first.sequence) == (first.counters_id, 1) and again.sequence > first.sequence
    async with talking() as (other, _, _):
        assert (await other.reports.get()).counters_id != first.counters_id


async def test_i8_a_node_that_stops_reports_once_more_and_is_never_held_up() -> None:
    async with talking() as (control, _, client):
        await control.reports.get()
        while not control.reports.empty():
            control.reports.get_nowait()
        await client.report_last()
        assert (await control.reports.get()).sequence > 1
        control.registrations.append(control.registrations[0])
        await client.report_last()  # fenced: nobody wants to hear it, and that is no error


async def test_a_token_near_its_end_is_exchanged_again() -> None:
    async with talking(token_life_s=30) as (control, _, _):
        for _ in range(3):
            await control.reports.get()
        assert control.exchanges > 3


async def test_join_reports_a_refused_key_at_once_and_an_absent_control_plane_after_its_patience() -> None:
    registration = Registration("n", "127.0.0.1:1", "127.0.0.1:2", "", "host", MIB)
    async with ControlClient("127.0.0.1:1", API_KEY, registration, Sink()) as client:
        with pytest.raises(UnavailableError):
            await client.join(0)
    control = ScriptedControl()
    control.refuses_key = True
    server = grpc.aio.server()
    auth_pb2_grpc.add_AuthServiceServicer_to_server(control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with ControlClient(f"127.0.0.1:{port}", API_KEY, registration, Sink()) as client:
            with pytest.raises(UnauthenticatedError):
                await client.join(60)
        assert control.exchanges == 1
    finally:
        await server.stop(None)
