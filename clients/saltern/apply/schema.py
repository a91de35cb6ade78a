"""What a file may say, version ``saltern/v1``: trees in, a declaration out, every problem with its place.

``docs/apply.md`` shows a whole file. Each document is a ``Tenant``, or a ``List`` of documents (``items``), which is
what ``saltern export-config --output json`` prints.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from saltern.apply.resources import (
    ACTIVE,
    ROLES,
    SCOPES,
    SUSPENDED,
    TIERS,
    Declaration,
    Identity,
    Kind,
    Resource,
    Section,
    Value,
    group_resource,
    invitation_resource,
    key_resource,
    membership_resource,
    namespace_resource,
    rates_resource,
    salt_resource,
    state_resource,
    tenant_resource,
    tier_resource,
)
from saltern.apply.units import parse_duration_s, parse_time_s
from saltern.apply.yaml_tree import Entry, Mapping, Mark, Node, Scalar, Sequence
from saltern.errors import InvalidArgumentError, SalternError
from saltern.names import (
    ApiKeyId,
    NamespaceId,
    SharingGroupId,
    TenantId,
    namespace_name,
    parse_identifier,
    parse_namespace_id,
    parse_tenant_id,
    sharing_group_name,
    tenant_name,
)
from saltern.sizes import parse_size

API_VERSION: Final = "saltern/v1"
KIND_TENANT: Final = "Tenant"
KIND_LIST: Final = "List"
#: How a limit or an expiry that is none is written.
NONE: Final = "none"
NEVER: Final = "never"
_TEXT_MAX_CHARS: Final = 4096
_TENANT_FIELDS: Final = (
    "apiVersion",
    "kind",
    "name",
    "displayName",
    "state",
    "quota",
    "rates",
    "salt",
    "namespaces",
    "keys",
    "sharing",
)
_BLOCK_TOKENS_MAX: Final = 65536
_WEIGHT_MAX: Final = 1000
_RATE_MAX: Final = 2**40
_PROBLEMS_MAX: Final = 50
_ParsedT = TypeVar("_ParsedT")


@dataclass(frozen=True, slots=True)
class Problem:
    mark: Mark
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.mark}: {self.message}" + (f"; {self.hint}" if self.hint else "")


class DeclarationError(InvalidArgumentError):
    """What is declared cannot be: ``problems`` has each fault with its place."""

    default_reason = "INVALID_DECLARATION"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        first, more = self.problems[0], len(self.problems) - 1
        super().__init__(
            f"{first.mark}: {first.message}" + (f" (and {more} more)" if more else ""),
            hint=first.hint,
            metadata={"problems": "\n".join(map(str, self.problems))},
        )


def read_declaration(documents: Iterable[Node]) -> Declaration:
    """What the documents of all files declare together.

    Raises:
        DeclarationError: with every problem that was found, at most 50.
    """
    reader = _Reader()
    for document in documents:
        reader.document(document)
    if reader.problems:
        raise DeclarationError(reader.problems[:_PROBLEMS_MAX])
    return Declaration(reader.tenants, reader.resources, frozenset(reader.sections))


@dataclass(slots=True)
class _Reader:
    problems: list[Problem] = field(default_factory=list)
    tenants: dict[TenantId, str] = field(default_factory=dict)
    resources: dict[Identity, Resource] = field(default_factory=dict)
    sections: set[Section] = field(default_factory=set)

    # Documents and what is in them, from the outside in.

    def document(self, node: Node) -> None:
        if not isinstance(node, Mapping):
            self._refuse(node.mark, "a document is a mapping", "begin it with apiVersion and kind")
            return
        for name in ("apiVersion", "kind"):
            if name not in node.entries:
                self._refuse(node.mark, f"{name} is missing", f"begin with apiVersion: {API_VERSION} and kind: Tenant")
        version = self._scalar(node, "apiVersion", _one_of((API_VERSION,)))
        kind = self._scalar(node, "kind", _one_of((KIND_TENANT, KIND_LIST)))
        if version is None or kind is None:
            return
        if kind == KIND_TENANT:
            self._tenant(node)
            return
        self._fields(node, "list", ("apiVersion", "kind", "items"), required=("items",))
        for item in self._items(node, "items") or ():
            self.document(item)

    def _tenant(self, node: Mapping) -> None:
        self._fields(node, "tenant", _TENANT_FIELDS, required=("name",))
        tenant = self._scalar(node, "name", parse_tenant_id)
        if tenant is None:
            return
        mark = node.entries["name"].mark
        if (first := self.tenants.get(tenant)) is not None:
            self._refuse(mark, f"tenant {tenant!r} is declared twice, first at {first}", "keep one document for each")
            return
        self.tenants[tenant] = str(mark)
        fields = self._values(node, {"displayName": ("display_name", _text)})
        self._add(tenant_resource(tenant, fields, origin=str(mark)))
        if state := self._scalar(node, "state", _one_of((ACTIVE, SUSPENDED))):
            self._add(state_resource(tenant, state, origin=self._origin(node, "state")))
        self._quota(node, tenant)
        self._part(node, "rates", rates_resource, tenant, _RATES)
        self._part(node, "salt", salt_resource, tenant, _SALT)
        lists = ((Kind.NAMESPACE, "namespaces", self._namespace), (Kind.KEY, "keys", self._key))
        for kind, name, read_item in lists:
            if (items := self._items(node, name)) is not None:
                self.sections.add((kind, tenant_name(tenant)))
                for item in items:
                    read_item(item, tenant)
        self._sharing(node, tenant)

    def _quota(self, node: Mapping, tenant: TenantId) -> None:
        if (quota := self._mapping(node, "quota", "quota", TIERS)) is None:
            return
        for tier in TIERS:
            values = self._mapping(quota, tier, f"quota.{tier}", tuple(_QUOTA))
            if values is None or not (fields := self._values(values, _QUOTA)):
                continue
            reserved, limit = fields.get("reserved_bytes"), fields.get("limit_bytes")
            if isinstance(reserved, int) and isinstance(limit, int) and reserved > limit:
                self._refuse(
                    values.mark, f"reserved of quota.{tier} is above its limit", "raise limit, or lower reserved"
                )
            self._add(tier_resource(tenant, tier, fields, origin=self._origin(quota, tier)))

    def _part(self, node: Mapping, name: str, make: Callable[..., Resource], tenant: TenantId, known: _Known) -> None:
        values = self._mapping(node, name, name, tuple(known))
        if values is not None and (fields := self._values(values, known)):
            self._add(make(tenant, fields, origin=self._origin(node, name)))

    def _namespace(self, item: Node, tenant: TenantId) -> None:
        known = ("name", *_NAMESPACE, "limits")
        if (node := self._item(item, "namespace", known)) is None:
            return
        namespace = self._scalar(node, "name", parse_namespace_id)
        fields = self._values(node, _NAMESPACE)
        if limits := self._mapping(node, "limits", "limits", TIERS):
            fields |= self._values(limits, _LIMITS)
        if namespace is not None:
            self._add(namespace_resource(tenant, namespace, fields, origin=str(node.mark)))

    def _key(self, item: Node, tenant: TenantId) -> None:
        if (node := self._item(item, "key", ("name", *_KEY))) is None:
            return
        key = self._scalar(node, "name", _identifier("API key"))
        fields = self._values(node, _KEY)
        if fields.get("role") not in (None, "writer", "reader") and (fields.get("project") or fields.get("user")):
            self._refuse(
                node.mark, "only writers and readers are bound to a project or user", "take project and user out"
            )
        if key is not None:
            self._add(key_resource(tenant, ApiKeyId(key), fields, origin=str(node.mark)))

    def _sharing(self, node: Mapping, tenant: TenantId) -> None:
        sharing = self._mapping(node, "sharing", "sharing", ("groups", "accepts"))
        if sharing is None:
            return
        groups = self._items(sharing, "groups")
        if groups is not None:
            self.sections.add((Kind.GROUP, tenant_name(tenant)))
        for item in groups or ():
            self._group(item, tenant)
        accepts = self._items(sharing, "accepts")
        if accepts is not None:
            self.sections.add((Kind.MEMBERSHIP, tenant_name(tenant)))
        for item in accepts or ():
            if (one := self._item(item, "accepts", ("group", "namespace"), ("group", "namespace"))) is None:
                continue
            group = self._scalar(one, "group", _group)
            namespace = self._scalar(one, "namespace", parse_namespace_id)
            if group is not None and namespace is not None:
                member = namespace_name(tenant, namespace)
                self._add(membership_resource(tenant, group, member, origin=str(one.mark)))

    def _group(self, item: Node, tenant: TenantId) -> None:
        if (node := self._item(item, "group", ("name", "namespace", "invite"), ("name", "namespace"))) is None:
            return
        group = self._scalar(node, "name", _identifier("sharing group"))
        namespace = self._scalar(node, "namespace", parse_namespace_id)
        if group is None or namespace is None:
            return
        name, first, origin = (
            sharing_group_name(tenant, SharingGroupId(group)),
            namespace_name(tenant, namespace),
            str(node.mark),
        )
        self._add(group_resource(tenant, SharingGroupId(group), first, origin=origin))
        self._add(invitation_resource(tenant, name, first, origin=origin))
        self._add(membership_resource(tenant, name, first, origin=origin))
        invited = self._items(node, "invite")
        if invited is not None:
            self.sections.add((Kind.INVITATION, name))
        for one in invited or ():
            member = self._parse(one, "invite", _member)
            if member == first:
                self._refuse(one.mark, f"{namespace} is in the group already: it is its first member", "take it out")
            elif member is not None:
                self._add(invitation_resource(tenant, name, member, origin=str(one.mark)))

    # Parts of trees, checked.

    def _add(self, resource: Resource) -> None:
        first = self.resources.setdefault(resource.identity, resource)
        if first is not resource:
            self._refuse(
                _mark_of(resource.origin), f"{resource.name} is declared twice, first at {first.origin}", "keep one"
            )

    def _refuse(self, mark: Mark, message: str, hint: str = "") -> None:
        self.problems.append(Problem(mark, message, hint))

    def _fields(self, node: Mapping, what: str, known: tuple[str, ...], required: tuple[str, ...] = ()) -> None:
        for name, entry in node.entries.items():
            if name not in known:
                near = difflib.get_close_matches(name.lower(), [one.lower() for one in known], 1, 0.6)
                meant = next((one for one in known if near and one.lower() == near[0]), None)
                hint = f"did you mean {meant!r}?" if meant else f"it has: {', '.join(known)}"
                self._refuse(entry.mark, f"{what} has no field {name[:64]!r}", hint)
        for name in required:
            if name not in node.entries:
                self._refuse(node.mark, f"{what} has no {name}", f"give {name}")

    def _item(
        self, node: Node, what: str, known: tuple[str, ...], required: tuple[str, ...] = ("name",)
    ) -> Mapping | None:
        if not isinstance(node, Mapping):
            self._refuse(node.mark, f"each {what} is a mapping", f"write - {known[0]}: ... in a line of its own")
            return None
        self._fields(node, what, known, required)
        return node

    def _mapping(self, node: Mapping, name: str, what: str, known: tuple[str, ...]) -> Mapping | None:
        if (entry := node.entries.get(name)) is None:
            return None
        if not isinstance(entry.value, Mapping):
            self._refuse(entry.value.mark, f"{what} is a mapping", f"it has: {', '.join(known)}")
            return None
        self._fields(entry.value, what, known)
        return entry.value

    def _items(self, node: Mapping, name: str) -> tuple[Node, ...] | None:
        if (entry := node.entries.get(name)) is None:
            return None
        if not isinstance(entry.value, Sequence):
            self._refuse(
                entry.value.mark, f"{name} is a list", "write each item in a line that begins with -, or [] for none"
            )
            return None
        return entry.value.items

    def _values(self, node: Mapping, known: _Known) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for name, (field_name, parse) in known.items():
            if (entry := node.entries.get(name)) is not None:
                before = len(self.problems)
                value = self._parse(entry.value, name, parse)
                if len(self.problems) == before:
                    values[field_name] = value
        return values

    def _scalar(self, node: Mapping, name: str, parse: Callable[[str], _ParsedT]) -> _ParsedT | None:
        entry: Entry | None = node.entries.get(name)
        return None if entry is None else self._parse(entry.value, name, parse)

    def _parse(self, node: Node, name: str, parse: Callable[[str], _ParsedT]) -> _ParsedT | None:
        if not isinstance(node, Scalar):
            self._refuse(node.mark, f"{name} is one value, not a list or mapping", "")
            return None
        if not node.quoted and node.text in ("", "~", "null"):
            self._refuse(node.mark, f"{name} has no value", "give one, or leave the field out to keep what is there")
            return None
        try:
            return parse(node.text)
        except SalternError as error:
            self._refuse(node.mark, f"{name}: {error.message}", error.hint)
            return None

    def _origin(self, node: Mapping, name: str) -> str:
        return str(node.entries[name].mark)


def _mark_of(origin: str) -> Mark:
    source, line, column = origin.rsplit(":", 2)
    return Mark(source, int(line), int(column))


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices, 1)
        hint = f"did you mean {near[0]}?" if near else f"write one of: {', '.join(choices)}"
        raise InvalidArgumentError(f"{text[:64]!r} is none that this version knows", hint=hint)

    return parse


def _text(text: str) -> str:
    if len(text) > _TEXT_MAX_CHARS or not text.isprintable():
        raise InvalidArgumentError(
            f"is longer than {_TEXT_MAX_CHARS} characters or holds control characters", hint="write one line of text"
        )
    return text


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= high):
            raise InvalidArgumentError(f"{text[:64]!r} is no integer from {low} to {high}", hint="write digits alone")
        return int(text)

    return parse


def _or_none(word: str, parse: Callable[[str], int]) -> Callable[[str], int | None]:
    return lambda text: None if text == word else parse(text)


def _identifier(what: str) -> Callable[[str], str]:
    return lambda text: parse_identifier(text, what=what)


def _pair(text: str, what: str) -> tuple[TenantId, str]:
    tenant, slash, rest = text.partition("/")
    if not slash:
        raise InvalidArgumentError(f"{text[:128]!r} names no {what}", hint=f"write TENANT/{what.upper()}")
    return parse_tenant_id(tenant), rest


def _member(text: str) -> str:
    tenant, namespace = _pair(text, "namespace")
    return namespace_name(tenant, NamespaceId(parse_namespace_id(namespace)))


def _group(text: str) -> str:
    owner, group = _pair(text, "group")
    return sharing_group_name(owner, SharingGroupId(parse_identifier(group, what="sharing group")))


_Known = dict[str, tuple[str, Callable[[str], Value]]]
_QUOTA: Final[_Known] = {
    "reserved": ("reserved_bytes", parse_size),
    "limit": ("limit_bytes", parse_size),
    "weight": ("weight", _integer(1, _WEIGHT_MAX)),
}
_RATES: Final[_Known] = {
    "operationsPerSecond": ("operations_per_s", _integer(0, _RATE_MAX)),
    "bytesPerSecond": ("bytes_per_s", parse_size),
    "ssdWriteBytesPerSecond": ("ssd_write_bytes_per_s", parse_size),
}
_SALT: Final[_Known] = {
    "scope": ("scope", _one_of(SCOPES)),
    "rotateEvery": ("rotation_period_s", parse_duration_s),
    "grace": ("grace_period_s", parse_duration_s),
}
_NAMESPACE: Final[_Known] = {
    "modelFingerprint": ("model_fingerprint", _text),
    "blockTokens": ("block_tokens", _integer(1, _BLOCK_TOKENS_MAX)),
    "blockBytes": ("block_bytes", parse_size),
}
_LIMITS: Final[_Known] = {
    "dram": ("dram_limit_bytes", _or_none(NONE, parse_size)),
    "ssd": ("ssd_limit_bytes", _or_none(NONE, parse_size)),
}
_KEY: Final[_Known] = {
    "role": ("role", _one_of(ROLES)),
    "displayName": ("display_name", _text),
    "expires": ("expire_time_s", _or_none(NEVER, parse_time_s)),
    "project": ("project", _text),
    "user": ("user", _text),
}
