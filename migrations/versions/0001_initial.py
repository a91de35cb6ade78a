"""The first schema: tenants and what is theirs, credentials, the audit trail, nodes and what they report."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from saltern.errors import FailedPreconditionError

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = (
    "audit_events",
    "bootstrap",
    "nodes",
    "policy_state",
    "request_log",
    "signing_keys",
    "tenants",
    "api_keys",
    "namespaces",
    "node_tier_usage",
    "node_usage",
    "salt_policies",
    "tier_quotas",
)

# Append-only whoever connects, the owner of the table included, short of dropping the trigger (I11).
_REFUSE_AUDIT_CHANGE = """
CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit_events is append-only: % refused', TG_OP USING ERRCODE = 'insufficient_privilege';
END
$$
"""
_AUDIT_TRIGGERS = (
    """
    CREATE TRIGGER audit_events_append_only BEFORE UPDATE OR DELETE ON audit_events
    FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()
    """,
    """
    CREATE TRIGGER audit_events_no_truncate BEFORE TRUNCATE ON audit_events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()
    """,
)


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("chain", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("event_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("before", JSONB(), nullable=True),
        sa.Column("after", JSONB(), nullable=True),
        sa.Column("previous_hash", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint(
            "chain ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name=op.f("ck_audit_events_chain_identifier")
        ),
        sa.CheckConstraint("outcome IN ('success', 'denied')", name=op.f("ck_audit_events_outcome_known")),
        sa.CheckConstraint("octet_length(hash) = 32", name=op.f("ck_audit_events_hash_is_sha256")),
        sa.CheckConstraint("octet_length(previous_hash) = 32", name=op.f("ck_audit_events_previous_hash_is_sha256")),
        sa.CheckConstraint("sequence >= 1", name=op.f("ck_audit_events_sequence_from_one")),
        sa.PrimaryKeyConstraint("chain", "sequence", name=op.f("pk_audit_events")),
    )
    op.create_table(
        "bootstrap",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("redeemed_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_bootstrap_one_row")),
        sa.CheckConstraint("octet_length(token_sha256) = 32", name=op.f("ck_bootstrap_token_sha256_is_sha256")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bootstrap")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("fencing_epoch", sa.BigInteger(), nullable=False),
        sa.Column("wire_endpoint", sa.Text(), nullable=False),
        sa.Column("shm_path", sa.Text(), nullable=False),
        sa.Column("grpc_endpoint", sa.Text(), nullable=False),
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.Column("dram_capacity_bytes", sa.BigInteger(), nullable=False),
        sa.Column("ssd_capacity_bytes", sa.BigInteger(), nullable=False),
        sa.Column("software_version", sa.Text(), nullable=False),
        sa.Column("applied_version", sa.BigInteger(), nullable=False),
        sa.Column("register_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_report_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name=op.f("ck_nodes_id_identifier")),
        sa.CheckConstraint("applied_version >= 0", name=op.f("ck_nodes_applied_version_not_negative")),
        sa.CheckConstraint(
            "dram_capacity_bytes BETWEEN 0 AND 9007199254740992", name=op.f("ck_nodes_dram_capacity_bytes_range")
        ),
        sa.CheckConstraint("fencing_epoch >= 1", name=op.f("ck_nodes_fencing_epoch_from_one")),
        sa.CheckConstraint(
            "ssd_capacity_bytes BETWEEN 0 AND 9007199254740992", name=op.f("ck_nodes_ssd_capacity_bytes_range")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("uid", name=op.f("uq_nodes_uid")),
    )
    op.create_table(
        "policy_state",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_policy_state_one_row")),
        sa.CheckConstraint("version >= 0", name=op.f("ck_policy_state_version_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_state")),
    )
    op.create_table(
        "request_log",
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("request_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("octet_length(request_sha256) = 32", name=op.f("ck_request_log_request_sha256_is_sha256")),
        sa.PrimaryKeyConstraint("actor", "method", "request_id", name=op.f("pk_request_log")),
    )
    op.create_index(op.f("ix_request_log_create_time"), "request_log", ["create_time"], unique=False)
    op.create_table(
        "signing_keys",
        sa.Column("kid", sa.Text(), nullable=False),
        sa.Column("wrapped_private_key", sa.LargeBinary(), nullable=False),
        sa.Column("public_x", sa.Text(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_after_time", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("kid", name=op.f("pk_signing_keys")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("min_issue_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("wrapped_root_secret", sa.LargeBinary(), nullable=False),
        sa.Column("first_audit_sequence", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id <> 'platform'", name=op.f("ck_tenants_id_not_reserved")),
        sa.CheckConstraint("id ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name=op.f("ck_tenants_id_identifier")),
        sa.CheckConstraint("state IN ('active', 'suspended')", name=op.f("ck_tenants_state_known")),
        sa.CheckConstraint("char_length(display_name) <= 128", name=op.f("ck_tenants_display_name_length")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("uid", name=op.f("uq_tenants_uid")),
    )
    op.create_table(
        "api_keys",
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("lookup", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_time", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(tenant_id IS NULL AND role IN ('node', 'platform-admin'))"
            " OR (tenant_id IS NOT NULL AND role IN ('reader', 'tenant-admin', 'tenant-auditor', 'writer'))",
            name=op.f("ck_api_keys_role_fits_owner"),
        ),
        sa.CheckConstraint("id ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name=op.f("ck_api_keys_id_identifier")),
        sa.CheckConstraint("lookup ~ '^[0-9a-f]{16}$'", name=op.f("ck_api_keys_lookup_form")),
        sa.CheckConstraint("char_length(display_name) <= 128", name=op.f("ck_api_keys_display_name_length")),
        sa.CheckConstraint("octet_length(secret_sha256) = 32", name=op.f("ck_api_keys_secret_sha256_is_sha256")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("lookup", name=op.f("uq_api_keys_lookup")),
        sa.UniqueConstraint(
            "tenant_id", "id", name=op.f("uq_api_keys_tenant_id_id"), postgresql_nulls_not_distinct=True
        ),
    )
    op.create_table(
        "namespaces",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("uid", sa.Uuid(), nullable=False),
        sa.Column("model_fingerprint", sa.Text(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("id ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name=op.f("ck_namespaces_id_identifier")),
        sa.CheckConstraint("block_bytes BETWEEN 1 AND 67108864", name=op.f("ck_namespaces_block_bytes_range")),
        sa.CheckConstraint("block_tokens BETWEEN 1 AND 65536", name=op.f("ck_namespaces_block_tokens_range")),
        sa.CheckConstraint(
            "char_length(model_fingerprint) BETWEEN 1 AND 512", name=op.f("ck_namespaces_model_fingerprint_length")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_namespaces_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "id", name=op.f("pk_namespaces")),
        sa.UniqueConstraint("uid", name=op.f("uq_namespaces_uid")),
    )
    op.create_table(
        "node_tier_usage",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tier IN ('dram', 'ssd')", name=op.f("ck_node_tier_usage_tier_known")),
        sa.CheckConstraint("entries >= 0", name=op.f("ck_node_tier_usage_entries_not_negative")),
        sa.CheckConstraint("used_bytes >= 0", name=op.f("ck_node_tier_usage_used_bytes_not_negative")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_tier_usage_node_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_node_tier_usage_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node_id", "tenant_id", "tier", name=op.f("pk_node_tier_usage")),
    )
    op.create_index(op.f("ix_node_tier_usage_tenant_id"), "node_tier_usage", ["tenant_id"], unique=False)
    op.create_table(
        "node_usage",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("get_hits", sa.BigInteger(), nullable=False),
        sa.Column("get_misses", sa.BigInteger(), nullable=False),
        sa.Column("get_bytes", sa.BigInteger(), nullable=False),
        sa.Column("put_bytes", sa.BigInteger(), nullable=False),
        sa.Column("puts_stored", sa.BigInteger(), nullable=False),
        sa.Column("puts_refused", sa.BigInteger(), nullable=False),
        sa.Column("evictions", sa.BigInteger(), nullable=False),
        sa.Column("evicted_bytes", sa.BigInteger(), nullable=False),
        sa.Column("report_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("evicted_bytes >= 0", name=op.f("ck_node_usage_evicted_bytes_not_negative")),
        sa.CheckConstraint("evictions >= 0", name=op.f("ck_node_usage_evictions_not_negative")),
        sa.CheckConstraint("get_bytes >= 0", name=op.f("ck_node_usage_get_bytes_not_negative")),
        sa.CheckConstraint("get_hits >= 0", name=op.f("ck_node_usage_get_hits_not_negative")),
        sa.CheckConstraint("get_misses >= 0", name=op.f("ck_node_usage_get_misses_not_negative")),
        sa.CheckConstraint("put_bytes >= 0", name=op.f("ck_node_usage_put_bytes_not_negative")),
        sa.CheckConstraint("puts_refused >= 0", name=op.f("ck_node_usage_puts_refused_not_negative")),
        sa.CheckConstraint("puts_stored >= 0", name=op.f("ck_node_usage_puts_stored_not_negative")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_node_usage_node_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_node_usage_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node_id", "tenant_id", name=op.f("pk_node_usage")),
    )
    op.create_index(op.f("ix_node_usage_tenant_id"), "node_usage", ["tenant_id"], unique=False)
    op.create_table(
        "salt_policies",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "scope IN ('tenant', 'namespace', 'project', 'user', 'session', 'group')",
            name=op.f("ck_salt_policies_scope_known"),
        ),
        sa.CheckConstraint("epoch >= 1", name=op.f("ck_salt_policies_epoch_from_one")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_salt_policies_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_salt_policies")),
    )
    op.create_table(
        "tier_quotas",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("reserved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("limit_bytes", sa.BigInteger(), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("tier IN ('dram', 'ssd')", name=op.f("ck_tier_quotas_tier_known")),
        sa.CheckConstraint("limit_bytes BETWEEN 0 AND 9007199254740992", name=op.f("ck_tier_quotas_limit_bytes_range")),
        sa.CheckConstraint(
            "reserved_bytes BETWEEN 0 AND limit_bytes", name=op.f("ck_tier_quotas_reserved_within_limit")
        ),
        sa.CheckConstraint("weight BETWEEN 1 AND 1000", name=op.f("ck_tier_quotas_weight_range")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_tier_quotas_tenant_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "tier", name=op.f("pk_tier_quotas")),
    )
    op.execute(_REFUSE_AUDIT_CHANGE)
    for trigger in _AUDIT_TRIGGERS:
        op.execute(trigger)
    op.execute("INSERT INTO policy_state (id, version, update_time) VALUES (1, 1, now())")


def downgrade() -> None:
    """Drop everything, but only where there is nothing to lose.

    Raises:
        FailedPreconditionError: there are tenants, keys or audit events; no later upgrade could bring them back.
    """
    for table in ("tenants", "api_keys", "audit_events"):
        if op.get_bind().scalar(sa.text(f"SELECT EXISTS (SELECT FROM {table})")):  # noqa: S608 (a constant)
            raise FailedPreconditionError(
                f"the downgrade would destroy the rows of {table}",
                reason="SCHEMA_IN_USE",
                hint="take a backup and empty the database yourself if that is what you want",
            )
    for table in reversed(_TABLES):
        op.drop_table(table)
    op.execute("DROP FUNCTION refuse_audit_change()")
