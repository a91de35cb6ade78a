"""The control plane's database: the tables (``models``), the one way to use them (``session``), and what they share."""

from controlplane.db.policy import (
    POLICY_CHANNEL,
    bump_policy_version,
    bump_policy_versions,
    note_policy_version,
    raised_policy_version,
    versions_of,
)
from controlplane.db.row_security import PlatformScope, Scope, ServiceScope, ServiceTask, TenantScope, scope_of
from controlplane.db.session import Database, connect, sqlalchemy_url

__all__ = [
    "POLICY_CHANNEL",
    "Database",
    "PlatformScope",
    "Scope",
    "ServiceScope",
    "ServiceTask",
    "TenantScope",
    "bump_policy_version",
    "bump_policy_versions",
    "connect",
    "note_policy_version",
    "raised_policy_version",
    "scope_of",
    "sqlalchemy_url",
    "versions_of",
]
