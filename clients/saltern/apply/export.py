"""A world as documents of ``saltern/v1``, and documents as YAML: what :mod:`.schema` reads back as the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from saltern.apply.resources import TIERS, Kind, Resource, Value, World
from saltern.apply.schema import API_VERSION, KIND_LIST, KIND_TENANT, NEVER
from saltern.apply.units import format_duration, format_exact_size, format_time
from saltern.names import TenantId, parse_namespace_name, parse_sharing_group_name

Document: TypeAlias = Mapping[str, object]
#: Text that no YAML reader takes for anything else; all other text is quoted.
_PLAIN: Final = re.compile(
    r"[a-z][a-z0-9-]*|[0-9]+(?:B|[KMGTP]iB)?|[0-9]+[smhd]|saltern/v1|Tenant|displayName", re.ASCII
)
_SPECIAL: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def to_documents(world: World) -> list[Document]:
    """One document for each tenant, in the order of their names; no secret is in any, nor anything to make one of."""
    by_tenant: dict[TenantId, list[Resource]] = {}
    for resource in world.resources.values():
        by_tenant.setdefault(resource.tenant, []).append(resource)
    owners = (tenant for tenant, resources in by_tenant.items() if any(one.kind is Kind.TENANT for one in resources))
    return [_document(tenant, by_tenant[tenant]) for tenant in sorted(owners)]


def to_list(documents: Sequence[Document]) -> Document:
    """All documents as one, for programs."""
    return {"apiVersion": API_VERSION, "kind": KIND_LIST, "items": list(documents)}


def to_yaml(documents: Iterable[Document]) -> str:
    """The documents as YAML, one after the other."""
    return "".join(f"---\n{''.join(_lines(document, 0))}" for document in documents)


def _document(tenant: TenantId, resources: Sequence[Resource]) -> Document:
    def each(kind: Kind) -> Iterator[Resource]:
        return (resource for resource in sorted(resources, key=lambda one: one.name) if resource.kind is kind)

    document: dict[str, object] = {"apiVersion": API_VERSION, "kind": KIND_TENANT, "name": tenant}
    for resource in each(Kind.TENANT):
        document["displayName"] = str(resource.fields["display_name"])
    for resource in each(Kind.STATE):
        document["state"] = resource.fields["state"]
    tiers = {str(resource.fields["tier"]): resource.fields for resource in each(Kind.QUOTA)}
    if tiers:
        document["quota"] = {tier: _tier(tiers[tier]) for tier in TIERS if tier in tiers}
    for resource in each(Kind.RATES):
        document["rates"] = {
            "operationsPerSecond": resource.fields["operations_per_s"],
            "bytesPerSecond": _size(resource.fields["bytes_per_s"]),
            "ssdWriteBytesPerSecond": _size(resource.fields["ssd_write_bytes_per_s"]),
        }
    for resource in each(Kind.SALT):
        document["salt"] = {
            "scope": resource.fields["scope"],
            "rotateEvery": _duration(resource.fields["rotation_period_s"]),
            "grace": _duration(resource.fields["grace_period_s"]),
        }
    document["namespaces"] = [_namespace(resource) for resource in each(Kind.NAMESPACE)]
    document["keys"] = [_key(resource) for resource in each(Kind.KEY)]
    document["sharing"] = _sharing(list(each(Kind.GROUP)), list(each(Kind.INVITATION)), list(each(Kind.MEMBERSHIP)))
    return document


def _tier(fields: Mapping[str, Value]) -> Document:
    return {
        "reserved": _size(fields["reserved_bytes"]),
        "limit": _size(fields["limit_bytes"]),
        "weight": fields["weight"],
    }


def _namespace(resource: Resource) -> Document:
    fields = resource.fields
    return {
        "name": _last(resource.name),
        "modelFingerprint": str(fields["model_fingerprint"]),
        "blockTokens": fields["block_tokens"],
        "blockBytes": _size(fields["block_bytes"]),
        "limits": {tier: _size(fields[f"{tier}_limit_bytes"]) for tier in TIERS},
    }


def _key(resource: Resource) -> Document:
    fields = resource.fields
    expires = fields["expire_time_s"]
    bound = {name: str(fields[name]) for name in ("project", "user") if fields[name]}
    return {
        "name": _last(resource.name),
        "role": fields["role"],
        "displayName": str(fields["display_name"]),
        "expires": NEVER if expires is None else format_time(int(expires)),
        **bound,
    }


def _sharing(groups: Sequence[Resource], invitations: Sequence[Resource], memberships: Sequence[Resource]) -> Document:
    first_members = {group.name: group.fields["namespace"] for group in groups}
    written = [
        {
            "name": _last(group.name),
            "namespace": _last(str(group.fields["namespace"])),
            "invite": [
                "/".join(parse_namespace_name(str(one.fields["namespace"])))
                for one in invitations
                if one.parent == group.name and one.fields["namespace"] != group.fields["namespace"]
            ],
        }
        for group in groups
    ]
    accepts = [
        {
            "group": "/".join(parse_sharing_group_name(str(one.fields["group"]))),
            "namespace": _last(str(one.fields["namespace"])),
        }
        for one in memberships
        if first_members.get(str(one.fields["group"])) != one.fields["namespace"]
    ]
    return {"groups": written, "accepts": accepts}


def _size(value: Value) -> object:
    """A size that reads back as the same bytes; plain numbers stay numbers."""
    if not isinstance(value, int):
        return "none"
    text = format_exact_size(value)
    return value if text.isdigit() else text


def _duration(value: Value) -> object:
    return format_duration(value if isinstance(value, int) else 0)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _lines(value: object, indent: int) -> Iterator[str]:
    """A mapping or a list of mappings as block style; what is empty or flat in one line."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _entry(f"{pad}{name}:", one, indent + 1)
    else:
        assert isinstance(value, Sequence)
        for one in value:
            if isinstance(one, Mapping):
                first, *rest = _lines(one, indent + 1)
                yield f"{pad}- {first.lstrip()}"
                yield from rest
            else:
                yield f"{pad}- {_scalar(one)}\n"


def _entry(head: str, value: object, indent: int) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        if not value:
            yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}\n"
        else:
            yield f"{head}\n"
            yield from _lines(value, indent)
    else:
        yield f"{head} {_scalar(value)}\n"


def _scalar(value: object) -> str:
    text = str(value)
    if isinstance(value, int) or (_PLAIN.fullmatch(text) and text not in _SPECIAL):
        return text
    escaped = "".join(_escaped(char) for char in text)
    return f'"{escaped}"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08X}"
