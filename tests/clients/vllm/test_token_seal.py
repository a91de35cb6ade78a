"""A sealed token is good for its own salt and key, and the key file is made once, whole and for its owner alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from saltern.errors import FailedPreconditionError, UnauthenticatedError
from saltern.grant import EpochSalt, Grant
from saltern.keys import SaltKey
from saltern.names import NamespaceId, TenantId
from saltern.vllm.cache_salts import cache_salts, media_id
from saltern.vllm.token_seal import TokenSeal

TOKEN = "eyJhbGciOiJFZERTQSJ9.claims.signature"


def test_i1_a_sealed_token_opens_for_its_own_salt_and_key_only() -> None:
    seal = TokenSeal(bytes(32))
    sealed = seal.seal(TOKEN, "salt-a")

    assert seal.open(sealed, "salt-a") == TOKEN
    assert TOKEN not in sealed and sealed != seal.seal(TOKEN, "salt-a") and "<secret>" in repr(seal)
    spoiled = sealed[:-2] + ("A" if sealed[-2] != "A" else "B") + sealed[-1]
    for opener, text, salt in (
        (seal, sealed, "salt-b"),
        (TokenSeal(bytes(31) + b"\1"), sealed, "salt-a"),
        (seal, spoiled, "salt-a"),
        (seal, sealed[:20], "salt-a"),
        (seal, TOKEN, "salt-a"),
        (seal, "sealed1.", "salt-a"),
        (seal, "sealed1.\u00fc", "salt-a"),
        (seal, "", "salt-a"),
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            opener.open(text, salt)
        assert caught.value.reason == "TOKEN_SEAL" and TOKEN not in repr(vars(caught.value))


def test_processes_that_start_together_have_one_key(tmp_path: Path) -> None:
    path = tmp_path / "seal-key"
    seals: list[TokenSeal] = []
    threads = [threading.Thread(target=lambda: seals.append(TokenSeal.from_file(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seals) == 8 and all(one.open(seals[0].seal(TOKEN, "s"), "s") == TOKEN for one in seals)
    assert path.stat().st_mode & 0o777 == 0o600 and [entry.name for entry in tmp_path.iterdir()] == ["seal-key"]


@pytest.mark.parametrize("content", [b"", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff" * 64])
def test_a_key_file_that_holds_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "seal-key"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(FailedPreconditionError, match="hexadecimal"):
        TokenSeal.from_file(path)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "seal-key"
    TokenSeal.from_file(path)
    path.chmod(0o640)
    with pytest.raises(FailedPreconditionError, match="read by others"):
        TokenSeal.from_file(path)


def test_i2_salts_of_vllms_cache_part_whatever_salt_keys_part() -> None:
    def grant(key: bytes, tenant: str = "acme", namespace: str = "chat", group: str = "") -> Grant:
        salts = (EpochSalt(1, SaltKey(b"o" * 32)), EpochSalt(2, SaltKey(key)))
        return Grant("t", 0.0, TenantId(tenant), NamespaceId(namespace), (), salts, 2, sharing_group_uid=group)

    one = cache_salts(grant(b"k" * 32))
    assert one == cache_salts(grant(b"k" * 32)) and len(set(one)) == 2
    others = [
        cache_salts(grant(b"l" * 32)),
        cache_salts(grant(b"k" * 32, tenant="acm", namespace="echat")),
        cache_salts(grant(b"k" * 32, namespace="code")),
        cache_salts(grant(b"k" * 32, group="uid")),
    ]
    assert len({one[-1], *(salts[-1] for salts in others)}) == 5
    # Members of a group share, whatever they are called.
    assert cache_salts(grant(b"k" * 32, group="uid")) == cache_salts(grant(b"k" * 32, tenant="blue", group="uid"))
    assert all(len(salt) == 43 and not set("@/\\\0") & set(salt) for salt in one)
    assert media_id(SaltKey(b"k" * 32), "cat") != media_id(SaltKey(b"l" * 32), "cat")
