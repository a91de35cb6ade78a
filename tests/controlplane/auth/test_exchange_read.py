"""What a batch of exchanges reads past SQLAlchemy is what the models say, of the key's own tenant alone (I2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from sqlalchemy import select

from controlplane.auth.exchange_read import note_uses, read_known, read_live_nodes
from controlplane.db import models
from controlplane.node.registry import live_nodes
from controlplane.secrets import parse_api_key
from saltern.admin.v1 import credentials_pb2
from saltern.auth.v1 import auth_pb2
from saltern.node.v1 import node_pb2
from tests.support.control import Control


def agrees(row: Any, model: object) -> bool:
    """Whether every field of a plain row is what the model has under its name."""
    return row is not None and all(value == getattr(model, name) for name, value in row._asdict().items())


async def add_rotated_key(control: Control, tenant: str) -> tuple[str, str]:
    """The two secrets of a key, old and new."""
    old = await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant, "rotated")
    request = credentials_pb2.RotateApiKeyRequest(
        name=f"tenants/{tenant}/apiKeys/rotated", overlap=Duration(seconds=3600)
    )
    admin = await control.bearer(control.admin_key)
    return old, (await control.credentials.RotateApiKey(request, metadata=admin)).secret


async def test_i2_what_is_read_is_what_the_models_say_of_the_keys_own_tenant(control: Control) -> None:
    await control.add_tenant("acme", "chat", "code")
    await control.add_tenant("bravo", "chat", "secret-project")
    await control.rotate_salt("acme")
    old, new = await add_rotated_key(control, "acme")
    bravo = await control.add_api_key(credentials_pb2.ROLE_READER, "bravo")
    lookups = {name: parse_api_key(key) for name, key in
               {"old": old, "new": new, "bravo": bravo, "admin": control.admin_key}.items()}  # fmt: skip
    wanted = [
        (lookups["old"], "chat"), (lookups["new"], "code"), (lookups["new"], "secret-project"),
        (lookups["bravo"], "chat"), (lookups["admin"], "chat"), ("0" * 16, "chat"),
    ]  # fmt: skip

    async with control.database.transaction() as session:
        known = await read_known(session, wanted)
        keys = {row.lookup: row for row in await session.scalars(select(models.ApiKey))}
        tenants = {row.id: row for row in await session.scalars(select(models.Tenant))}
        namespaces = {(row.tenant_id, row.id): row for row in await session.scalars(select(models.Namespace))}
        epochs = list(await session.scalars(select(models.SaltEpoch).order_by(models.SaltEpoch.epoch)))

    assert set(known.credentials) == set(lookups.values())
    for name, of_key in {"old": "new", "new": "new", "bravo": "bravo", "admin": "admin"}.items():
        credential = known.credentials[lookups[name]]
        assert credential.lookup == lookups[name]
        assert agrees(credential.key, keys[lookups[of_key]])
        assert credential.tenant_id is None or agrees(credential.tenant, tenants[credential.tenant_id])
    assert known.credentials[lookups["admin"]].tenant is None
    assert set(known.namespaces) == {("acme", "chat"), ("acme", "code"), ("bravo", "chat")}
    assert all(agrees(row, namespaces[name]) for name, row in known.namespaces.items())
    for tenant, salting in known.saltings.items():
        of_tenant = [row for row in epochs if row.tenant_id == tenant]
        assert len(salting.epochs) == len(of_tenant) == {"acme": 2, "bravo": 1}[tenant]
        assert all(agrees(row, model) for row, model in zip(salting.epochs, of_tenant, strict=True))


async def test_what_is_read_shows_no_secret(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    old, new = await add_rotated_key(control, "acme")
    async with control.database.transaction() as session:
        known = await read_known(session, [(parse_api_key(old), "chat"), (parse_api_key(new), "chat")])
    credential = known.credentials[parse_api_key(old)]
    shown = f"{known!r} {credential!r} {known.saltings['acme']!r}"
    for hidden in (credential.key.secret_sha256, known.saltings["acme"].epochs[0].wrapped_root_secret):
        assert repr(hidden) not in shown


async def test_the_nodes_that_are_read_are_those_of_the_registry(control: Control) -> None:
    node = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))
    for node_id in ("node-b", "node-a"):
        endpoint = auth_pb2.NodeEndpoint(wire_endpoint=f"{node_id}:7701", shm_path="/s", grpc_endpoint="g", host_id="h")
        await control.node.RegisterNode(node_pb2.RegisterNodeRequest(node_id=node_id, endpoint=endpoint), metadata=node)
    now = datetime.now(UTC)
    async with control.database.transaction() as session:
        (await session.get_one(models.Node, "node-b")).admin_state = models.NodeAdminState.CORDONED
        await session.flush()
        rows, known = await read_live_nodes(session, now), await live_nodes(session, now)
        assert [row.id for row in rows] == ["node-a", "node-b"]
        assert all(agrees(row, model) for row, model in zip(rows, known, strict=True))
        assert await read_live_nodes(session, now + timedelta(minutes=1)) == []


async def test_each_secret_of_a_key_has_its_own_last_use(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secrets = await add_rotated_key(control, "acme")
    old, new = map(parse_api_key, secrets)
    now = datetime.now(UTC)

    async def use(lookups: list[str], time: datetime) -> tuple[datetime | None, datetime | None]:
        """Of the old secret and of the new one, after the use of some."""
        async with control.database.transaction() as session:
            known = await read_known(session, [(lookup, "") for lookup in lookups])
            await note_uses(session, known.credentials.values(), time)
        async with control.database.transaction() as session:
            row = (await session.scalars(select(models.ApiKey).where(models.ApiKey.lookup == new))).one()
            return row.previous_last_used_time, row.last_used_time

    assert await use([old], now) == (now, None)
    later = now + timedelta(seconds=30)
    assert await use([old, new], later) == (now, later)
    latest = now + timedelta(seconds=61)
    assert await use([old, new], latest) == (latest, later)
