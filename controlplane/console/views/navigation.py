"""Which pages there are for whom, and which one is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from saltern.names import TenantId
from tenants.roles import Permission, Role, may


@dataclass(frozen=True, slots=True)
class Link:
    label: str
    href: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Links under a heading, such as the pages of one tenant."""

    heading: str
    links: tuple[Link, ...]


_PLATFORM: Final = (
    ("Tenants", "/tenants", Permission.TENANTS_MANAGE),
    ("Nodes and leases", "/nodes", Permission.NODES_READ),
    ("Policy", "/policy", Permission.NODES_READ),
    ("Platform keys", "/keys", Permission.CREDENTIALS_READ),
    ("Platform audit", "/audit", Permission.AUDIT_READ),
)
_TENANT: Final = (
    ("Overview", "", Permission.USAGE_READ),
    ("Cost", "/cost", Permission.USAGE_READ),
    ("API keys", "/keys", Permission.CREDENTIALS_READ),
    ("Salts", "/salts", Permission.SALTS_READ),
    ("Sharing", "/sharing", Permission.SHARING_READ),
    ("Audit trail", "/audit", Permission.AUDIT_READ),
)


def navigation(role: Role, own: TenantId | None, shown: TenantId | None, path: str) -> tuple[Group, ...]:
    """The pages for a role.

    Args:
        own: the tenant of the credential; None for one of the platform.
        shown: the tenant whose page is shown: the platform's administrators get its pages too.
        path: of the page.
    """
    groups = []
    if own is None:
        groups.append(Group("Platform", tuple(_links(_PLATFORM, "", role, path))))
    tenant = own or shown
    if tenant is not None:
        base = f"/tenants/{quote(tenant, safe='')}"
        groups.append(Group(tenant, tuple(_links(_TENANT, base, role, path))))
    return tuple(groups)


def home(own: TenantId | None) -> str:
    """Where somebody begins."""
    return "/tenants" if own is None else f"/tenants/{quote(own, safe='')}"


def _links(pages: tuple[tuple[str, str, Permission], ...], base: str, role: Role, path: str) -> Iterator[Link]:
    for label, end, permission in pages:
        href = f"{base}{end}"
        # Pages below one are its own: making a key is a page of the keys. An overview has none.
        is_current = path == href or (end != "" and href != "/tenants" and path.startswith(f"{href}/"))
        if may(role, permission):
            yield Link(label, href, is_current)
