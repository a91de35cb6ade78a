"""API keys as a table, and what the form to make one offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from controlplane.console.views import texts
from saltern.admin.v1.credentials_pb2 import ApiKey
from saltern.admin.v1.credentials_pb2 import Role as RoleNumber
from tenants.roles import Role

#: What each role may do, as the form says it.
ROLE_HELP: Final = {
    Role.WRITER: "stores and reads blocks: inference servers",
    Role.READER: "reads blocks only",
    Role.TENANT_AUDITOR: "sees usage, keys and the audit trail; changes nothing",
    Role.TENANT_ADMIN: "changes everything of this tenant",
    Role.PLATFORM_ADMIN: "changes everything of every tenant; reads nobody's blocks",
    Role.NODE: "one cache node",
}
TENANT_ROLES: Final = (Role.WRITER, Role.READER, Role.TENANT_AUDITOR, Role.TENANT_ADMIN)
PLATFORM_ROLES: Final = (Role.PLATFORM_ADMIN, Role.NODE)
#: Days after which a key expires, as the form offers them; 0 is never.
EXPIRY_DAYS: Final = (30, 90, 365, 0)
#: For how many hours the secret before stays good after a rotation.
OVERLAP_HOURS: Final = (24, 168, 0)


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key. ``state``: ok, soon (expires within a week), expired."""

    id: str
    display_name: str
    role: str
    bound_to: str
    lookup: str
    created: str
    last_used: str
    expires: str
    previous: str
    state: str
    is_own: bool


def key_rows(keys: Sequence[ApiKey], now: datetime, *, own_subject: str) -> list[KeyRow]:
    """``own_subject``: resource name of the key that the reader is logged in with."""
    return [_row(key, now, own_subject) for key in keys]


def role_number(role: Role) -> RoleNumber.ValueType:
    """A role as the services spell it."""
    number: RoleNumber.ValueType = RoleNumber.Value(f"ROLE_{role.name}")
    return number


def _row(key: ApiKey, now: datetime, own_subject: str) -> KeyRow:
    expires = texts.to_datetime(key.expire_time)
    state = "ok"
    if expires is not None:
        left_s = (expires - now).total_seconds()
        state = "expired" if left_s <= 0 else "soon" if left_s < 7 * 86400 else "ok"
    previous = ""
    if key.HasField("previous"):
        used = texts.ago(texts.to_datetime(key.previous.last_used_time), now)
        previous = f"secret {key.previous.lookup} good until {texts.stamp(key.previous.expire_time)}, last used {used}"
    bound = (("project", key.project_id), ("user", key.user_id), ("node", key.node_id))
    return KeyRow(
        id=texts.last_segment(key.name),
        display_name=key.display_name,
        role=texts.enum_word(RoleNumber, key.role, "ROLE_"),
        bound_to=", ".join(f"{what} {name}" for what, name in bound if name),
        lookup=key.lookup,
        created=texts.stamp(key.create_time),
        last_used=texts.ago(texts.to_datetime(key.last_used_time), now),
        expires=texts.stamp(key.expire_time, "never"),
        previous=previous,
        state=state,
        is_own=key.name == own_subject,
    )
