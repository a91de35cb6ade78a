"""Key-encryption keys by name, so that they can be rotated; who holds them; and that nothing goes under a retired one.

Additive. Whatever is wrapped now names the key that it is under, and that key is the current one. Control planes of the
earlier version go on beside it until the first rotation: they would know one key only.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from migrations.wrapped_columns import drop_guard, guard_wrapped, make_guard, unguard_wrapped
from saltern.errors import FailedPreconditionError

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_WRAPPED = (
    ("salt_epochs", "wrapped_root_secret"),
    ("signing_keys", "wrapped_private_key"),
    ("audit_checkpoint_keys", "wrapped_private_key"),
)


def upgrade() -> None:
    op.create_table(
        "key_encryption_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sealed_key", sa.LargeBinary(), nullable=True),
        sa.Column("sealed_by", sa.Text(), server_default=sa.text("''::text"), nullable=False),
        sa.Column("annotations", JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("use_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retire_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("remove_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("id ~ '^[0-9a-f]{16}$'", name=op.f("ck_key_encryption_keys_id_form")),
        sa.CheckConstraint(
            "remove_time IS NULL OR (retire_time IS NOT NULL AND sealed_key IS NULL)",
            name=op.f("ck_key_encryption_keys_removed"),
        ),
        sa.CheckConstraint(
            "jsonb_typeof(annotations) = 'object'", name=op.f("ck_key_encryption_keys_annotations_is_object")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_key_encryption_keys")),
    )
    op.create_table(
        "key_encryption_key_holders",
        sa.Column("instance", sa.Uuid(), nullable=False),
        sa.Column("held", JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False),
        sa.Column("wraps_with", sa.Text(), nullable=False),
        sa.Column("report_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("instance", name=op.f("pk_key_encryption_key_holders")),
    )
    for table, column in _WRAPPED:
        op.execute(
            "INSERT INTO key_encryption_keys (id, create_time, use_time)"  # noqa: S608 (constants)
            f" SELECT DISTINCT encode(substring({column} FROM 2 FOR 8), 'hex'), now(), now() FROM {table}"
            f" WHERE octet_length({column}) > 8 ON CONFLICT DO NOTHING"
        )
    make_guard()
    for table, column in _WRAPPED:
        guard_wrapped(table, column)


def downgrade() -> None:
    """Take it back.

    Raises:
        FailedPreconditionError: a key management service holds the key, or keys have been rotated: the earlier version
            knows one key, from a file.
    """
    in_use = """
        SELECT EXISTS (SELECT FROM key_encryption_keys WHERE sealed_key IS NOT NULL)
            OR (SELECT count(*) > 1 FROM key_encryption_keys WHERE remove_time IS NULL)
    """
    if op.get_bind().scalar(sa.text(in_use)):
        raise FailedPreconditionError(
            "the downgrade would forget key-encryption keys that the earlier version cannot use",
            reason="SCHEMA_IN_USE",
            hint="rotate to one key in a file and remove the others first (docs/operating.md)",
        )
    for table, column in reversed(_WRAPPED):
        unguard_wrapped(table, column)
    drop_guard()
    op.drop_table("key_encryption_key_holders")
    op.drop_table("key_encryption_keys")
