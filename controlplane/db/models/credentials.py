"""API keys, the keys that sign tokens, and the end of tokens before their time."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import CheckConstraint, ForeignKey, SmallInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.db.checks import identifier, length, not_negative, sha256
from controlplane.db.models.base import DISPLAY_NAME_MAX_CHARS, ZERO, Base
from tenants.roles import PLATFORM_ROLES, TENANT_ROLES, Role
from tenants.salts import SCOPE_ID_MAX_CHARS


class ApiKey(Base):
    """A credential: what finds it (``lookup``) and what proves it (``secret_sha256``), never the secret itself.

    ``tenant_id`` is NULL for a key of the platform. ``created_by``: resource name of the key that made this one.
    ``min_issue_time``: its tokens issued before are refused.
    ``rotate_time``: when the secret was made, if not with the key. ``previous_``: the secret before it, which is good
    until ``previous_expire_time``; a key has at most two.
    ``project_id``, ``user_id``: what every salt that it gets is narrowed to (``tenants.salts.narrow``).
    ``node_id``: the one node that a key of the role node may serve as; NULL for any.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id", postgresql_nulls_not_distinct=True),
        identifier("id"),
        length("display_name", DISPLAY_NAME_MAX_CHARS),
        sha256("secret_sha256"),
        CheckConstraint("lookup ~ '^[0-9a-f]{16}$'", name="lookup_form"),
        CheckConstraint("previous_lookup ~ '^[0-9a-f]{16}$'", name="previous_lookup_form"),
        sha256("previous_secret_sha256"),
        CheckConstraint(
            "num_nulls(previous_lookup, previous_secret_sha256, previous_expire_time) IN (0, 3)", name="previous_whole"
        ),
        *(
            CheckConstraint(f"char_length({column}) BETWEEN 1 AND {SCOPE_ID_MAX_CHARS}", name=f"{column}_length")
            for column in ("project_id", "user_id")
        ),
        identifier("node_id"),
        CheckConstraint(f"node_id IS NULL OR role = '{Role.NODE.value}'", name="node_id_of_a_node"),
        CheckConstraint(
            f"(tenant_id IS NULL AND role IN ({', '.join(repr(role.value) for role in sorted(PLATFORM_ROLES))}))"
            f" OR (tenant_id IS NOT NULL AND role IN ({', '.join(repr(role.value) for role in sorted(TENANT_ROLES))}))",
            name="role_fits_owner",
        ),
    )

    uid: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    id: Mapped[str]
    lookup: Mapped[str] = mapped_column(unique=True)
    secret_sha256: Mapped[bytes]
    role: Mapped[Role]
    display_name: Mapped[str]
    created_by: Mapped[str]
    create_time: Mapped[datetime]
    expire_time: Mapped[datetime | None]
    last_used_time: Mapped[datetime | None]
    min_issue_time: Mapped[datetime | None]
    rotate_time: Mapped[datetime | None]
    previous_lookup: Mapped[str | None] = mapped_column(unique=True)
    previous_secret_sha256: Mapped[bytes | None]
    previous_expire_time: Mapped[datetime | None]
    previous_last_used_time: Mapped[datetime | None]
    project_id: Mapped[str | None]
    user_id: Mapped[str | None]
    node_id: Mapped[str | None]


class SigningKey(Base):
    """A key pair that signs tokens; ``controlplane.core.key_rotation`` says what its times mean.

    ``publish_version``: the first policy version that holds it. ``not_after_time``: no token of it is good from then.
    ``wrapped_private_key``: NULL once destroyed.
    """

    __tablename__ = "signing_keys"

    kid: Mapped[str] = mapped_column(primary_key=True)
    wrapped_private_key: Mapped[bytes | None]
    public_x: Mapped[str]
    create_time: Mapped[datetime]
    not_after_time: Mapped[datetime | None]
    publish_version: Mapped[int] = mapped_column(server_default=ZERO)
    sign_time: Mapped[datetime | None]
    retire_time: Mapped[datetime | None]


class TokenRevocation(Base):
    """Tokens that are refused although they verify: the rules of ``tenants.revocation``.

    ``tenant_id``: whose tokens; NULL for those of the platform. The row means nothing from ``expire_time`` on.
    """

    __tablename__ = "token_revocations"
    __table_args__ = (
        UniqueConstraint("tenant_id", "token_id_prefix", postgresql_nulls_not_distinct=True),
        CheckConstraint("token_id_prefix ~ '^[0-9a-f]{16}([0-9a-f]{16})?$'", name="token_id_prefix_form"),
        not_negative("issued_before_s"),
    )

    uid: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    token_id_prefix: Mapped[str]
    issued_before_s: Mapped[int]
    revoke_time: Mapped[datetime]
    expire_time: Mapped[datetime]


class Bootstrap(Base):
    """The one-time bootstrap token of this deployment: its hash, and when it was redeemed."""

    __tablename__ = "bootstrap"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"), sha256("token_sha256"))

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False, default=1)
    token_sha256: Mapped[bytes]
    create_time: Mapped[datetime]
    redeemed_time: Mapped[datetime | None]
