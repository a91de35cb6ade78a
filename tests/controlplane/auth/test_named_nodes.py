"""Which nodes an exchange names, and which of them only to read from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from saltern.admin.v1 import credentials_pb2, nodes_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2
from tests.conftest import SessionPostgres
from tests.support.control import Control, control_plane, migrate


@pytest.fixture
async def control(postgres: SessionPostgres, tmp_path: Path) -> AsyncIterator[Control]:
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as running:
            await running.redeem()
            yield running


async def test_a_cordoned_node_is_named_to_read_from(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    admin = await control.bearer(control.admin_key)
    node = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))
    for node_id in ("node-a", "node-b"):
        endpoint = auth_pb2.NodeEndpoint(wire_endpoint=f"{node_id}:7701", shm_path="/s", grpc_endpoint="g", host_id="h")
        await control.node.RegisterNode(node_pb2.RegisterNodeRequest(node_id=node_id, endpoint=endpoint), metadata=node)

    async def named() -> dict[str, bool]:
        return {node.node_id: node.read_only for node in (await control.exchange(secret, "chat")).nodes}

    assert await named() == {"node-a": False, "node-b": False}
    await control.nodes.CordonNode(nodes_pb2.CordonNodeRequest(name="nodes/node-b"), metadata=admin)
    assert await named() == {"node-a": False, "node-b": True}
    await control.nodes.DrainNode(nodes_pb2.DrainNodeRequest(name="nodes/node-a"), metadata=admin)
    assert await named() == {"node-a": True, "node-b": True}
    await control.nodes.UncordonNode(nodes_pb2.UncordonNodeRequest(name="nodes/node-b"), metadata=admin)
    assert await named() == {"node-a": True, "node-b": False}
