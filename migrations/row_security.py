"""Row-level security for a migration that makes a table: ``protect("my_table")`` after ``op.create_table``.

The rules of ``controlplane.db.row_security`` as policies of PostgreSQL. They are forced, so that they bind the owner of
the table as well: migrations see every row only because ``migrations.run`` says so for their transaction.
"""

from __future__ import annotations

from typing import Final

from alembic import op

#: The setting is read once per statement (a sub-select becomes an InitPlan), not once per row.
_SETTING: Final = "(SELECT current_setting('saltern.tenant', true))"


def protect(table: str, *, tenant: str = "tenant_id") -> None:
    """Let a transaction see and write only rows of its own tenant in ``table``; with no tenant set, none (I2, I10).

    Args:
        tenant: SQL expression over a row that gives the id of the tenant it belongs to, or NULL for a row of the
            platform, which only transactions over every tenant see.
    """
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    # In this order: what reads every tenant's rows reads many, and is done after the first comparison.
    visible = f"{_SETTING} = '*' OR {tenant} = {_SETTING}"
    op.execute(f"CREATE POLICY {_policy(table)} ON {table} USING ({visible}) WITH CHECK ({visible})")


def unprotect(table: str) -> None:
    """Undo ``protect``, for the downgrade of a migration that protects a table which stays."""
    op.execute(f"DROP POLICY {_policy(table)} ON {table}")
    op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
    op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")


def _policy(table: str) -> str:
    return f"{table}_of_tenant"
