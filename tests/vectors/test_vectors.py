"""The frozen vectors are what the code makes, and what a stranger makes of the specification alone.

The second half imports nothing of Saltern: it is written from proto/WIRE.md and from the formulas of section 5 of the
design (typed, length-prefixed frame; HMAC-SHA256; keyed BLAKE2b), as a client in another language would be.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

import pytest

from saltern import wire
from tests.vectors.vectors import FILES, FOLDER, render


def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


@pytest.mark.parametrize("name", sorted(FILES))
def test_frozen_vectors_are_what_the_code_makes(name: str) -> None:
    assert (FOLDER / name).read_text() == render(name)


def test_every_opcode_has_a_request_and_a_reply() -> None:
    opcodes = [bytes.fromhex(vector["header"])[5] for vector in load("wire_v1.json")["frames"]]
    for opcode in wire.Opcode:
        assert opcode in opcodes
        assert opcode | 0x80 in opcodes


def test_the_codec_reads_every_vector_back() -> None:
    for vector in load("wire_v1.json")["frames"]:
        header_bytes, body_bytes = bytes.fromhex(vector["header"]), bytes.fromhex(vector["body"])
        header = wire.decode_header(header_bytes)
        body = wire.decode_body(getattr(wire, vector["body_kind"]), body_bytes)
        assert wire.encode_body(body) == body_bytes
        assert header.payload_bytes == len(vector["payload"]) // 2
        if isinstance(body, wire.Put):
            wire.check_put(body, header.payload_bytes)
        if isinstance(body, wire.Get):
            wire.check_get(body, header.payload_bytes)


# ---- a stranger's reading ----------------------------------------------------------------------------------------


def test_a_stranger_makes_the_same_frames() -> None:
    for vector in load("frame.json"):
        parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in vector["parts"]]
        assert stranger_frame(parts).hex() == vector["frame"]


def stranger_frame(parts: list[Any]) -> bytes:
    out = b""
    for part in parts:
        if isinstance(part, str):
            kind, value = b"s", part.encode()
        elif isinstance(part, bytes):
            kind, value = b"b", part
        else:
            kind, value = b"i", struct.pack("<Q", part)
        out += kind + struct.pack("<Q", len(value)) + value
    return out


def test_a_stranger_derives_the_same_salt_keys() -> None:
    vectors = load("salt_key.json")
    for v in vectors:
        message = stranger_frame(["saltern/salt/1", v["tenant"], v["namespace"], v["scope"], v["scope_id"], v["epoch"]])
        assert hmac.new(bytes.fromhex(v["root"]), message, hashlib.sha256).hexdigest() == v["salt_key"]
    assert len({v["salt_key"] for v in vectors}) == len(vectors)


def test_a_stranger_narrows_to_the_same_salt_keys() -> None:
    """One name alone is the id of its scope; several are framed, each after its scope; the last one is the scope."""
    vectors = load("narrowing.json")
    for v in vectors:
        named = [(scope, v[scope]) for scope in ("project", "user", "session") if v[scope]]
        scope_id: Any = ""
        if len(named) == 1:
            scope_id = named[0][1]
        elif named:
            scope_id = stranger_frame([part for pair in named for part in pair])
        scope = named[-1][0] if named else v["widest"]
        assert (scope, scope_id) == (v["scope"], from_json(v["scope_id"]))
        message = stranger_frame(["saltern/salt/1", v["tenant"], v["namespace"], scope, scope_id, v["epoch"]])
        assert hmac.new(bytes.fromhex(v["root"]), message, hashlib.sha256).hexdigest() == v["salt_key"]
    whole = {(v["project"], v["user"], v["session"], v["scope"]) for v in vectors}
    assert len({v["salt_key"] for v in vectors}) == len(whole)


def from_json(part: Any) -> Any:
    return bytes.fromhex(part["hex"]) if isinstance(part, dict) else part


def test_a_stranger_derives_the_same_block_keys() -> None:
    vectors = load("block_key.json")
    for v in vectors:
        message = stranger_frame([bytes.fromhex(v["model_fingerprint"])]) + bytes.fromhex(v["block_hash"])
        key = hashlib.blake2b(message, key=bytes.fromhex(v["salt_key"]), digest_size=32).hexdigest()
        assert key == v["block_key"]
    assert len({v["block_key"] for v in vectors}) == len(vectors)


#: Keys and types of every body, copied by hand from sections 4 and 6 of WIRE.md.
DOCUMENTED: dict[tuple[str, int], dict[str, type | tuple[type, ...]]] = {
    ("request", 1): {"token": str, "namespace": str, "epoch": int, "client": str, "group": str},
    ("reply", 1): {
        "node": str, "host": str, "tenant": str, "namespace": str, "epoch": int, "expires_ms": int,
        "entry_max_bytes": int, "rdma": bool,
    },
    ("request", 2): {"token": str},
    ("reply", 2): {"expires_ms": int},
    ("request", 3): {"keys": bytes, "sizes": list, "sums": bytes, "region": (int, type(None)), "offsets": list},
    ("reply", 3): {"codes": bytes, "errors": list},
    ("request", 4): {"keys": bytes, "max_sizes": list, "region": (int, type(None)), "offsets": list},
    ("reply", 4): {"codes": bytes, "sizes": list, "sums": bytes},
    ("request", 5): {"keys": bytes},
    ("reply", 5): {"prefix": int, "found": bytes},
    ("request", 6): {"keys": bytes},
    ("reply", 6): {"deleted": int},
    ("request", 7): {"region": int, "region_bytes": int, "address": int, "key": int},
    ("reply", 7): {},
    ("request", 8): {"region": int},
    ("reply", 8): {},
    ("request", 9): {},
    ("reply", 9): {},
    ("request", 10): {"endpoint": bytes},
    ("reply", 10): {"endpoint": bytes},
}  # fmt: skip
DOCUMENTED_ERROR: dict[str, type | tuple[type, ...]] = {
    "reason": str, "message": str, "hint": str, "metadata": dict, "retry_after_ms": (int, type(None)), "code": int,
}  # fmt: skip


def test_a_stranger_reads_every_frame() -> None:
    for vector in load("wire_v1.json")["frames"]:
        header = bytes.fromhex(vector["header"])
        assert header[:5] == b"SLTN\x01"
        opcode, flags, request_id = header[5], *struct.unpack_from("<HQ", header, 6)
        body_bytes, status, payload_bytes = struct.unpack_from("<IIQ", header, 16)
        assert len(header) == 32
        assert (flags, len(vector["body"]) // 2, len(vector["payload"]) // 2) == (0, body_bytes, payload_bytes)
        assert request_id >= 1
        body, rest = read_msgpack(bytes.fromhex(vector["body"]))
        assert rest == b""
        if status:
            assert opcode & 0x80
            documented = DOCUMENTED_ERROR
            assert body["code"] == status
            assert {"reason", "message"} <= body.keys()
        else:
            documented = DOCUMENTED["reply" if opcode & 0x80 else "request", opcode & 0x7F]
        assert body.keys() <= documented.keys()
        for key, value in body.items():
            assert isinstance(value, documented[key]), (vector["name"], key)
        if opcode == 3:
            assert len(body["keys"]) == 32 * len(body["sizes"]) == 4 * len(body["sums"])
            assert payload_bytes == (sum(body["sizes"]) if body["region"] is None else 0)
        if opcode == 0x84 and not status and payload_bytes:
            assert payload_bytes == sum(body["sizes"])


def read_msgpack(data: bytes) -> tuple[Any, bytes]:
    """The part of MessagePack that the protocol needs: nil, bool, int, str, bin, array, map."""
    tag, data = data[0], data[1:]
    if tag <= 0x7F:
        return tag, data
    if tag >= 0xE0:
        return tag - 256, data
    if 0x80 <= tag <= 0x8F:
        return read_items(data, 2 * (tag & 0x0F), as_map=True)
    if 0x90 <= tag <= 0x9F:
        return read_items(data, tag & 0x0F, as_map=False)
    if 0xA0 <= tag <= 0xBF:
        return data[: tag & 0x1F].decode(), data[tag & 0x1F :]
    constants: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}
    if tag in constants:
        return constants[tag], data
    numbers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if tag in numbers:
        size = struct.calcsize(numbers[tag])
        return struct.unpack(numbers[tag], data[:size])[0], data[size:]
    lengths = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
    lengths |= {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
    size = struct.calcsize(lengths[tag])
    length, data = struct.unpack(lengths[tag], data[:size])[0], data[size:]
    if tag in (0xC4, 0xC5, 0xC6):
        return data[:length], data[length:]
    if tag in (0xD9, 0xDA, 0xDB):
        return data[:length].decode(), data[length:]
    if tag in (0xDC, 0xDD):
        return read_items(data, length, as_map=False)
    return read_items(data, 2 * length, as_map=True)


def read_items(data: bytes, count: int, *, as_map: bool) -> tuple[Any, bytes]:
    items = []
    for _ in range(count):
        item, data = read_msgpack(data)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if as_map else items), data
