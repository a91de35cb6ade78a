"""What guards a column of wrapped secrets: ``guard_wrapped("my_table", "wrapped_thing")`` after ``op.create_table``.

A row that is wrapped under a key that has retired is refused by PostgreSQL itself. So once nothing is under such a key,
nothing ever will be: not by a control plane that slept, nor by one that was started with yesterday's key. Every column
that is guarded belongs into ``controlplane.secrets.registry``; a test holds both to be the same.

The trigger holds ``LOCK`` shared to the end of the transaction, and whoever retires a key takes it exclusive: then
nobody has looked before and writes afterwards.
"""

from __future__ import annotations

from typing import Final

from alembic import op

#: First number of the advisory lock, as in ``controlplane.db.locks``; the second is 0.
LOCK: Final = 11
#: What the trigger refuses with; ``controlplane.rpc`` says what it means to a caller.
SQLSTATE: Final = "SK001"
#: The id of the key follows the version byte, and JSON shows bytes as ``\x`` and two digits each.
_KEY_ID: Final = "substr(to_jsonb(NEW) ->> TG_ARGV[0], 5, 16)"

_FUNCTION: Final = f"""
    CREATE FUNCTION refuse_retired_key_encryption_key() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared({LOCK}, 0);
        IF EXISTS (SELECT FROM key_encryption_keys WHERE id = {_KEY_ID} AND retire_time IS NOT NULL) THEN
            RAISE EXCEPTION 'the key-encryption key has retired' USING ERRCODE = '{SQLSTATE}';
        END IF;
        RETURN NEW;
    END
    $$
"""


def make_guard() -> None:
    """Make the function that all guards call; the table ``key_encryption_keys`` is there."""
    op.execute(_FUNCTION)


def drop_guard() -> None:
    """Take the function away; no guard is left."""
    op.execute("DROP FUNCTION refuse_retired_key_encryption_key()")


def guard_wrapped(table: str, column: str) -> None:
    """Refuse rows of ``table`` whose ``column`` is wrapped under a key that has retired."""
    op.execute(
        f"CREATE TRIGGER {_trigger(column)} BEFORE INSERT OR UPDATE OF {column} ON {table} FOR EACH ROW"
        f" WHEN (NEW.{column} IS NOT NULL) EXECUTE FUNCTION refuse_retired_key_encryption_key('{column}')"
    )


def unguard_wrapped(table: str, column: str) -> None:
    """Undo ``guard_wrapped``, before the column or the function goes."""
    op.execute(f"DROP TRIGGER {_trigger(column)} ON {table}")


def _trigger(column: str) -> str:
    return f"{column}_not_retired"
