"""A rotation of the key-encryption key: two control planes, load, kill -9 at any moment; nothing lost, nothing left."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from controlplane.clock import utc_now
from controlplane.core.key_encryption import LOST_AFTER
from controlplane.db import models
from controlplane.key_encryption.keeper import KeyEncryptionKeeper
from controlplane.rpc import database_failure
from saltern.errors import FailedPreconditionError
from tests.controlplane.key_encryption.conftest import World


async def settle(*keepers: KeyEncryptionKeeper) -> None:
    """Let keepers take turns until none has anything to do."""
    quiet = 0
    while quiet < 4:
        batches = [await keeper.step() for keeper in keepers]
        quiet = quiet + 1 if not any(batches) else 0


async def test_a_rotation_goes_from_one_key_to_the_next_and_every_secret_stays_what_it_was(world: World) -> None:
    (a, keep_a), (b, keep_b) = await world.plane("a"), await world.plane("b")
    old = a.ring.wraps_with
    roots = await world.add_tenants(a.ring, 23)
    await settle(keep_a, keep_b)
    world.append_key("1", "a", "b")

    new = await world.publish(a)
    await settle(keep_a, keep_b)

    assert new != old and a.ring.wraps_with == b.ring.wraps_with == new
    assert await world.counts() == {new: 23}
    assert (await world.key(old)).retire_time is not None
    b.ring.forget(old)
    assert await world.roots(b.ring) == roots


async def test_nothing_is_wrapped_with_a_key_that_some_control_plane_does_not_hold(world: World) -> None:
    (a, keep_a), (b, keep_b) = await world.plane("a"), await world.plane("b")
    old = a.ring.wraps_with
    await settle(keep_a, keep_b)
    world.append_key("1", "a")
    new = await world.publish(a)
    await settle(keep_a, keep_b)
    assert (a.ring.wraps_with, b.ring.wraps_with) == (old, old), "b has not the new key"

    world.append_key("1", "b")  # without a restart
    await settle(keep_a, keep_b)

    assert (a.ring.wraps_with, b.ring.wraps_with) == (new, new)


async def test_i12_the_database_refuses_what_a_forgotten_control_plane_wraps_with_a_retired_key(world: World) -> None:
    (a, keep_a), (late, keep_late) = await world.plane("a"), await world.plane("b")
    old = late.ring.wraps_with
    await settle(keep_a, keep_late)
    async with world.database.transaction() as session:  # it hangs: it has not reported for so long
        gone = models.KeyEncryptionKeyHolder.instance == keep_late._instance
        past = {"report_time": utc_now() - LOST_AFTER - timedelta(seconds=1)}
        await session.execute(update(models.KeyEncryptionKeyHolder).where(gone).values(past))
    world.append_key("1", "a")
    await world.publish(a)
    await settle(keep_a)

    assert late.ring.wraps_with == old
    with pytest.raises(DBAPIError) as caught:
        await world.add_tenants(late.ring, 1)
    failure = database_failure(caught.value)
    assert failure is not None and failure.reason == "KEY_ENCRYPTION_KEY_RETIRED"
    assert old not in await world.counts()


async def test_an_insert_that_began_before_the_retirement_is_waited_for_and_wrapped_anew(world: World) -> None:
    a, keep_a = await world.plane("a")
    old = a.ring.wraps_with
    await settle(keep_a)
    world.append_key("1", "a")
    new = await world.publish(a)
    wrapped = await a.ring.wrap(b"s" * 32, _signing_context())
    async with world.database.transaction() as session:
        await session.execute(_insert_signing_key(), {"wrapped": wrapped})
        stepping = asyncio.create_task(settle(keep_a))
        while not await _waits_for_writers(world):
            await asyncio.sleep(0.005)
        assert (await world.key(old)).retire_time is None
    await stepping

    assert (await world.key(old)).retire_time is not None
    assert await world.counts() == {new: 1}


async def test_a_damaged_secret_stops_none_of_the_others_and_stays_counted(world: World) -> None:
    a, keep_a = await world.plane("a")
    old = a.ring.wraps_with
    await world.add_tenants(a.ring, 7)
    async with world.database.transaction() as session:
        damage = "wrapped_root_secret = set_byte(wrapped_root_secret, 30, get_byte(wrapped_root_secret, 30) # 1)"
        first = "tenant_id = (SELECT min(tenant_id) FROM salt_epochs)"
        await session.execute(text(f"UPDATE salt_epochs SET {damage} WHERE {first}"))
    world.append_key("1", "a")
    new = await world.publish(a)
    await settle(keep_a)

    assert await world.counts() == {new: 6, old: 1}


async def test_without_a_new_key_there_is_nothing_to_rotate_to(world: World) -> None:
    a, _ = await world.plane("a")
    with pytest.raises(FailedPreconditionError) as caught:
        await world.publish(a)
    assert caught.value.reason == "NO_NEW_KEY"


async def test_every_step_and_every_batch_is_an_event_of_the_platform(world: World) -> None:
    a, keep_a = await world.plane("a")
    await world.add_tenants(a.ring, 12)
    world.append_key("1", "a")
    await world.publish(a)
    await settle(keep_a)

    async with world.database.transaction() as session:
        rows = await session.execute(text("SELECT method, after FROM audit_events ORDER BY sequence"))
        events = [(row.method.rpartition("/")[2], row.after) for row in rows]
    assert [method for method, _ in events[:2]] == ["UseKeyEncryptionKey", "RetireKeyEncryptionKey"]
    batches = [after for method, after in events if method == "RewrapSecrets"]
    assert batches == [{"table": "salt_epochs", "rewrapped": count} for count in (5, 5, 2)]


async def test_i7_killed_at_any_moment_two_control_planes_finish_under_load(world: World) -> None:
    a, keep_a = await world.plane("a")
    await world.plane("b")
    old = a.ring.wraps_with
    roots = await world.add_tenants(a.ring, 30)
    await keep_a.step()
    await keep_a.leave()
    world.append_key("1", "a", "b")
    new = await world.publish(a)
    chance, kills = random.Random(7), 0

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.wrapping_process", str(world.folder / name), "3"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"SALTERN_DATABASE_URL": world.url})

    def run_and_kill(name: str, lines: int) -> None:
        with start(name) as process:
            assert process.stdout is not None
            for _ in range(lines):
                process.stdout.readline()
            process.kill()

    await _forget_holders(world)
    while (await world.counts()).get(old, 0) and kills < 40:
        # Whatever lines it prints, the kill comes somewhere in the middle of the next batch.
        killing = asyncio.gather(*(asyncio.to_thread(run_and_kill, name, chance.randint(2, 6)) for name in ("a", "b")))
        roots |= await world.add_tenants(await _ring_of(world), 2)
        await killing
        kills += 2
        opened = await world.roots(await _ring_of(world))
        assert opened == roots, "each secret opens, under the one key or the other"
        await _forget_holders(world)
    assert kills >= 4
    a, keep_a = await world.plane("a")
    await settle(keep_a)

    assert await world.counts() == {new: len(roots)}
    a.ring.forget(old)
    assert await world.roots(a.ring) == roots


async def _ring_of(world: World) -> Any:
    return (await world.plane("a"))[0].ring


async def _forget_holders(world: World) -> None:
    """As if half a minute had passed since the kill."""
    async with world.database.transaction() as session:
        await session.execute(text("DELETE FROM key_encryption_key_holders"))


async def _waits_for_writers(world: World) -> bool:
    """Whether a transaction waits for the lock that guards take."""
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 11 AND NOT granted"
    async with world.database.transaction() as session:
        return bool(await session.scalar(text(waiting)))


def _signing_context() -> Any:
    from controlplane.secrets import signing_key_context

    return signing_key_context("kid")


def _insert_signing_key() -> Any:
    return text(
        "INSERT INTO signing_keys (kid, wrapped_private_key, public_x, create_time)"
        " VALUES ('kid', :wrapped, 'x', now())"
    )
