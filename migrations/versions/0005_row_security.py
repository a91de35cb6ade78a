"""Row-level security, forced, on every table that holds what is a tenant's (I2).

Not beside control planes of the earlier version: they do not say whose rows they are after, so they would find none.
Stop them before this upgrade.
"""

from __future__ import annotations

from migrations.row_security import protect, unprotect

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

#: Tables, and the expression over a row that gives the tenant it belongs to.
_TENANT_OF = {
    "tenants": "id",
    "namespaces": "tenant_id",
    "tier_quotas": "tenant_id",
    "rate_limits": "tenant_id",
    "salt_policies": "tenant_id",
    "api_keys": "tenant_id",
    "token_revocations": "tenant_id",
    "node_usage": "tenant_id",
    "node_tier_usage": "tenant_id",
    "audit_events": "chain",  # the platform's own chain is named as no tenant can be
    "request_log": "substring(actor from '^tenants/([^/]+)/')",
}


def upgrade() -> None:
    for table, tenant in _TENANT_OF.items():
        protect(table, tenant=tenant)


def downgrade() -> None:
    """Take it back: every row is visible to every transaction again."""
    for table in _TENANT_OF:
        unprotect(table)
