"""Makes the frozen vectors: ``python -m tests.vectors.vectors`` writes them anew.

They change only with a new version of the protocol or of the key derivation: a client in another language, and every
entry that is stored, depends on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from saltern import wire
from saltern.errors import ProtocolError, ResourceExhaustedError, SalternError, UnauthenticatedError
from saltern.keys import BlockHash, BlockKeyDeriver, Narrowing, RootSecret, SaltKey, SaltScope, derive_salt_key, frame
from saltern.names import NamespaceId, TenantId

FOLDER = Path(__file__).parent
ROOT = RootSecret(bytes(range(32)))
SALT = SaltKey(bytes(range(32, 64)))
KEYS = bytes(range(96))
ENTRIES = [b"first entry", b"\x00" * 3, b"third"]
SUMS = wire.join_sums([wire.checksum(entry) for entry in ENTRIES])


def frame_vectors() -> list[dict[str, Any]]:
    """Part lists and their encodings; bytes are written as ``{"hex": ...}``."""
    cases: list[list[str | bytes | int]] = [
        [],
        [""],
        [b""],
        [0],
        ["a", "b"],
        ["ab"],
        ["a\0b"],
        ["a", b"b", 7],
        [2**64 - 1],
        ["é中\U0001f40e"],
        [b"\x00\xff" * 20, "saltern/salt/1", 1],
    ]
    return [
        {
            "parts": [{"hex": part.hex()} if isinstance(part, bytes) else part for part in case],
            "frame": frame(*case).hex(),
        }
        for case in cases
    ]


def salt_key_vectors() -> list[dict[str, Any]]:
    cases = [
        ("acme", "chat", SaltScope.TENANT, "", 1),
        ("acme", "chat", SaltScope.TENANT, "", 2),
        ("acme", "chat-2", SaltScope.TENANT, "", 1),
        ("beta", "chat", SaltScope.TENANT, "", 1),
        ("acme", "chat", SaltScope.NAMESPACE, "", 1),
        ("acme", "chat", SaltScope.PROJECT, "p-1", 1),
        ("acme", "chat", SaltScope.USER, "user@example.org", 1),
        ("acme", "chat", SaltScope.SESSION, "s-1", 1),
        ("acme", "chat", SaltScope.GROUP, "g-1", 2**64 - 1),
    ]
    return [
        {
            "root": ROOT.hex(),
            "tenant": tenant,
            "namespace": namespace,
            "scope": scope.value,
            "scope_id": scope_id,
            "epoch": epoch,
            "salt_key": derive_salt_key(
                ROOT,
                tenant=TenantId(tenant),
                namespace=NamespaceId(namespace),
                scope=scope,
                scope_id=scope_id,
                epoch=epoch,
            ).hex(),
        }
        for tenant, namespace, scope, scope_id, epoch in cases
    ]


def narrowing_vectors() -> list[dict[str, Any]]:
    """What is named, and the scope, its id (bytes as ``{"hex": ...}``) and the salt key that this comes to."""
    cases = [
        (SaltScope.TENANT, Narrowing()),
        (SaltScope.NAMESPACE, Narrowing()),
        (SaltScope.TENANT, Narrowing(project="p-1")),
        (SaltScope.PROJECT, Narrowing(project="p-1")),
        (SaltScope.TENANT, Narrowing(user="user@example.org")),
        (SaltScope.TENANT, Narrowing(session="s-1")),
        (SaltScope.TENANT, Narrowing(project="p-1", user="user@example.org")),
        (SaltScope.TENANT, Narrowing(project="p-1", session="s-1")),
        (SaltScope.TENANT, Narrowing(user="user@example.org", session="s-1")),
        (SaltScope.SESSION, Narrowing(project="p-1", user="user@example.org", session="s-1")),
        (SaltScope.TENANT, Narrowing(project="user", user="project")),
    ]
    vectors = []
    for widest, named in cases:
        scope, scope_id = named.of_scope(widest)
        salt_key = derive_salt_key(
            ROOT,
            tenant=TenantId("acme"),
            namespace=NamespaceId("chat"),
            scope=scope,
            scope_id=scope_id,
            epoch=3,
        )
        vectors.append(
            {
                "root": ROOT.hex(),
                "tenant": "acme",
                "namespace": "chat",
                "widest": widest.value,
                "project": named.project,
                "user": named.user,
                "session": named.session,
                "epoch": 3,
                "scope": scope.value,
                "scope_id": {"hex": scope_id.hex()} if isinstance(scope_id, bytes) else scope_id,
                "salt_key": salt_key.hex(),
            }
        )
    return vectors


def block_key_vectors() -> list[dict[str, Any]]:
    cases = [(b"", b"\x00"), (b"model", b"\x00"), (b"model", bytes(range(32))), (b"mode", b"l"), (b"model", b"x" * 64)]
    return [
        {
            "salt_key": SALT.hex(),
            "model_fingerprint": fingerprint.hex(),
            "block_hash": block_hash.hex(),
            "block_key": BlockKeyDeriver(SALT, fingerprint).derive(BlockHash(block_hash)).hex(),
        }
        for fingerprint, block_hash in cases
    ]


def wire_vectors() -> dict[str, Any]:
    """Every request and reply of version 1 as whole frames: header, body and payload in hex, and what they mean."""
    op = wire.Opcode
    requests: list[tuple[str, int, msgspec.Struct, bytes]] = [
        ("hello", op.HELLO, wire.Hello("header.claims.signature", "chat", 1, "a client"), b""),
        ("refresh", op.REFRESH, wire.Refresh("header.claims.signature"), b""),
        ("put inline", op.PUT, wire.Put(KEYS, [len(e) for e in ENTRIES], SUMS), b"".join(ENTRIES)),
        ("put regional", op.PUT, wire.Put(KEYS, [len(e) for e in ENTRIES], SUMS, 3, [0, 64, 2**40]), b""),
        ("get inline", op.GET, wire.Get(KEYS, [1, 1024, wire.ENTRY_MAX_BYTES]), b""),
        ("get regional", op.GET, wire.Get(KEYS, [1, 1024, 4096], 15, [0, 4096, 8192]), b""),
        ("lookup", op.LOOKUP, wire.Lookup(KEYS), b""),
        ("lookup of nothing", op.LOOKUP, wire.Lookup(b""), b""),
        ("delete", op.DELETE, wire.Delete(KEYS[:32]), b""),
        ("register", op.REGISTER, wire.Register(0, 64 * 1024 * 1024), b""),
        ("unregister", op.UNREGISTER, wire.Unregister(0), b""),
        ("ping", op.PING, wire.Empty(), b""),
        (
            "hello in a sharing group",
            op.HELLO,
            wire.Hello("header.claims.signature", "chat", 2, "a client", "3f0e6c1a-0000-4000-8000-000000000001"),
            b"",
        ),
        ("connect", op.CONNECT, wire.Connect(bytes(range(28))), b""),
        ("register rdma", op.REGISTER, wire.Register(1, 4096, 2**64 - 4096, 0xFFFF_FFFF), b""),
    ]
    full = ResourceExhaustedError(
        "tenant acme holds 100 of 100 bytes on dram",
        hint="raise the limit",
        metadata={"tenant": "acme", "tier": "dram", "used_bytes": "100", "limit_bytes": "100"},
        retry_after_ms=250,
    )
    replies: list[tuple[str, int, msgspec.Struct, bytes]] = [
        ("hello", op.HELLO, wire.HelloReply("node-1", "h0", "acme", "chat", 1, 1_800_000_000_000, 8_388_608), b""),
        ("refresh", op.REFRESH, wire.RefreshReply(1_800_000_600_000), b""),
        ("put", op.PUT, wire.PutReply(bytes([0, 6, 8]), [wire.PutError(2, wire.error_body(full))]), b""),
        ("get inline", op.GET, wire.GetReply(bytes([0, 5, 0]), [11, 0, 5], SUMS[:8] + bytes(8) + SUMS[16:]),
         ENTRIES[0] + ENTRIES[2]),
        ("get regional", op.GET, wire.GetReply(bytes([9, 15, 0]), [0, 0, 5], bytes(16) + SUMS[16:]), b""),
        ("lookup", op.LOOKUP, wire.LookupReply(1, bytes([1, 0, 1])), b""),
        ("delete", op.DELETE, wire.DeleteReply(1), b""),
        ("register", op.REGISTER, wire.Empty(), b""),
        ("unregister", op.UNREGISTER, wire.Empty(), b""),
        ("ping", op.PING, wire.Empty(), b""),
        ("connect", op.CONNECT, wire.ConnectReply(bytes(range(28, 56))), b""),
        ("hello with rdma", op.HELLO, wire.HelloReply("node-1", "h0", "acme", "chat", 1, 2**40, 8_388_608, rdma=True),
         b""),
    ]  # fmt: skip
    errors: list[tuple[str, int, SalternError]] = [
        ("unauthenticated", op.HELLO, UnauthenticatedError("the token expired 3 s ago", reason="TOKEN_EXPIRED")),
        ("protocol", op.PING, ProtocolError("unknown opcode 0x7f", reason="UNKNOWN_OPCODE", hint="see proto/WIRE.md")),
        ("exhausted", op.PUT, full),
    ]
    frames = [
        _vector(
            f"{name} request", wire.encode_request(opcode, id_, wire.encode_body(body), len(payload)), body, payload
        )
        for id_, (name, opcode, body, payload) in enumerate(requests, start=1)
    ]
    frames += [
        _vector(f"{name} reply", wire.encode_reply(opcode, id_, wire.encode_body(body), len(payload)), body, payload)
        for id_, (name, opcode, body, payload) in enumerate(replies, start=2**32)
    ]
    frames += [
        _vector(f"{name} error", wire.encode_error_reply(opcode, 2**64 - 1, error), wire.error_body(error), b"")
        for name, opcode, error in errors
    ]
    return {"version": wire.VERSION, "frames": frames}


def _vector(name: str, head: bytes, body: msgspec.Struct, payload: bytes) -> dict[str, Any]:
    return {
        "name": name,
        "header": head[: wire.HEADER_BYTES].hex(),
        "body": head[wire.HEADER_BYTES :].hex(),
        "payload": payload.hex(),
        "body_kind": type(body).__name__,
    }


FILES = {
    "frame.json": frame_vectors,
    "salt_key.json": salt_key_vectors,
    "narrowing.json": narrowing_vectors,
    "block_key.json": block_key_vectors,
    "wire_v1.json": wire_vectors,
}


def render(name: str) -> str:
    return json.dumps(FILES[name](), indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    for file_name in FILES:
        (FOLDER / file_name).write_text(render(file_name))
