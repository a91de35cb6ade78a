from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from controlplane.secrets import (
    LocalKeyEncryptionKey,
    WrapContext,
    load_key_encryption_key,
    root_secret_context,
    signing_key_context,
)
from controlplane.secrets.local_keys import FILE_NAME
from controlplane.secrets.wrapping import ENVIRONMENT_NAME
from saltern.errors import DataLossError, FailedPreconditionError

SECRET = bytes(range(32))
KEY = LocalKeyEncryptionKey(b"k" * 32)
CONTEXT = WrapContext("tenant-root-secret", "a", 1)


async def test_a_secret_opens_with_the_same_key_and_context() -> None:
    wrapped = await KEY.wrap(SECRET, CONTEXT)

    assert await KEY.unwrap(wrapped, CONTEXT) == SECRET
    assert SECRET not in wrapped
    assert await KEY.wrap(SECRET, CONTEXT) != wrapped


@pytest.mark.parametrize(
    "context",
    [
        WrapContext("tenant-root-secret", "b", 1),
        WrapContext("tenant-root-secret", "a", 2),
        WrapContext("token-signing-key", "a", 1),
    ],
)
async def test_i12_a_secret_moved_elsewhere_does_not_open(context: WrapContext) -> None:
    wrapped = await KEY.wrap(SECRET, CONTEXT)

    with pytest.raises(DataLossError):
        await KEY.unwrap(wrapped, context)


async def test_i12_root_secrets_belong_to_the_uid_and_the_epoch() -> None:
    uid = uuid4()
    wrapped = await KEY.wrap(SECRET, root_secret_context(uid, 1))

    for context in (root_secret_context(uuid4(), 1), root_secret_context(uid, 2), signing_key_context("kid")):
        with pytest.raises(DataLossError):
            await KEY.unwrap(wrapped, context)


async def test_a_wrong_key_is_named_as_such() -> None:
    wrapped = await KEY.wrap(SECRET, CONTEXT)
    other = LocalKeyEncryptionKey(b"o" * 32)

    with pytest.raises(FailedPreconditionError) as caught:
        await other.unwrap(wrapped, CONTEXT)

    assert caught.value.reason == "WRONG_KEY_ENCRYPTION_KEY"
    assert ENVIRONMENT_NAME in caught.value.hint
    assert (b"k" * 32).hex() not in str(caught.value)


async def test_i7_damage_is_found() -> None:
    wrapped = await KEY.wrap(SECRET, CONTEXT)

    for at in range(len(wrapped)):
        damaged = wrapped[:at] + bytes([wrapped[at] ^ 1]) + wrapped[at + 1 :]
        with pytest.raises((DataLossError, FailedPreconditionError)):
            await KEY.unwrap(damaged, CONTEXT)
    for length in range(len(wrapped)):
        with pytest.raises((DataLossError, FailedPreconditionError)):
            await KEY.unwrap(wrapped[:length], CONTEXT)


async def test_the_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    first = load_key_encryption_key(tmp_path / "state", environment={})
    second = load_key_encryption_key(tmp_path / "state", environment={})

    assert await second.unwrap(await first.wrap(SECRET, CONTEXT), CONTEXT) == SECRET
    path = tmp_path / "state" / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text().strip())) == 32
    assert [entry.name for entry in path.parent.iterdir()] == [FILE_NAME]
    assert path.read_text().strip() not in repr(first)


async def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    key = load_key_encryption_key(tmp_path, environment={ENVIRONMENT_NAME: (b"k" * 32).hex()})

    assert await key.unwrap(await KEY.wrap(SECRET, CONTEXT), CONTEXT) == SECRET
    assert not (tmp_path / FILE_NAME).exists()


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_key_encryption_key(tmp_path, environment={})
    (tmp_path / FILE_NAME).chmod(0o640)

    with pytest.raises(FailedPreconditionError) as caught:
        load_key_encryption_key(tmp_path, environment={})

    assert caught.value.reason == "KEY_ENCRYPTION_KEY_EXPOSED"


def test_a_missing_key_of_a_used_database_is_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        load_key_encryption_key(tmp_path, environment={}, create=False)

    assert caught.value.reason == "KEY_ENCRYPTION_KEY_MISSING"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33, "00" * 1000, "\0"])
def test_a_malformed_key_is_refused_without_repeating_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE_NAME
    path.touch(mode=0o600)
    path.write_text(text)

    for environment in ({ENVIRONMENT_NAME: text}, {}):
        with pytest.raises(FailedPreconditionError) as caught:
            load_key_encryption_key(tmp_path, environment=environment)
        assert caught.value.reason == "KEY_ENCRYPTION_KEY_MALFORMED"
