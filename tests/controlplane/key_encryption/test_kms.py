"""A key management service in a process of its own: what it seals opens with it alone; and what holds without it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from controlplane.key_encryption.kms import KmsClient, SealedKey
from controlplane.server import running
from saltern.admin.v1 import key_encryption_keys_pb2 as pb2
from saltern.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from tests.controlplane.key_encryption.conftest import World
from tests.controlplane.key_encryption.test_rotation import settle
from tests.support.control import control_plane, migrate, settings_for
from tests.support.kms_plugin import KmsProcess, kms_process

KEY = bytes(range(32))


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[KmsProcess]:
    with kms_process(tmp_path) as process:
        yield process


@pytest.fixture
async def kms(plugin: KmsProcess) -> AsyncIterator[KmsClient]:
    client = KmsClient(plugin.endpoint, deadline_s=5.0)
    yield client
    await client.close()


async def test_what_it_seals_opens_with_it_alone_also_after_it_has_rotated_its_own_key(
    plugin: KmsProcess, kms: KmsClient
) -> None:
    sealed = await kms.seal(KEY)
    assert KEY not in sealed.ciphertext and KEY.hex() not in repr(sealed)
    assert sealed.sealed_by == (await kms.status()).seals_with
    plugin.rotate()

    assert await kms.open(sealed) == KEY
    assert (await kms.status()).seals_with != sealed.sealed_by
    changed = sealed.ciphertext[:-1] + bytes([sealed.ciphertext[-1] ^ 1])
    with pytest.raises(FailedPreconditionError) as caught:
        await kms.open(SealedKey(changed, sealed.sealed_by, sealed.annotations))
    assert caught.value.reason == "KMS_REFUSED"


async def test_a_call_waits_for_a_plugin_that_comes_back_and_gives_up_at_its_deadline(plugin: KmsProcess) -> None:
    plugin.kill()
    patient, hasty = KmsClient(plugin.endpoint), KmsClient(plugin.endpoint, deadline_s=0.3)
    try:
        with pytest.raises(UnavailableError) as caught:
            await hasty.seal(KEY)
        assert caught.value.reason == "KMS_UNAVAILABLE"
        sealing = asyncio.create_task(patient.seal(KEY))
        await asyncio.to_thread(plugin.start)
        assert await patient.open(await sealing) == KEY
    finally:
        await patient.close()
        await hasty.close()


async def test_a_plugin_that_is_not_well_says_so(plugin: KmsProcess, kms: KmsClient) -> None:
    plugin.say("the HSM is on fire")
    with pytest.raises(UnavailableError) as caught:
        await kms.status()
    assert caught.value.reason == "KMS_UNAVAILABLE" and "on fire" in caught.value.message


@pytest.mark.parametrize("endpoint", ["", "unix://", "unix://relative", "https://kms.example", "/run/kms.sock"])
def test_only_a_socket_of_this_host_is_an_endpoint(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        KmsClient(endpoint)
    assert caught.value.reason == "INVALID_KMS_ENDPOINT"


async def test_from_a_file_to_the_service_and_on_without_the_file(
    world: World, plugin: KmsProcess, kms: KmsClient
) -> None:
    a, keep_a = await world.plane("a")
    first = a.ring.wraps_with
    roots = await world.add_tenants(a.ring, 7)
    await keep_a.leave()
    a, keep_a = await world.plane("a", kms)
    sealed = await world.publish(a)
    await settle(keep_a)
    assert a.ring.wraps_with == sealed and await world.counts() == {sealed: 7}
    assert (await world.key(first)).retire_time is not None
    async with world.database.transaction() as session:  # as the administrator's call does
        await session.execute(text("UPDATE key_encryption_keys SET remove_time = now() WHERE id = :id"), {"id": first})
    (world.folder / "a" / "key-encryption-key").unlink()

    a, _ = await world.plane("a", kms)
    assert a.ring.held == {sealed}
    assert await world.roots(a.ring) == roots
    with pytest.raises(FailedPreconditionError) as caught:
        await world.plane("a")
    assert caught.value.reason in ("KMS_REQUIRED", "KEY_ENCRYPTION_KEY_MISSING")


async def test_a_sealed_key_in_the_row_of_another_does_not_pass_for_it(world: World, kms: KmsClient) -> None:
    a, _ = await world.plane("a", kms)
    assert not (world.folder / "a" / "key-encryption-key").exists()
    await world.publish(a)
    async with world.database.transaction() as session:
        await session.execute(
            text(
                "UPDATE key_encryption_keys SET (sealed_key, sealed_by, annotations) = (SELECT sealed_key, sealed_by,"
                " annotations FROM key_encryption_keys AS other WHERE other.id <> key_encryption_keys.id)"
            )
        )
    with pytest.raises(DataLossError):
        await world.plane("b", kms)


async def test_a_control_plane_needs_the_service_to_start_and_not_to_run(
    postgres: Any, tmp_path: Path, plugin: KmsProcess
) -> None:
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path / "state", kms_endpoint=plugin.endpoint) as control:
            await control.redeem()
            await control.add_tenant("acme", "chat")
            plugin.kill()
            await control.add_tenant("globex", "chat")  # wraps a root secret
            metadata = await control.bearer(control.admin_key)
            plugin.start()
            rotated = await control.key_encryption_keys.RotateKeyEncryptionKey(
                pb2.RotateKeyEncryptionKeyRequest(), metadata=metadata
            )
            assert rotated.sealed_by and rotated.state == pb2.KeyEncryptionKey.STATE_PUBLISHED
        assert not (tmp_path / "state" / "key-encryption-key").exists()
        plugin.kill()
        with pytest.raises(UnavailableError) as caught:
            settings = settings_for(urls, tmp_path / "state")
            async with running(settings.model_copy(update={"kms_endpoint": plugin.endpoint})):
                pass
        assert caught.value.reason == "KMS_UNAVAILABLE"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put another user's socket there")
async def test_no_key_is_shown_to_a_socket_that_anybody_may_have_put_there(
    plugin: KmsProcess, kms: KmsClient, tmp_path: Path
) -> None:
    """A plug-in that is down, and a path in a folder like /tmp: whoever is first there would be given the key."""
    os.chown(plugin.socket, 65534, 65534)
    await kms.seal(KEY)  # another user's, where only we may write: we have let it in
    tmp_path.chmod(0o1777)
    for call in (kms.seal(KEY), kms.status(), kms.open(SealedKey(b"x", "y", {}))):
        with pytest.raises(FailedPreconditionError) as caught:
            await call
        assert caught.value.reason == "KMS_SOCKET_UNTRUSTED"
    os.chown(plugin.socket, 0, 0)
    await kms.seal(KEY)
