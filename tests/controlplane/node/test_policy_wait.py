"""The consistency token: a change answers with its policy version, and a wait for it ends when it is everywhere."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from controlplane.admin.policy import TENANT_WAITS_MAX
from controlplane.db import ServiceScope, ServiceTask, models
from saltern.admin.v1 import credentials_pb2, policy_pb2, tenants_pb2
from saltern.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from saltern.node.v1 import node_pb2
from saltern.policy_version import read_policy_version
from tests.support.control import Control, refused
from tests.support.follower import Metadata, following


@pytest.fixture
async def as_node(control: Control) -> Metadata:
    return await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))


@pytest.fixture
async def as_admin(control: Control) -> Metadata:
    return await control.bearer(control.admin_key)


async def token_of(call: Any) -> int:
    await call
    return read_policy_version(await call.trailing_metadata())


def suspend(control: Control, metadata: Metadata, tenant: str = "acme", request_id: str = "") -> Any:
    request = tenants_pb2.SuspendTenantRequest(name=f"tenants/{tenant}", request_id=request_id)
    return control.tenants.SuspendTenant(request, metadata=metadata)


def waiting(control: Control, metadata: Metadata, version: int, timeout_s: float = 30) -> Any:
    request = policy_pb2.WaitForPolicyRequest(version=version)
    request.timeout.FromTimedelta(timedelta(seconds=timeout_s))
    return control.policy.WaitForPolicy(request, metadata=metadata)


async def test_every_change_answers_with_its_version_and_nothing_else_does(
    control: Control, as_admin: Metadata
) -> None:
    await control.add_tenant("acme")
    request_id = str(uuid.uuid4())
    first = await token_of(suspend(control, as_admin, request_id=request_id))
    (event,) = [event for event in await control.events("tenants/acme") if event.method.endswith("SuspendTenant")]
    assert first == event.policy_version > 0
    later = await token_of(suspend(control, as_admin))
    assert later > first
    repeated = await token_of(suspend(control, as_admin, request_id=request_id))
    assert repeated == later, "a repetition is as far as the deployment is"
    reading = control.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=as_admin)
    assert await token_of(reading) == 0
    assert (await refused(suspend(control, as_admin, "nobody"))).reason == "NOT_FOUND"


async def test_it_returns_once_every_node_has_acknowledged(
    control: Control, as_node: Metadata, as_admin: Metadata
) -> None:
    await control.add_tenant("acme")
    async with following(control, as_node) as one, following(control, as_node, "node-2") as two:
        await one.follow(two.policy.version)
        token = await token_of(suspend(control, as_admin))
        wait = asyncio.ensure_future(waiting(control, as_admin, token))
        await one.follow(token)
        assert not wait.done()
        await two.follow(token)
        reached = await wait
        assert (reached.version, reached.acknowledged_nodes, reached.expired_nodes) == (token, 2, 0)
        newest = await waiting(control, as_admin, 0)
        assert newest.version >= token


async def test_a_late_node_is_named_to_the_platform_and_only_counted_to_a_tenant(
    control: Control, as_node: Metadata, as_admin: Metadata
) -> None:
    await control.add_tenant("acme")
    await control.add_tenant("blue")
    as_tenant = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_TENANT_ADMIN, "acme"))
    async with following(control, as_node, "node-7") as one:
        before = one.policy.version
        token = await token_of(suspend(control, as_admin, "blue"))
        error = await refused(waiting(control, as_admin, token, timeout_s=0))
        assert (type(error), error.reason) == (DeadlineExceededError, "POLICY_NOT_EVERYWHERE")
        assert error.metadata["late"] == "node-7"
        assert f"node-7 (at {before})" in error.message
        error = await refused(waiting(control, as_tenant, token, timeout_s=0.1))
        assert (error.metadata["acknowledged_nodes"], error.metadata["late_nodes"]) == ("0", "1")
        assert "node-7" not in f"{error.message} {error.hint} {error.metadata}"
        assert (await refused(waiting(control, as_node, token))).reason == "ROLE_REQUIRED"


async def set_node(control: Control, **columns: Any) -> None:
    async with control.database.transaction(ServiceScope(ServiceTask.LEASES)) as session:
        await session.execute(update(models.Node).values(**columns))


async def test_a_node_whose_lease_has_run_out_is_not_waited_for(
    control: Control, as_node: Metadata, as_admin: Metadata
) -> None:
    await control.add_tenant("acme")
    async with following(control, as_node):
        token = await token_of(suspend(control, as_admin))
        assert (await refused(waiting(control, as_admin, token, timeout_s=0))).reason == "POLICY_NOT_EVERYWHERE"
        await set_node(control, lease_expire_time=datetime.now(UTC))
        reached = await waiting(control, as_admin, token)
        assert (reached.acknowledged_nodes, reached.expired_nodes) == (0, 1)


async def test_a_refusal_is_no_acknowledgement(control: Control, as_node: Metadata, as_admin: Metadata) -> None:
    await control.add_tenant("acme")
    async with following(control, as_node) as one:
        before = one.policy.version
        token = await token_of(suspend(control, as_admin))
        while one.policy.version < token:
            await one.next()
            await one.answer(error_message="no", applied_version=before)
        assert (await refused(waiting(control, as_admin, token, timeout_s=0.2))).reason == "POLICY_NOT_EVERYWHERE"
        await one.next()
        await one.answer()
        assert (await waiting(control, as_admin, token)).acknowledged_nodes == 1


async def test_a_report_from_before_an_answer_takes_nothing_back(
    control: Control, as_node: Metadata, as_admin: Metadata
) -> None:
    """Reports and answers come on different streams: a report may be stored after an answer that it knew nothing of."""
    await control.add_tenant("acme")
    async with following(control, as_node) as one:
        before = one.policy.version
        token = await token_of(suspend(control, as_admin))
        await one.follow(token)
        await waiting(control, as_admin, token)
        overtaken = node_pb2.ReportUsageRequest(
            node_id=one.node_id, fencing_epoch=one.fencing_epoch, applied_version=before, settled_version=before
        )
        await control.node.ReportUsage(overtaken, metadata=as_node)
        assert (await waiting(control, as_admin, token, timeout_s=0)).acknowledged_nodes == 1


@pytest.mark.parametrize(
    ("version", "seconds", "reason"),
    [(10**9, 1, "POLICY_VERSION_UNKNOWN"), (-1, 1, "POLICY_VERSION_UNKNOWN"), (1, 901, ""), (1, -1, "")],
)
async def test_what_cannot_be_waited_for_is_refused(
    control: Control, as_admin: Metadata, version: int, seconds: int, reason: str
) -> None:
    error = await refused(waiting(control, as_admin, version, seconds))
    assert isinstance(error, InvalidArgumentError)
    assert error.reason == (reason or "INVALID_FIELD")


async def test_draining_ends_a_wait(control: Control, as_node: Metadata, as_admin: Metadata) -> None:
    await control.add_tenant("acme")
    async with following(control, as_node):
        token = await token_of(suspend(control, as_admin))
        wait = asyncio.ensure_future(refused(waiting(control, as_admin, token)))
        assert (await refused(waiting(control, as_admin, token, timeout_s=0.1))).reason == "POLICY_NOT_EVERYWHERE"
        await control.plane.drain()
        error = await wait
        assert (type(error), error.reason) == (UnavailableError, "DRAINING")


async def test_a_tenant_that_waits_without_end_takes_no_place_from_others(
    control: Control, as_node: Metadata, as_admin: Metadata
) -> None:
    for tenant in ("acme", "blue", "coal"):
        await control.add_tenant(tenant)
    greedy, other = [
        await control.bearer(await control.add_api_key(credentials_pb2.ROLE_READER, tenant))
        for tenant in ("acme", "blue")
    ]
    async with following(control, as_node):
        token = await token_of(suspend(control, as_admin, "coal"))
        waits = [asyncio.ensure_future(refused(waiting(control, greedy, token))) for _ in range(TENANT_WAITS_MAX + 1)]
        done, waiting_on = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result().reason for one in done] == ["TOO_MANY_WAITS"]
        for metadata in (other, as_admin):
            error = await refused(waiting(control, metadata, token, timeout_s=0))
            assert error.reason == "POLICY_NOT_EVERYWHERE"
        for one in waiting_on:
            one.cancel()
        await asyncio.wait(waiting_on)
