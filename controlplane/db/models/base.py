"""What all tables share: the base class, how columns are typed, and defaults of the server's."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    DateTime,
    Enum,
    ForeignKey,
    LargeBinary,
    MetaData,
    Text,
    Uuid,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from saltern.keys import SaltScope
from tenants.policy import TenantState
from tenants.quota import Tier
from tenants.roles import Role

DISPLAY_NAME_MAX_CHARS = 128
MODEL_FINGERPRINT_MAX_CHARS = 512
BLOCK_TOKENS_MAX = 65_536
#: Chain of the platform's own audit events; ``saltern.names`` reserves it, so no tenant can have it.
PLATFORM_CHAIN = "platform"
# Defaults of the server's for columns that came later: during an upgrade, processes of the earlier version insert too.
ZERO = text("0")
ONE = text("1")
EMPTY_OBJECT = text("'{}'::jsonb")
EMPTY_TEXT = text("''::text")
#: Formats of an audit event's hash that this release knows; see ``saltern.audit.chain``.
HASH_FORMAT_NEWEST = 2


class NodeAdminState(StrEnum):
    """What an operator wants of a node."""

    ACTIVE = "active"
    CORDONED = "cordoned"  #: new sessions go elsewhere; it keeps its leases and serves on
    DRAINING = "draining"  #: as cordoned, and its leases go to the other nodes


class AuditOutcome(StrEnum):
    """How an audited attempt ended."""

    SUCCESS = "success"
    DENIED = "denied"


def _values(kind: type[StrEnum]) -> list[str]:
    """What the database stores of an enumeration: its values, not the names of its members."""
    return [member.value for member in kind]


class Base(DeclarativeBase):
    """Base of all tables: constraint names are derived, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own declarative hook)
        str: Text(),
        int: BigInteger(),
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        UUID: Uuid(),
        TenantState: Enum(TenantState, native_enum=False, length=32, values_callable=_values),
        Tier: Enum(Tier, native_enum=False, length=32, values_callable=_values),
        SaltScope: Enum(SaltScope, native_enum=False, length=32, values_callable=_values),
        Role: Enum(Role, native_enum=False, length=32, values_callable=_values),
        NodeAdminState: Enum(NodeAdminState, native_enum=False, length=32, values_callable=_values),
        AuditOutcome: Enum(AuditOutcome, native_enum=False, length=32, values_callable=_values),
    }


def tenant_key(**options: Any) -> Mapped[str]:
    return mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), **options)
