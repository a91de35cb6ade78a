"""Types of command-line parameters: each turns text into a checked value or says what it expects."""

from __future__ import annotations

import re
from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from saltern.errors import SalternError
from saltern.names import (
    NamespaceId,
    TenantId,
    parse_identifier,
    parse_namespace_id,
    parse_namespace_name,
    parse_sharing_group_name,
    parse_tenant_id,
)
from saltern.sizes import parse_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_DURATION: Final = re.compile(r"([0-9]{1,9})(s|m|h|d)", re.ASCII)
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION_MAX_S: Final = 10 * 366 * 86400
_TEXT_MAX_CHARS: Final = 4096
#: How a limit is lifted.
NO_LIMIT: Final = "none"


class ParameterError(click.BadParameter):
    """A bad value whose parser also says what to write instead."""

    def __init__(self, message: str, hint: str, param: click.Parameter | None, ctx: click.Context | None) -> None:
        super().__init__(message, ctx, param)
        self.hint = hint


class _Parsed(click.ParamType[Any]):
    """A parameter whose parser raises SalternError; click then adds the option that it belongs to.

    ``completes``: the function of :mod:`saltern.cli.completion` that knows names of its kind; empty for none.
    """

    completes = ""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if not self.completes:
            return []
        from saltern.cli import completion

        items: list[CompletionItem] = getattr(completion, self.completes)(ctx, incomplete)
        return items

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except SalternError as error:
            raise ParameterError(error.message, error.hint, param, ctx) from None

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Return what the text stands for; raises SalternError where it stands for nothing."""


class TenantParameter(_Parsed):
    completes = "tenants"
    name = "tenant"

    def parse(self, value: str) -> TenantId:
        return parse_tenant_id(value.removeprefix("tenants/"))


class NamespaceParameter(_Parsed):
    completes = "namespaces"
    name = "namespace"

    def parse(self, value: str) -> NamespaceId:
        return parse_namespace_id(value)


class GroupParameter(_Parsed):
    """A sharing group, ``owner/group`` or its full name, as its full name."""

    completes = "groups"
    name = "sharing group"

    def parse(self, value: str) -> str:
        owner, slash, group = value.partition("/")
        name = value if value.startswith("tenants/") or not slash else f"tenants/{owner}/sharingGroups/{group}"
        parse_sharing_group_name(name)
        return name


class MemberParameter(_Parsed):
    """A namespace of any tenant, ``tenant/namespace`` or its full name, as its full name."""

    completes = "members"
    name = "member"

    def parse(self, value: str) -> str:
        tenant, slash, namespace = value.partition("/")
        name = value if value.startswith("tenants/") or not slash else f"tenants/{tenant}/namespaces/{namespace}"
        parse_namespace_name(name)
        return name


class IdentifierParameter(_Parsed):
    """Another identifier, such as an API key's; ``what`` names it in errors."""

    def __init__(self, what: str, completes: str = "") -> None:
        self.name = what
        self.completes = completes

    def parse(self, value: str) -> str:
        return parse_identifier(value, what=self.name)


class SizeParameter(_Parsed):
    """A size such as ``512MiB``, as an int of bytes."""

    name = "size"

    def parse(self, value: str | int) -> int:
        return value if isinstance(value, int) else parse_size(value)


class LimitParameter(_Parsed):
    """A size, or ``none`` for no limit; as an int of bytes or ``NO_LIMIT``."""

    name = "size"

    def parse(self, value: str | int) -> str | int:
        return value if value == NO_LIMIT or isinstance(value, int) else parse_size(value)


class DurationParameter(click.ParamType[timedelta]):
    """A duration such as ``90d``, as a timedelta."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        match = _DURATION.fullmatch(value)
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
        if not 1 <= seconds <= _DURATION_MAX_S:
            self.fail(f"{value[:64]!r} is not a duration of 1s to 10 years (write 30m, 12h or 90d)", param, ctx)
        return timedelta(seconds=seconds)


class TextParameter(click.ParamType[str]):
    """Free text that can be sent and stored: valid Unicode without control characters."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if len(text) > _TEXT_MAX_CHARS:
            self.fail(f"a text of {len(text)} characters is above the limit of {_TEXT_MAX_CHARS}", param, ctx)
        if not text.isprintable():
            self.fail(f"{text[:64]!r} holds control characters or bytes that are not UTF-8", param, ctx)
        return text


TENANT: Final = TenantParameter()
NAMESPACE: Final = NamespaceParameter()
GROUP: Final = GroupParameter()
MEMBER: Final = MemberParameter()
API_KEY_ID: Final = IdentifierParameter("API key", "api_keys")
NODE: Final = IdentifierParameter("node", "nodes")
SIZE: Final = SizeParameter()
LIMIT: Final = LimitParameter()
DURATION: Final = DurationParameter()
TEXT: Final = TextParameter()
