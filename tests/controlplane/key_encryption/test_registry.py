"""No column of wrapped secrets is forgotten: neither by the registry, nor by the guards in the database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Column, LargeBinary, MetaData, Table

from controlplane.db.models import Base
from controlplane.key_encryption.registry import WRAPPED_COLUMNS
from tests.support.control import migrate

#: Columns of bytes that hold no wrapped secret, and what they hold.
OTHER_BYTES = {
    "api_keys.secret_sha256": "a hash",
    "api_keys.previous_secret_sha256": "a hash",
    "audit_checkpoint_keys.public_key": "public",
    "audit_events.hash": "a hash",
    "audit_events.previous_hash": "a hash",
    "bootstrap.token_sha256": "a hash",
    "console_sessions.cookie_sha256": "a hash",
    "console_sessions.sealed": "what only the browser's cookie opens, for eight hours at most",
    "key_encryption_keys.sealed_key": "a key that a key management service has encrypted under its own",
    "request_log.request_sha256": "a hash",
    "request_log.response": "an answer, without secrets",
}
_GUARDS = """
    SELECT tgrelid::regclass::text || '.' || rtrim(encode(tgargs, 'escape'), '\\000')
    FROM pg_trigger WHERE tgfoid = 'refuse_retired_key_encryption_key'::regproc AND tgenabled = 'O'
"""


def unregistered(metadata: MetaData) -> set[str]:
    """Columns of bytes that are neither registered nor listed above."""
    registered = {f"{wrapped.table}.{wrapped.column.key}" for wrapped in WRAPPED_COLUMNS}
    columns = {
        f"{table.name}.{column.name}"
        for table in metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, LargeBinary)
    }
    assert registered <= columns, "a line of the registry outlives its column"
    return columns - registered - set(OTHER_BYTES)


def test_i12_every_column_of_bytes_is_registered_or_listed_with_its_reason() -> None:
    assert unregistered(Base.metadata) == set()


def test_one_that_is_forgotten_is_found() -> None:
    planted = MetaData()
    for table in Base.metadata.tables.values():
        table.to_metadata(planted)
    Table("forgotten", planted, Column("wrapped_thing", LargeBinary))

    assert unregistered(planted) == {"forgotten.wrapped_thing"}


def test_i12_every_registered_column_has_its_guard_in_the_database(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls, postgres.server.connect("superuser", urls.name) as connection:
        guarded = {row[0] for row in connection.execute(_GUARDS).fetchall()}
    assert guarded == {f"{wrapped.table}.{wrapped.column.key}" for wrapped in WRAPPED_COLUMNS}


@pytest.mark.parametrize("wrapped", WRAPPED_COLUMNS, ids=lambda wrapped: wrapped.table)
def test_a_table_has_one_wrapped_column_at_most(wrapped: Any) -> None:
    assert sum(other.table == wrapped.table for other in WRAPPED_COLUMNS) == 1
