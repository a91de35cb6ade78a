"""A rotation as an administrator sees it: through the service, and without a control plane."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from controlplane.clock import utc_now
from controlplane.db.models import KeyEncryptionKeyHolder
from controlplane.key_encryption.offline import rewrap
from saltern.admin.v1 import audit_pb2
from saltern.admin.v1 import key_encryption_keys_pb2 as pb2
from saltern.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from tests.support.control import Control, control_plane, migrate, refused, settings_for


async def list_keys(control: Control) -> Any:
    return await control.key_encryption_keys.ListKeyEncryptionKeys(
        pb2.ListKeyEncryptionKeysRequest(), metadata=await control.bearer(control.admin_key)
    )


async def rotate(control: Control) -> Any:
    return await control.key_encryption_keys.RotateKeyEncryptionKey(
        pb2.RotateKeyEncryptionKeyRequest(), metadata=await control.bearer(control.admin_key)
    )


async def remove(control: Control, key_id: str) -> Any:
    return await control.key_encryption_keys.RemoveKeyEncryptionKey(
        pb2.RemoveKeyEncryptionKeyRequest(id=key_id), metadata=await control.bearer(control.admin_key)
    )


def append_key(state_dir: Path, digit: str) -> None:
    with (state_dir / "key-encryption-key").open("a") as file:
        file.write(digit * 64 + "\n")


async def test_a_key_is_rotated_and_removed_only_when_nothing_is_under_it(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    (old,) = (await list_keys(control)).encryption_keys
    assert old.state == pb2.KeyEncryptionKey.STATE_CURRENT
    counts = {of_table.table: of_table.count for of_table in old.wrapped}
    assert counts == {"audit_checkpoint_keys": 1, "salt_epochs": 1, "signing_keys": 1}
    error = await refused(remove(control, old.id))
    assert isinstance(error, FailedPreconditionError) and error.reason == "KEY_IN_USE"
    assert (await refused(rotate(control))).reason == "NO_NEW_KEY"

    append_key(control.state_dir, "2")
    new = await rotate(control)
    keys = (await list_keys(control)).encryption_keys
    while keys[1].wrapped or keys[1].state != pb2.KeyEncryptionKey.STATE_RETIRED:
        await asyncio.sleep(0.05)
        keys = (await list_keys(control)).encryption_keys
    assert keys[0].id == new.id and sum(of_table.count for of_table in keys[0].wrapped) == 3
    removed = await remove(control, old.id)

    assert removed.state == pb2.KeyEncryptionKey.STATE_REMOVED and not removed.wrapped
    await control.add_tenant("globex", "chat")
    methods = [event.method.rpartition("/")[2] for event in await control.events()]
    assert [m for m in reversed(methods) if "Key" in m or "Secrets" in m] == [
        "RotateKeyEncryptionKey",
        "UseKeyEncryptionKey",
        "RetireKeyEncryptionKey",
        "RewrapSecrets",
        "RewrapSecrets",
        "RewrapSecrets",
        "RemoveKeyEncryptionKey",
    ]


async def test_a_retired_key_stays_while_a_secret_that_cannot_be_wrapped_anew_is_under_it(control: Control) -> None:
    """Whoever restores what was damaged needs the old key to open it."""
    damage = "wrapped_private_key = set_byte(wrapped_private_key, 30, get_byte(wrapped_private_key, 30) # 1)"
    (old,) = (await list_keys(control)).encryption_keys
    async with control.database.transaction() as session:
        await session.execute(text(f"UPDATE audit_checkpoint_keys SET {damage}"))
    append_key(control.state_dir, "2")
    await rotate(control)
    keys = (await list_keys(control)).encryption_keys
    while keys[1].state != pb2.KeyEncryptionKey.STATE_RETIRED or len(keys[1].wrapped) != 1:
        await asyncio.sleep(0.05)
        keys = (await list_keys(control)).encryption_keys
    error = await refused(remove(control, old.id))
    assert isinstance(error, FailedPreconditionError)
    assert (error.reason, error.metadata["count"]) == ("KEY_IN_USE", "1")


async def test_a_published_key_that_cannot_be_handed_out_is_taken_back_and_never_used_again(control: Control) -> None:
    append_key(control.state_dir, "2")
    # Another control plane that has not the new key, as it reported last.
    async with control.database.transaction() as session:
        (old,) = (await list_keys(control)).encryption_keys
        session.add(
            KeyEncryptionKeyHolder(instance=UUID(int=1), held=[old.id], wraps_with=old.id, report_time=utc_now())
        )
    new = await rotate(control)
    assert (await refused(rotate(control))).reason == "ROTATION_IN_PROGRESS"
    while (answer := await list_keys(control)).encryption_keys[0].missing_holders != 1:
        await asyncio.sleep(0.05)  # until the one that holds it has said so
    assert answer.holders == 2 and answer.encryption_keys[0].state == pb2.KeyEncryptionKey.STATE_PUBLISHED

    assert (await remove(control, new.id)).state == pb2.KeyEncryptionKey.STATE_REMOVED
    assert (await refused(rotate(control))).reason == "NO_NEW_KEY"


async def test_ids_are_checked(control: Control) -> None:
    assert isinstance(await refused(remove(control, "2" * 64)), InvalidArgumentError)
    assert isinstance(await refused(remove(control, "2" * 16)), NotFoundError)


async def test_a_rotation_without_a_control_plane_proves_its_end_by_a_count(postgres: Any, tmp_path: Path) -> None:
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat")
            (old,) = (await list_keys(control)).encryption_keys
            admin_key = control.admin_key
        append_key(tmp_path, "2")
        said: list[str] = []
        await rewrap(settings_for(urls, tmp_path), said.append, rotate=True)
        assert said[-2] == f"{old.id}: retired, 0 secrets under it; `saltern key-encryption-key remove {old.id}`"
        assert said[-1].endswith("current, 3 secrets under it")
        with pytest.raises(FailedPreconditionError) as caught:
            await rewrap(settings_for(urls, tmp_path), said.append, rotate=True)
        assert caught.value.reason == "NO_NEW_KEY"
        (tmp_path / "key-encryption-key").write_text("2" * 64)
        async with control_plane(urls, tmp_path) as control:
            control.admin_key = admin_key
            assert (await list_keys(control)).encryption_keys[0].state == pb2.KeyEncryptionKey.STATE_CURRENT


async def test_i11_the_checkpoint_key_is_rotated_online_and_the_old_public_key_stays(control: Control) -> None:
    metadata = await control.bearer(control.admin_key)
    new = await control.audit.RotateCheckpointKey(audit_pb2.RotateCheckpointKeyRequest(), metadata=metadata)

    listed = await control.audit.ListCheckpointKeys(audit_pb2.ListCheckpointKeysRequest(), metadata=metadata)
    old, newest = listed.checkpoint_keys
    assert newest.key_id == new.key_id and not newest.HasField("retire_time")
    assert old.retire_time == newest.create_time
    assert (await control.events())[0].resource == f"checkpointKeys/{new.key_id}"
