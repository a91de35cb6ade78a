"""A key of the role node serves as the one node that it was made for (I1, I4, I8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from controlplane.db import models
from saltern import errors
from saltern.admin.v1 import audit_pb2, credentials_pb2
from saltern.node.v1 import node_pb2
from tests.controlplane.node.test_node_service import Metadata, register_request, streaming
from tests.support.control import Control, control_plane, migrate, refused
from tests.support.served_node import serve_node

NODE = credentials_pb2.ROLE_NODE


@pytest.fixture
async def strict(postgres: Any, tmp_path: Path) -> Any:
    """A control plane as it is without options."""
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control", allow_unbound_node_keys=False) as running:
            await running.redeem()
            yield running


async def key_of(control: Control, node: str) -> Metadata:
    return await control.bearer(await control.add_api_key(NODE, key_id=f"key-of-{node}", node_id=node))


async def registered(control: Control) -> dict[str, tuple[int, str]]:
    """Fencing epoch and wire endpoint of each node."""
    async with control.database.transaction() as session:
        rows = await session.scalars(select(models.Node))
        return {row.id: (row.fencing_epoch, row.wire_endpoint) for row in rows}


async def test_i1_a_key_of_one_node_cannot_be_another(strict: Control) -> None:
    victim, thief = await key_of(strict, "node-1"), await key_of(strict, "node-2")
    await strict.node.RegisterNode(register_request("node-1"), metadata=victim)
    before = await registered(strict)
    stolen = register_request("node-1", dram_bytes=2**40)
    stolen.endpoint.wire_endpoint = "203.0.113.1:7701"
    report = node_pb2.ReportUsageRequest(node_id="node-1", fencing_epoch=1, applied_version=1, settled_version=10**6)
    for call in (strict.node.RegisterNode(stolen, metadata=thief), strict.node.ReportUsage(report, metadata=thief)):
        error = await refused(call)
        assert (type(error), error.reason) == (errors.PermissionDeniedError, "NODE_KEY_OF_ANOTHER_NODE")
    async with streaming(strict, thief, "node-1", 1) as stream:
        assert (await refused(stream.call.read())).reason == "NODE_KEY_OF_ANOTHER_NODE"
    # The same for a node that is not there: nothing is learnt of the fleet.
    error = await refused(strict.node.RegisterNode(register_request("node-9"), metadata=thief))
    assert error.reason == "NODE_KEY_OF_ANOTHER_NODE"
    assert await registered(strict) == before
    assert (await strict.node.RegisterNode(register_request("node-2"), metadata=thief)).fencing_epoch == 1


async def test_i11_each_attempt_to_be_another_node_is_audited(strict: Control) -> None:
    thief = await key_of(strict, "node-2")
    await refused(strict.node.RegisterNode(register_request("node-1"), metadata=thief))
    await refused(strict.node.ReportUsage(node_pb2.ReportUsageRequest(node_id="node-1"), metadata=thief))
    async with streaming(strict, thief, "node-1", 1) as stream:
        await refused(stream.call.read())
    denied = [event for event in await strict.events() if event.outcome == audit_pb2.AuditEvent.OUTCOME_DENIED]
    assert [(event.method.rpartition("/")[2], event.actor, event.resource, event.reason) for event in denied] == [
        (method, "apiKeys/key-of-node-2", "nodes/node-1", "NODE_KEY_OF_ANOTHER_NODE")
        for method in ("StreamPolicy", "ReportUsage", "RegisterNode")
    ]


async def test_a_key_that_is_bound_to_no_node_is_not_made_and_not_taken(strict: Control) -> None:
    error = await refused(strict.add_api_key(NODE, key_id="any"))
    assert type(error) is errors.InvalidArgumentError
    assert "--node" in error.hint
    bound = await strict.add_api_key(NODE, key_id="old", node_id="node-1")
    async with strict.database.transaction() as session:  # as keys were made before
        (row,) = await session.scalars(select(models.ApiKey).where(models.ApiKey.id == "old"))
        row.node_id = None
    error = await refused(strict.node.RegisterNode(register_request(), metadata=await strict.bearer(bound)))
    assert (type(error), error.reason) == (errors.PermissionDeniedError, "NODE_KEY_UNBOUND")
    assert "saltern key create" in error.hint


async def test_only_keys_of_the_role_node_are_bound_to_one(strict: Control) -> None:
    await strict.add_tenant("acme")
    for role, tenant in ((credentials_pb2.ROLE_WRITER, "acme"), (credentials_pb2.ROLE_PLATFORM_ADMIN, "")):
        error = await refused(strict.add_api_key(role, tenant, node_id="node-1"))
        assert type(error) is errors.InvalidArgumentError
    error = await refused(strict.add_api_key(NODE, node_id="Node 1"))
    assert type(error) is errors.InvalidArgumentError


async def test_a_rotation_and_a_binding_go_together(strict: Control) -> None:
    await key_of(strict, "node-1")
    rotate = credentials_pb2.RotateApiKeyRequest(name="apiKeys/key-of-node-1")
    rotated = await strict.credentials.RotateApiKey(rotate, metadata=await strict.bearer(strict.admin_key))
    assert rotated.api_key.node_id == "node-1"
    error = await refused(
        strict.node.RegisterNode(register_request("node-2"), metadata=await strict.bearer(rotated.secret))
    )
    assert error.reason == "NODE_KEY_OF_ANOTHER_NODE"


async def test_unbound_keys_are_taken_where_the_platform_allows_it(control: Control) -> None:
    anyone = await control.bearer(await control.add_api_key(NODE, key_id="any"))
    bound = await key_of(control, "node-2")
    for node in ("node-1", "node-2"):
        await control.node.RegisterNode(register_request(node), metadata=anyone)
    error = await refused(control.node.RegisterNode(register_request("node-1"), metadata=bound))
    assert error.reason == "NODE_KEY_OF_ANOTHER_NODE"


async def test_a_node_process_with_the_key_of_another_says_so_and_ends(strict: Control, tmp_path: Path) -> None:
    secret = await strict.add_api_key(NODE, key_id="other", node_id="node-2")
    with serve_node(tmp_path / "node", str(strict.plane.endpoint), secret) as node:
        status, printed = await node.end()
    assert status == 3
    assert "this API key is for node node-2, not for node-1" in printed
    assert "--node-id node-2" in printed
    assert secret not in printed
