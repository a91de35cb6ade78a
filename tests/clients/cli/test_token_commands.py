"""What ends tokens, on the command line, against a real stack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from saltern.client import Client
from saltern.demo.stack import Stack
from saltern.results import Hit, Stored

Saltern = Callable[..., Any]


@pytest.fixture
def key_file(saltern: Saltern, tmp_path: Path) -> Iterator[Path]:
    """The key ``ci`` of a writer of the fresh tenant ``token-tenant``, which has the namespace chat."""
    assert saltern("tenant", "create", "token-tenant").code == 0
    assert saltern("quota", "set", "token-tenant", "--dram-limit", "1MiB").code == 0
    created = saltern(
        "namespace", "create", "token-tenant", "chat", "--model-fingerprint", "m", "--block-tokens", "16",
        "--block-bytes", "64KiB",
    )  # fmt: skip
    assert created.code == 0
    file = tmp_path / "ci.key"
    made = saltern(
        "key", "create", "ci", "--tenant", "token-tenant", "--role", "writer", "--save", str(file), "--wait"
    )  # the namespace is on the node by then
    assert made.code == 0
    yield file
    assert saltern("tenant", "delete", "token-tenant", "--yes").code == 0


def issue(saltern: Saltern, key_file: Path) -> str:
    return str(saltern("--api-key-file", str(key_file), "token", "issue", "--namespace", "chat", "--show").out.strip())


def test_tokens_end_by_id_by_file_by_key_and_all_at_once(saltern: Saltern, key_file: Path, tmp_path: Path) -> None:
    token = issue(saltern, key_file)
    token_id = jwt.decode(token, options={"verify_signature": False})["jti"]
    by_id = saltern("token", "revoke", token_id, "--tenant", "token-tenant", "--yes", "-o", "json").json
    assert by_id["tokenIdPrefix"] == token_id and "issuedBeforeTime" not in by_id

    leaked = tmp_path / "leaked.jwt"
    leaked.write_text(issue(saltern, key_file) + "\n")
    by_file = saltern("token", "revoke", "--token-file", str(leaked), "--tenant", "token-tenant", "--yes", "-o", "json")
    assert by_file.json["tokenIdPrefix"][:16] == token_id[:16]

    by_key = saltern("key", "revoke", "ci", "--tenant", "token-tenant", "--yes", "-o", "json").json
    assert by_key["tokenIdPrefix"] == token_id[:16] and by_key["issuedBeforeTime"]
    listed = saltern("token", "revocations", "--tenant", "token-tenant")
    assert token_id in listed.out and "an API key's tokens" in listed.out

    every = saltern("tenant", "revoke-tokens", "token-tenant", "--yes")
    assert (every.code, every.out) == (0, "ended every token of tenants/token-tenant\n")
    assert issue(saltern, key_file)
    assert saltern("tenant", "revoke-tokens", "token-tenant").code == 2, "nobody can be asked here, so nothing ends"


@pytest.mark.parametrize("content", ["", "x", "a.b.c", "e30.e30.e30", "e30.WzFd.e30", "e30.eyJqdGkiOiJzaG9ydCJ9.x"])
def test_a_file_without_a_token_is_refused_and_not_shown(saltern: Saltern, tmp_path: Path, content: str) -> None:
    file = tmp_path / "no.jwt"
    file.write_text(content)
    shown = saltern("token", "revoke", "--token-file", str(file), "--yes")
    assert shown.code == 2 and shown.err.startswith("error: the file ")
    assert len(content) < 2 or content not in shown.err


def test_what_to_end_is_named_once(saltern: Saltern) -> None:
    assert saltern("token", "revoke", "--yes").code == 2
    assert saltern("token", "revoke", "0" * 32, "--key", "ci", "--yes").code == 2
    assert saltern("token", "revoke", "--all", "--yes").code == 2, "of no tenant"
    assert saltern("token", "revoke", "not-an-id", "--yes").code == 2


def test_a_rotation_and_an_emergency(saltern: Saltern, stack: Stack, key_file: Path) -> None:
    with Client(control=stack.control, api_key=key_file.read_text().strip(), namespace="chat") as client:
        (name,) = client.block_keys([bytes(32)])
        assert isinstance(client.put_many([(name, b"payload")])[0], Stored)

        published = saltern("token", "rotate-signing-key", "-o", "json").json
        assert published["state"] == "STATE_PUBLISHED"
        refused = saltern("token", "rotate-signing-key")
        assert refused.code in (0, 5)  # until every node holds the first one, there is no second
        assert published["kid"] in saltern("token", "keys").out

        assert saltern("token", "rotate-signing-key", "--now").code == 2, "nobody can be asked here"
        emergency = saltern("token", "rotate-signing-key", "--now", "--yes", "-o", "json").json
        assert emergency["state"] == "STATE_SIGNING"
        (left,) = saltern("token", "keys", "-o", "json").json["signingKeys"]
        assert left["kid"] == emergency["kid"]
        deadline_s = time.monotonic() + 30
        # The node comes to know the new key, and the client gets a token of it.
        while not isinstance(client.get_many([name])[0], Hit):
            assert time.monotonic() < deadline_s
