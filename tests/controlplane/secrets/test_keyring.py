"""Several key-encryption keys: each opens what it wrapped, the current one wraps, and files hold them in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.secrets import Keyring, LocalKeyEncryptionKey, WrapContext
from controlplane.secrets.local_keys import FILE_NAME, load_local_keys
from controlplane.secrets.wrapping import ENVIRONMENT_NAME, key_id_of
from saltern.errors import DataLossError, FailedPreconditionError

OLD, NEW = LocalKeyEncryptionKey(b"o" * 32), LocalKeyEncryptionKey(b"n" * 32)
CONTEXT = WrapContext("test", "owner")
SECRET = b"s" * 32


async def test_it_wraps_with_the_current_key_and_unwraps_with_whichever_it_was() -> None:
    ring = Keyring([OLD, NEW], OLD.key_id)
    before = await ring.wrap(SECRET, CONTEXT)
    ring.use(NEW.key_id)
    after = await ring.wrap(SECRET, CONTEXT)

    assert (key_id_of(before, CONTEXT), key_id_of(after, CONTEXT)) == (OLD.key_id, NEW.key_id)
    assert await ring.unwrap(before, CONTEXT) == await ring.unwrap(after, CONTEXT) == SECRET
    assert (b"o" * 32).hex() not in repr(ring)


async def test_a_key_that_is_not_there_is_named_and_the_current_one_is_never_forgotten() -> None:
    ring = Keyring([OLD, NEW], NEW.key_id)
    wrapped = await OLD.wrap(SECRET, CONTEXT)
    ring.forget(OLD.key_id)
    ring.forget(NEW.key_id)

    with pytest.raises(FailedPreconditionError) as caught:
        await ring.unwrap(wrapped, CONTEXT)
    assert caught.value.reason == "WRONG_KEY_ENCRYPTION_KEY"
    assert OLD.key_id in caught.value.message and NEW.key_id in caught.value.message
    assert ring.held == {NEW.key_id}
    with pytest.raises(FailedPreconditionError):
        ring.use(OLD.key_id)
    with pytest.raises(DataLossError):
        await ring.unwrap(b"short", CONTEXT)


def test_a_file_holds_a_key_in_each_line_the_newest_last(tmp_path: Path) -> None:
    load_local_keys(tmp_path, environment={})
    path = tmp_path / FILE_NAME
    (first,) = load_local_keys(tmp_path, environment={}, create=False)
    with path.open("a") as file:
        file.write("\n# of May\n" + (b"n" * 32).hex() + "  # appended\n")

    assert [key.key_id for key in load_local_keys(tmp_path, environment={})] == [first.key_id, NEW.key_id]


@pytest.mark.parametrize("between", [" ", ",", "\n", ", "])
def test_the_environment_holds_several_too_and_one_twice_is_one(tmp_path: Path, between: str) -> None:
    text = between.join([(b"o" * 32).hex(), (b"n" * 32).hex(), (b"o" * 32).hex()])
    keys = load_local_keys(tmp_path, environment={ENVIRONMENT_NAME: text})
    assert [key.key_id for key in keys] == [OLD.key_id, NEW.key_id]


@pytest.mark.parametrize("text", ["", " ", "# only words", "zz", (b"o" * 31).hex(), (b"o" * 32).hex() + " 12"])
def test_what_is_no_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(FailedPreconditionError) as caught:
        load_local_keys(tmp_path, environment={})
    assert caught.value.reason == "KEY_ENCRYPTION_KEY_MALFORMED"
    assert (b"o" * 31).hex() not in str(caught.value)
