"""Checkpoints of real chains in a real database: signed when they move, never what was changed behind the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import URL, text
from structlog.testing import capture_logs

from controlplane.audit import record
from controlplane.audit.checkpoint_keys import CheckpointKey, CheckpointKeys, load_checkpoint_key, rotate_checkpoint_key
from controlplane.audit.checkpoint_sinks import FolderSink
from controlplane.audit.checkpoints import CheckpointWriter
from controlplane.db import Database, TenantScope, connect
from controlplane.secrets import LocalKeyEncryptionKey
from saltern.admin.v1 import audit_pb2
from saltern.audit.checkpoints import NO_DIGEST, Checkpoint, decode_checkpoint, is_authentic, key_id_of
from saltern.errors import FailedPreconditionError
from saltern.names import TenantId
from tests.support.admin import FakeClock
from tests.support.audit_chains import chain_of, store
from tests.support.control import Control, control_plane, migrate

KEK = LocalKeyEncryptionKey(bytes(32))
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = CheckpointKey(key_id_of(PRIVATE.public_key()), PRIVATE)
KEYS = {KEY.id: PRIVATE.public_key()}


async def fixed_key() -> CheckpointKey:
    return KEY


@dataclass
class World:
    """A database with chains, a folder, and writers for them."""

    database: Database
    owner: URL
    folder: Path
    clock: FakeClock = field(default_factory=FakeClock)

    def writer(self) -> CheckpointWriter:
        return CheckpointWriter(self.database, fixed_key, FolderSink(self.folder), self.clock)

    async def act(self, tenant: str, count: int = 1) -> None:
        for _ in range(count):
            async with self.database.transaction(TenantScope(TenantId(tenant))) as session:
                await record(session, tenant=TenantId(tenant), actor="a", method="S/M", resource="r", now=self.clock())

    def tamper(self, *statements: str) -> None:
        """As whoever owns the database, triggers and row-level security out of the way."""
        url = self.owner.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url) as connection:
            connection.execute("ALTER TABLE audit_events DISABLE TRIGGER ALL")
            connection.execute("SELECT set_config('saltern.tenant', '*', true)")
            for statement in statements:
                connection.execute(statement)
            connection.execute("ALTER TABLE audit_events ENABLE TRIGGER ALL")

    def checkpoints(self, chain: str) -> list[Checkpoint]:
        paths = sorted((self.folder / chain).glob("*.jsonl"))
        return [decode_checkpoint(line) for path in paths for line in path.read_bytes().splitlines() if line]


@pytest.fixture
async def world(postgres: Any, tmp_path: Path) -> AsyncIterator[World]:
    with postgres.fresh_database(migrate) as urls:
        database = connect(urls.app)
        yield World(database, urls.owner, tmp_path / "checkpoints")
        await database.close()


async def test_i11_a_chain_is_signed_when_it_has_moved_and_each_checkpoint_continues_the_one_before(
    world: World,
) -> None:
    writer = world.writer()
    await world.act("acme", 3)
    await world.act("globex")

    assert {one.chain: one.head.sequence for one in await writer.sign_moved()} == {"acme": 3, "globex": 1}
    assert await writer.sign_moved() == []
    await world.act("acme", 2)
    world.clock.now += timedelta(days=1)
    assert [one.head.sequence for one in await writer.sign_moved()] == [5]

    first, second = world.checkpoints("acme")
    assert first.previous == NO_DIGEST and second.previous == first.digest
    assert all(is_authentic(one, KEYS) for one in (first, second))
    assert len(list((world.folder / "acme").glob("*.jsonl"))) == 2, "one file for each day"
    # Another process, or another control plane on the same folder, goes on where this one was.
    other = world.writer()
    assert await other.sign_moved() == []
    await world.act("acme")
    assert [one.previous for one in await other.sign_moved()] == [second.digest]
    assert await writer.sign_moved() == []


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE audit_events SET actor = 'nobody' WHERE sequence = 5", "event 5 is edited"),
        ("DELETE FROM audit_events WHERE sequence = 5", "event 6 is missing"),
        ("DELETE FROM audit_events WHERE sequence > 2", "event 3, which was signed"),
        ("UPDATE audit_events SET hash = sha256('x') WHERE sequence = 3", "event 3, which was signed"),
        ("DELETE FROM audit_events", "not there any more"),
    ],
)
async def test_i11_what_was_changed_in_the_database_is_never_signed(world: World, statement: str, why: str) -> None:
    writer = world.writer()
    await world.act("acme", 3)
    await writer.sign_moved()
    await world.act("acme", 3)
    world.tamper(statement)

    with capture_logs() as logs:
        assert await writer.sign_moved() == []

    assert why in writer.broken["acme"]
    assert any(log["log_level"] == "error" and log.get("chain") == "acme" for log in logs)
    assert [one.head.sequence for one in world.checkpoints("acme")] == [3]


async def test_i11_a_chain_made_anew_is_not_signed_either(world: World) -> None:
    store(world.owner, chain_of(4))
    writer = world.writer()
    assert len(await writer.sign_moved()) == 1
    world.tamper("DELETE FROM audit_events WHERE chain = 'acme'")
    await world.act("acme", 5)

    assert await writer.sign_moved() == []
    assert await world.writer().sign_moved() == [], "a process that starts afterwards knows it from the folder"


async def test_i11_checkpoints_that_are_taken_away_while_it_runs_are_noticed(world: World) -> None:
    writer = world.writer()
    for _ in range(2):
        await world.act("acme")
        await writer.sign_moved()
    (path,) = (world.folder / "acme").glob("*.jsonl")
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    await world.act("acme")

    assert await writer.sign_moved() == []
    assert "not there any more" in writer.broken["acme"]


async def test_a_line_that_a_crash_cut_off_counts_for_nothing(world: World) -> None:
    await world.act("acme")
    (first,) = await world.writer().sign_moved()
    (path,) = (world.folder / "acme").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    await world.act("acme")

    (second,) = await world.writer().sign_moved()

    assert second.previous == first.digest
    assert decode_checkpoint(path.read_bytes().splitlines()[-1]) == second


async def test_a_folder_that_cannot_be_written_is_refused_at_the_start_and_survived_later(world: World) -> None:
    world.folder.write_text("a file")
    with pytest.raises(FailedPreconditionError) as caught:
        world.writer()
    assert caught.value.reason == "CHECKPOINT_DIR_UNUSABLE"
    world.folder.unlink()

    writer = world.writer()
    await world.act("acme")
    (world.folder / "acme").write_text("a file")
    with capture_logs() as logs:
        await writer.try_sign()
    assert [log["reason"] for log in logs] == ["CHECKPOINT_SINK_UNUSABLE"]
    assert (writer.failure, writer.failures) == ("CHECKPOINT_SINK_UNUSABLE", 1)
    (world.folder / "acme").unlink()
    assert len(await writer.sign_moved()) == 1


async def test_the_key_is_made_once_wrapped_and_opens_with_its_own_key_encryption_key_only(world: World) -> None:
    key = await load_checkpoint_key(world.database, KEK, world.clock)

    again = await load_checkpoint_key(world.database, KEK, world.clock)
    assert (again.id, again.private_key.private_bytes_raw()) == (key.id, key.private_key.private_bytes_raw())
    assert key.private_key.private_bytes_raw().hex() not in repr(key)
    async with world.database.transaction() as session:
        (row,) = (await session.execute(text("SELECT * FROM audit_checkpoint_keys"))).all()
    assert key.private_key.private_bytes_raw() not in bytes(row.wrapped_private_key)
    assert key_id_of(Ed25519PublicKey.from_public_bytes(bytes(row.public_key))) == row.id == key.id
    with pytest.raises(FailedPreconditionError):
        await load_checkpoint_key(world.database, LocalKeyEncryptionKey(bytes([1] * 32)), world.clock)


async def test_i11_a_control_plane_signs_its_last_acts_when_it_stops(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat")
            keys = await public_keys(control)
            sequence = len(await control.events("tenants/acme"))
        folder = tmp_path / "audit-checkpoints"
        newest = {
            path.parent.name: decode_checkpoint(path.read_bytes().splitlines()[-1]) for path in folder.glob("*/*.jsonl")
        }
    assert set(newest) == {"acme", "platform"}
    assert newest["acme"].head.sequence == sequence
    assert all(is_authentic(checkpoint, keys) for checkpoint in newest.values())


async def public_keys(control: Control) -> dict[str, Ed25519PublicKey]:
    response = await control.audit.ListCheckpointKeys(
        audit_pb2.ListCheckpointKeysRequest(), metadata=await control.bearer(control.admin_key)
    )
    return {key.key_id: Ed25519PublicKey.from_public_bytes(key.public_key) for key in response.checkpoint_keys}


async def test_i11_after_a_rotation_of_the_key_every_chain_is_signed_anew_and_goes_on(world: World) -> None:
    keys = CheckpointKeys(world.database, KEK, await load_checkpoint_key(world.database, KEK, world.clock))
    writer = CheckpointWriter(world.database, keys.current, FolderSink(world.folder), world.clock)
    await world.act("acme", 2)
    await world.act("globex")
    await writer.sign_moved()
    async with world.database.transaction() as session:
        row = await rotate_checkpoint_key(session, KEK, world.clock())
    await world.act("acme")

    signed = {one.chain: (one.head.sequence, one.key_id) for one in await writer.sign_moved()}
    assert signed == {"acme": (3, row.id), "globex": (1, row.id)}
    assert await writer.sign_moved() == []
    first, second = world.checkpoints("globex")
    assert second.previous == first.digest and first.key_id != second.key_id
    # Another control plane that has known the old key only, and one that starts.
    other = CheckpointWriter(world.database, keys.current, FolderSink(world.folder), world.clock)
    assert await other.sign_moved() == []
    assert (await load_checkpoint_key(world.database, KEK, world.clock)).id == row.id
