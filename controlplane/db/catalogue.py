"""What PostgreSQL's catalogue says of row-level security: asked at every start, and by the tests (I2).

Policies bind neither a superuser nor a role with BYPASSRLS, and whoever owns a table can switch them off. So the
service refuses to run as such a role, and on tables from which somebody has taken the policies away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db.row_security import TENANT_SETTING
from controlplane.db.session import Database
from saltern.errors import FailedPreconditionError

#: Tables without a row of any tenant, and what is in them; every other one has row-level security.
TABLES_OF_NO_TENANT: Final[Mapping[str, str]] = {
    "alembic_version": "the revision of the schema",
    "audit_checkpoint_keys": "the deployment's keys that sign checkpoints of all chains",
    "bootstrap": "the hash of the deployment's one-time token",
    "key_encryption_key_holders": "running control planes, and which keys they hold",
    "key_encryption_keys": "the deployment's keys that secrets of all tenants are wrapped under",
    "metered_processes": "how far the reports of each process of a node were taken in",
    "metering_state": "which hours of usage are closed, for every tenant",
    "nodes": "the platform's cache nodes, which serve every tenant",
    "policy_state": "the version of the policy of all tenants",
    "signing_keys": "the deployment's keys that sign tokens",
}
#: A table with one of these columns holds what is a tenant's.
TENANT_COLUMNS: Final = ("tenant_id", "chain")

_HINT: Final = "make a second role that owns the schema; docs/operating.md has the statements for both"
_MEMBER_OF = """
    SELECT role.rolname FROM pg_roles AS role WHERE {what} AND pg_has_role(current_user, role.oid, 'MEMBER')
    ORDER BY role.rolname <> current_user, role.rolname LIMIT 1
"""
_SUPERUSER: Final = text(_MEMBER_OF.format(what="role.rolsuper"))
_BYPASSING: Final = text(_MEMBER_OF.format(what="role.rolbypassrls"))
_OWNED: Final = text(
    """
    SELECT relname FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND pg_has_role(current_user, relowner, 'MEMBER') ORDER BY relname LIMIT 1
    """
)
_UNPROTECTED: Final = text(
    """
    SELECT relname FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
    AND NOT (relrowsecurity AND relforcerowsecurity)
    AND (relname = 'tenants' OR EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = pg_class.oid AND attname = ANY(:columns) AND NOT attisdropped
    ))
    ORDER BY relname LIMIT 1
    """
)


async def require_row_security(database: Database) -> None:
    """Return if row-level security binds the role that ``database`` connects as.

    Raises:
        FailedPreconditionError: reason DATABASE_ROLE_TOO_STRONG: the role can pass row-level security by;
            ROW_SECURITY_MISSING: a table of tenants is without it; DATABASE_ROLE_PRESET: the role's sessions start
            with a tenant set, so that a forgotten scope would find rows.
        sqlalchemy.exc.DBAPIError: as ``Database.transaction``.
    """
    async with database.transaction() as session:
        role = await session.scalar(text("SELECT current_user"))
        await _require_bound(session, str(role))
        unprotected = await session.scalar(_UNPROTECTED, {"columns": list(TENANT_COLUMNS)})
        if unprotected is not None:
            raise FailedPreconditionError(
                f"the table {unprotected} holds rows of tenants and has no row-level security, or not forced",
                reason="ROW_SECURITY_MISSING",
                hint=f"as its owner: ALTER TABLE {unprotected} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; "
                "then find out who switched it off",
                metadata={"table": unprotected},
            )
        if await session.scalar(text("SELECT current_setting(:name, true)"), {"name": TENANT_SETTING}):
            raise FailedPreconditionError(
                f"sessions of the database role {role} start with {TENANT_SETTING} set",
                reason="DATABASE_ROLE_PRESET",
                hint=f"ALTER ROLE {role} RESET {TENANT_SETTING}, the same for the database and the URL's options",
                metadata={"role": str(role)},
            )


async def _require_bound(session: AsyncSession, role: str) -> None:
    found = {
        "it is a superuser, or can become {}": await session.scalar(_SUPERUSER),
        "it has BYPASSRLS, or can become {}": await session.scalar(_BYPASSING),
        "it owns the table {}": await session.scalar(_OWNED),
    }
    for why, name in found.items():
        if name is not None:
            raise FailedPreconditionError(
                f"the service must not use the database role {role}: row-level security would not bind it, because "
                + why.format(name),
                reason="DATABASE_ROLE_TOO_STRONG",
                hint=_HINT,
                metadata={"role": role},
            )
