"""Values of fields: those that a method may well accept, and those that nobody should send."""

from __future__ import annotations

import random
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

#: Nested messages are taken apart to this depth.
DEPTH_MAX = 3
TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "x" * 10_000,
    "ä" * 300,
    "e\u0301" * 70,  # combining
    "\u202eabc\u2066",  # right to left
    "שלום",
    "\U0001f512" * 20,
    "\ufffe\uffff",
    "\x1b[2J",
    "a\r\nb",
    "tenants/../tenants/a",
    "'; DROP TABLE tenants; --",
    "%s%n{0}${x}",
    "*",
    "NaN",
    "-1",
    "platform",
    "null",
    "sk-saltern-0123456789abcdef-" + "A" * 43,
)
KINDS = (
    "tenants/{t}",
    "tenants/{t}/namespaces/{n}",
    "tenants/{t}/quota",
    "tenants/{t}/saltPolicy",
    "tenants/{t}/sharingGroups/{g}",
    "tenants/{t}/apiKeys/{k}",
    "apiKeys/{k}",
    "nodes/{node}",
    "tenants/{t}/auditEvents/1",
)
#: What a service's ``name`` mostly is; any of ``KINDS`` for a service that is not listed.
_KIND_OF = {
    "TenantService": KINDS[0],
    "NamespaceService": KINDS[1],
    "QuotaService": KINDS[2],
    "SaltPolicyService": KINDS[3],
    "SharingGroupService": KINDS[4],
    "CredentialService": KINDS[5],
    "NodesService": KINDS[7],
    "TokenService": KINDS[0],
}
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_WHOLE = (0, 1, -1, 2, 7, 64, 255, 1001, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)
_TIMES = (
    (0, 0), (1, 0), (-1, 0), (2_000_000_000, 5), (253_402_300_799, 999_999_999), (253_402_300_800, 0),
    (-62_135_596_800, 0), (2**63 - 1, 2**31 - 1), (-(2**63), -(2**31)), (1_700_000_000, -1), (1_700_000_000, 10**9),
    (3600, 0), (86_400 * 30, 0), (10**12, 0),
)  # fmt: skip
_MASKS: tuple[tuple[str, ...], ...] = (
    (), ("",), ("*",), ("name",), ("name", "name"), ("no_such_field",), ("a.b.c.d",), ("..",), ("scope", "etag"),
    ("tier_limits",), ("rotation_period", "grace_period"), ("\0",), ("x" * 5000,), tuple(f"f{n}" for n in range(500)),
)  # fmt: skip
_BYTES = (b"", b"\0", bytes(31), bytes(32), bytes(33), b"\xff" * 32, bytes(10_000))
_MANY = (1, 2, 65, 5000)


@dataclass
class Names:
    """Where names are taken from.

    Attributes:
        tenants: those that a caller names, with weights; ``quiet`` where the method changes something.
        foreign: resource names of another tenant.
        api_keys: secrets that an exchange may be asked with.
        page_tokens, etags, request_ids: what answers have brought, to be sent back, altered, and to the wrong method.
    """

    tenants: Sequence[str]
    foreign: Sequence[str]
    api_keys: Sequence[str]
    page_tokens: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    etags: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    request_ids: deque[str] = field(default_factory=lambda: deque(maxlen=64))

    def resource(self, kind: str, rng: random.Random) -> str:
        return kind.format(
            t=rng.choice(self.tenants),
            n=rng.choice(("chat", "code", "chat-2")),
            g=rng.choice(("research", "group-2")),
            k=rng.choice(("key-1", "key-2", "key-3")),
            node=rng.choice(("ghost-1", "ghost-2")),
        )


def sensible(message: Message, service: str, names: Names, rng: random.Random, depth: int = 0) -> Message:
    """Fill ``message`` with values that its method may well accept."""
    for wanted in message.DESCRIPTOR.fields:
        if rng.random() < 0.15:
            continue  # unset
        _set(message, wanted, lambda wanted=wanted: _sensible_value(wanted, service, names, rng, depth), rng)
    return message


def _set(message: Message, wanted: FieldDescriptor, make: Any, rng: random.Random) -> None:
    value = make()
    if value is None:
        return
    if is_map(wanted):
        target = getattr(message, wanted.name)
        for name, entry in value.items():
            target[name] = entry
    elif wanted.is_repeated:
        elements = [value, *(made for _ in range(rng.randint(0, 2)) if (made := make()) is not None)]
        if wanted.message_type is not None:
            for element in elements:
                getattr(message, wanted.name).add().CopyFrom(element)
        else:
            getattr(message, wanted.name).extend(elements)
    elif wanted.message_type is not None:
        getattr(message, wanted.name).CopyFrom(value)
    else:
        setattr(message, wanted.name, value)


def _sensible_value(wanted: FieldDescriptor, service: str, names: Names, rng: random.Random, depth: int) -> Any:
    if is_map(wanted):
        return {"own-limit": 1}
    if wanted.message_type is not None:
        return _sensible_message(wanted.message_type, service, names, rng, depth)
    match wanted.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if wanted.type == FieldDescriptor.TYPE_BYTES:
            return bytes(31) + bytes([rng.randint(0, 3)]) if "key" in wanted.name else b"payload"
        case FieldDescriptor.CPPTYPE_STRING:
            return _sensible_text(wanted, service, names, rng)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([value.number for value in wanted.enum_type.values])
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return 1.5
    if wanted.name == "epoch":
        return rng.choice((1, 1, 1, 0, 2))
    if wanted.name in {"page_size", "fencing_epoch", "version"}:
        return rng.randint(0, 3)
    return rng.choice((1, 16, 100, 65536, 2**20))


def _sensible_message(descriptor: Descriptor, service: str, names: Names, rng: random.Random, depth: int) -> Any:
    made = _new(descriptor)
    match descriptor.full_name:
        case "google.protobuf.Timestamp":
            made.seconds = rng.choice((1_700_000_000, 2_000_000_000, 4_000_000_000))
        case "google.protobuf.Duration":
            made.seconds = rng.choice((0, 1, 3600, 86_400))
        case "google.protobuf.FieldMask":
            made.paths.extend(rng.choice(_MASKS[3:]))
        case _ if depth < DEPTH_MAX:
            sensible(made, service, names, rng, depth + 1)
    return made


def _sensible_text(wanted: FieldDescriptor, service: str, names: Names, rng: random.Random) -> str:
    match wanted.name:
        case "name":
            kind = _KIND_OF.get(service.rpartition(".")[2])
            return names.resource(kind if kind and rng.random() < 0.8 else rng.choice(KINDS), rng)
        case "parent" | "tenant":
            return "" if rng.random() < 0.2 else names.resource(KINDS[0], rng)
        case "namespace" | "member":
            return names.resource(KINDS[1], rng)
        case "sharing_group":
            return names.resource(KINDS[4], rng)
        case "request_id":
            return _request_id(names, rng)
        case "page_token":
            return rng.choice(names.page_tokens) if names.page_tokens and rng.random() < 0.5 else ""
        case "etag":
            return rng.choice(names.etags) if names.etags and rng.random() < 0.5 else ""
        case "api_key":
            return rng.choice(names.api_keys)
        case "tenant_id":
            return rng.choice(names.tenants)
        case "namespace_id":
            return rng.choice(("chat", "chat", "chat", "code"))
        case "node_id":
            return rng.choice(("ghost-1", "ghost-2"))
        case "wire_endpoint" | "grpc_endpoint":
            return "127.0.0.1:7701"
        case "counters_id":
            return f"{rng.randint(1, 3):032x}"
        case "tenant_uid" | "uid":
            return str(uuid.UUID(int=rng.randint(1, 3)))
        case "model_fingerprint":
            return "model bf16"
        case "token_id":
            return f"{rng.randint(0, 9):032x}"
        case "group_uid":
            return ""
    if wanted.name.endswith("_id"):
        return rng.choice(("key-1", "research", "p1"))
    return rng.choice(("text", "", "two words"))


def _request_id(names: Names, rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.3:
        return ""
    if chance < 0.5 and names.request_ids:
        return rng.choice(names.request_ids)  # of another request
    fresh = str(uuid.UUID(int=rng.getrandbits(128), version=4))
    names.request_ids.append(fresh)
    return fresh


@dataclass(frozen=True)
class Target:
    """A field of a request, at any depth. ``path``: names of fields from the request down."""

    path: tuple[str, ...]
    field: FieldDescriptor


def targets(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[Target]:
    """Every field of a message and of the messages in it."""
    for wanted in descriptor.fields:
        here = (*path, wanted.name)
        yield Target(here, wanted)
        inner = wanted.message_type
        if inner is not None and not is_map(wanted) and not _is_well_known(inner) and len(here) < DEPTH_MAX:
            yield from targets(inner, here)


def hostile_count(target: Target) -> int:
    """How many hostile values a field has; they are numbered from 0."""
    many = len(_MANY) + 1 if target.field.is_repeated and not is_map(target.field) else 0
    return 1 + len(_values(target.field)) + many


def make_hostile(request: Message, target: Target, number: int, names: Names, rng: random.Random) -> None:
    """Give the field its hostile value ``number``; 0 leaves it unset."""
    message = request
    for name in target.path[:-1]:
        inner = getattr(message, name)
        descriptor = message.DESCRIPTOR.fields_by_name[name]
        message = (inner[0] if len(inner) else inner.add()) if descriptor.is_repeated else inner
        if not descriptor.is_repeated:
            message.SetInParent()
    wanted = target.field
    values = _values(wanted)
    message.ClearField(wanted.name)
    if number == 0:
        return
    if is_map(wanted):
        _fill_map(getattr(message, wanted.name), wanted, number)
    elif not wanted.is_repeated:
        _assign(message, wanted, values[number - 1], names, rng)
    elif number <= len(values):
        _append(message, wanted, [values[number - 1]], names, rng)
    elif number - len(values) <= len(_MANY):
        many = _MANY[number - len(values) - 1]
        _append(message, wanted, [rng.choice(values) if many < 100 else values[0]] * many, names, rng)
    else:
        _append(message, wanted, list(values)[:60], names, rng)


def _values(wanted: FieldDescriptor) -> Sequence[Any]:
    if is_map(wanted):
        return range(6)
    if wanted.message_type is not None:
        match wanted.message_type.full_name:
            case "google.protobuf.Timestamp" | "google.protobuf.Duration":
                return _TIMES
            case "google.protobuf.FieldMask":
                return _MASKS
        return ("empty",)
    match wanted.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if wanted.type == FieldDescriptor.TYPE_BYTES:
            return _BYTES
        case FieldDescriptor.CPPTYPE_STRING:
            return (*TEXTS, *(_Named(kind) for kind in _Named.KINDS))
        case FieldDescriptor.CPPTYPE_BOOL:
            return (False, True)
        case FieldDescriptor.CPPTYPE_ENUM:
            return (*(value.number for value in wanted.enum_type.values), 99, -1, 2**31 - 1, -(2**31))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return _FLOATS
    low, high = _INTEGERS[wanted.cpp_type]
    return [number for number in _WHOLE if low <= number <= high]


@dataclass(frozen=True)
class _Named:
    """A text that depends on who calls and on what was answered before."""

    kind: str
    KINDS = (
        "foreign",
        "foreign-2",
        "foreign-3",
        "wrong-kind",
        "page-token",
        "page-token-bit",
        "etag-bit",
        "request-id",
    )

    def text(self, names: Names, rng: random.Random) -> str:
        match self.kind:
            case "wrong-kind":
                return names.resource(rng.choice(KINDS), rng)
            case "page-token":
                return rng.choice(names.page_tokens) if names.page_tokens else "x"
            case "page-token-bit":
                return _altered(rng.choice(names.page_tokens) if names.page_tokens else "WzEsIm", rng)
            case "etag-bit":
                return _altered(rng.choice(names.etags) if names.etags else "0123456789abcdef0123", rng)
            case "request-id":
                return rng.choice(names.request_ids) if names.request_ids else "0"
        return rng.choice(names.foreign)


def _altered(text: str, rng: random.Random) -> str:
    """``text`` with one bit of one character changed."""
    if not text:
        return "A"
    at = rng.randrange(len(text))
    return text[:at] + chr(ord(text[at]) ^ (1 << rng.randrange(6))) + text[at + 1 :]


def _assign(message: Message, wanted: FieldDescriptor, value: Any, names: Names, rng: random.Random) -> None:
    if wanted.message_type is not None:
        inner = getattr(message, wanted.name)
        inner.SetInParent()
        _fill(inner, value)
    else:
        setattr(message, wanted.name, value.text(names, rng) if isinstance(value, _Named) else value)


def _append(message: Message, wanted: FieldDescriptor, values: Sequence[Any], names: Names, rng: random.Random) -> None:
    target = getattr(message, wanted.name)
    for value in values:
        if wanted.message_type is not None:
            _fill(target.add(), value)
        else:
            target.append(value.text(names, rng) if isinstance(value, _Named) else value)


def _fill(inner: Any, value: Any) -> None:
    match inner.DESCRIPTOR.full_name:
        case "google.protobuf.Timestamp" | "google.protobuf.Duration":
            inner.seconds, inner.nanos = value
        case "google.protobuf.FieldMask":
            inner.paths.extend(value)


def _fill_map(target: Any, wanted: FieldDescriptor, number: int) -> None:
    keyed, valued = (wanted.message_type.fields_by_name[name] for name in ("key", "value"))
    keys = {1: [""], 2: ["a\0b"], 3: ["x" * 5000], 4: [f"name-{n}" for n in range(200)], 5: ["own-limit"], 6: ["ä"]}
    for key in keys[number]:
        name = key if keyed.cpp_type == FieldDescriptor.CPPTYPE_STRING else number
        if valued.message_type is None:
            target[name] = _values(valued)[-1] if valued.cpp_type in _INTEGERS else _values(valued)[0]
        else:
            target[name].SetInParent()


def is_map(wanted: FieldDescriptor) -> bool:
    return wanted.message_type is not None and wanted.message_type.GetOptions().map_entry


def _is_well_known(descriptor: Descriptor) -> bool:
    return descriptor.full_name.startswith("google.protobuf.")


def _new(descriptor: Descriptor) -> Any:
    return GetMessageClass(descriptor)()
