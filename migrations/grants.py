"""What the application role may do: as little as the service needs, so that a fault in it cannot rewrite history."""

from __future__ import annotations

from sqlalchemy import Connection, text

APPLICATION_ROLE = "saltern_app"

_READ_WRITE = "SELECT, INSERT, UPDATE, DELETE"
_GRANTS: dict[str, str] = {
    "tenants": _READ_WRITE,
    "namespaces": _READ_WRITE,
    "tier_quotas": _READ_WRITE,
    "rate_limits": _READ_WRITE,
    "salt_policies": _READ_WRITE,
    "salt_epochs": _READ_WRITE,
    "sharing_groups": _READ_WRITE,
    "sharing_group_members": _READ_WRITE,
    "api_keys": _READ_WRITE,
    "request_log": _READ_WRITE,
    "signing_keys": _READ_WRITE,
    "token_revocations": _READ_WRITE,
    "console_sessions": _READ_WRITE,
    "nodes": _READ_WRITE,
    "node_usage": _READ_WRITE,
    "node_tier_usage": _READ_WRITE,
    "quota_leases": _READ_WRITE,
    "namespace_leases": _READ_WRITE,
    "metered_processes": _READ_WRITE,
    "meters": _READ_WRITE,
    "open_usage": _READ_WRITE,
    "usage_records": "SELECT, INSERT, DELETE",  # and its triggers let nobody change a closed hour
    "metering_state": "SELECT, UPDATE",
    "policy_changes": "SELECT, INSERT, DELETE",
    "bootstrap": "SELECT, INSERT, UPDATE",
    "policy_state": "SELECT, UPDATE",
    "audit_events": "SELECT, INSERT",  # append-only (I11)
    "audit_checkpoint_keys": "SELECT, INSERT, UPDATE",  # what a key signed is verified for ever
    "key_encryption_keys": "SELECT, INSERT, UPDATE",  # a key that was retired must never be forgotten
    "key_encryption_key_holders": _READ_WRITE,
    "alembic_version": "SELECT",
}


def apply_grants(connection: Connection) -> None:
    """Set the rights of the application role to exactly the table above; nothing where there is no such role.

    Every upgrade does it, not one revision: the role may be made after the schema. An upgrade to an earlier revision
    lacks the tables of later ones.
    """
    if connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :name"), {"name": APPLICATION_ROLE}) is None:
        return
    for table, rights in _GRANTS.items():
        if connection.scalar(text("SELECT to_regclass(:table)"), {"table": table}) is None:
            continue
        connection.execute(text(f"REVOKE ALL ON TABLE {table} FROM {APPLICATION_ROLE}"))
        connection.execute(text(f"GRANT {rights} ON TABLE {table} TO {APPLICATION_ROLE}"))
