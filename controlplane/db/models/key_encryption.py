"""Tables of the keys that secrets are wrapped under, and of the control planes that hold them."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.models.base import EMPTY_OBJECT, EMPTY_TEXT, Base


class KeyEncryptionKey(Base):
    """A key-encryption key that is, or was, in use; ``controlplane.core.key_encryption`` says what its times mean.

    ``id``: as in the secrets that it wraps. ``sealed_key``: the key itself, encrypted by a key management service;
    NULL for one that lies in a file or the environment, and for one that was removed (I12). ``sealed_by`` and
    ``annotations``: what that service said of its own key. Rows stay: nothing is ever wrapped under a key that retired.
    """

    __tablename__ = "key_encryption_keys"
    __table_args__ = (
        CheckConstraint("id ~ '^[0-9a-f]{16}$'", name="id_form"),
        CheckConstraint("remove_time IS NULL OR (retire_time IS NOT NULL AND sealed_key IS NULL)", name="removed"),
        CheckConstraint("jsonb_typeof(annotations) = 'object'", name="annotations_is_object"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    sealed_key: Mapped[bytes | None]
    sealed_by: Mapped[str] = mapped_column(server_default=EMPTY_TEXT)
    annotations: Mapped[dict[str, str]] = mapped_column(JSONB, server_default=EMPTY_OBJECT)
    create_time: Mapped[datetime]
    use_time: Mapped[datetime | None]
    retire_time: Mapped[datetime | None]
    remove_time: Mapped[datetime | None]


class KeyEncryptionKeyHolder(Base):
    """A running control plane: which keys it can unwrap with, and which one it wraps with."""

    __tablename__ = "key_encryption_key_holders"

    instance: Mapped[UUID] = mapped_column(primary_key=True)
    held: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'::jsonb"))
    wraps_with: Mapped[str]
    report_time: Mapped[datetime]
