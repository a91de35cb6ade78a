"""Every column that holds wrapped secrets, and how each of them was wrapped.

A column that is missing here would be left behind under an old key and lost with it. A test finds one in the models,
and in the database one without its guard (``migrations.wrapped_columns``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, LargeBinary, Select, func, literal_column, select
from sqlalchemy.orm import InstrumentedAttribute

from controlplane.audit.checkpoint_keys import checkpoint_key_context
from controlplane.db import models
from controlplane.secrets.wrapping import WrapContext, group_root_context, root_secret_context, signing_key_context

#: Constants in the text of a statement, so that it can be grouped by what is made of them.
_KEY_ID_AT: Final[ColumnElement[int]] = literal_column("2")  # the version byte is the first
_KEY_ID_BYTES: Final[ColumnElement[int]] = literal_column("8")
_HEX: Final[ColumnElement[str]] = literal_column("'hex'")


@dataclass(frozen=True, slots=True)
class WrappedColumn:
    """A column of wrapped secrets; NULL is none.

    Attributes:
        named_by: what the context of a row is made of, by ``context``.
    """

    column: InstrumentedAttribute[Any]
    named_by: tuple[ColumnElement[Any] | InstrumentedAttribute[Any], ...]
    context: Callable[..., WrapContext]

    @property
    def table(self) -> str:
        """Name of the table; each has one such column at most."""
        return str(self.column.class_.__tablename__)

    @property
    def primary_key(self) -> tuple[ColumnElement[Any], ...]:
        return tuple(self.column.class_.__table__.primary_key)

    @property
    def key_id(self) -> ColumnElement[str]:
        """Which key a row is wrapped under, as 16 hexadecimal digits."""
        head = func.substring(self.column, _KEY_ID_AT, _KEY_ID_BYTES, type_=LargeBinary)
        return func.encode(head, _HEX)

    def rows(self) -> Select[Any]:
        """Primary key, wrapped secret, and what its context is made of."""
        return select(*self.primary_key, self.column, *self.named_by)


_TENANT_UID: Final = (
    select(models.Tenant.uid).where(models.Tenant.id == models.SaltEpoch.tenant_id).scalar_subquery().label("uid")
)

WRAPPED_COLUMNS: Final = (
    WrappedColumn(models.SaltEpoch.wrapped_root_secret, (_TENANT_UID, models.SaltEpoch.epoch), root_secret_context),
    WrappedColumn(
        models.SharingGroup.wrapped_root_secret,
        (models.SharingGroup.uid, models.SharingGroup.epoch),
        group_root_context,
    ),
    WrappedColumn(models.SigningKey.wrapped_private_key, (models.SigningKey.kid,), signing_key_context),
    WrappedColumn(
        models.AuditCheckpointKey.wrapped_private_key, (models.AuditCheckpointKey.id,), checkpoint_key_context
    ),
)
