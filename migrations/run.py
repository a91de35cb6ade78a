"""Run the migrations on a database: all of them in one transaction, by one process at a time.

PostgreSQL has transactional DDL, so a failed upgrade leaves the schema as it was. Two control planes that start
together take turns by an advisory lock. Locks on tables are waited for briefly only: a migration that queues behind a
long transaction would block everybody who comes after it.

What goes on beside a newer schema is said by the schema itself: a revision whose description says "Additive" lets
releases of before go on, and after every upgrade a comment on the table of revisions names the oldest release that may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy import URL, Connection, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from controlplane.db.row_security import EVERY_TENANT, TENANT_SETTING
from controlplane.db.session import sqlalchemy_url
from migrations.grants import apply_grants
from saltern.errors import FailedPreconditionError, UnavailableError

#: Any constant that nothing else in the database uses.
_ADVISORY_LOCK_ID = 0x53414C5445524E
_TURN_TIMEOUT_MS = 120_000
_LOCK_TIMEOUT_MS = 5_000
_STATEMENT_TIMEOUT_MS = 60_000
#: SQLSTATE: a lock was not free in time, or was waited for crosswise.
_LOCKED = frozenset({"55P03", "40P01"})
_QUERY_CANCELED = "57014"
_TABLE = "alembic_version"
_OLDEST_BESIDE = "saltern: oldest release beside this schema: "


class SchemaFit(StrEnum):
    """How a schema stands to this release."""

    CURRENT = "current"
    #: A later release has upgraded it, and this one may go on meanwhile.
    NEWER = "newer"
    #: A later release has upgraded it, and this one cannot work with it.
    TOO_NEW = "too new"
    #: It lacks what this release needs.
    OLDER = "older"


def upgrade(url: str | URL, revision: str = "head") -> None:
    """Bring the schema to ``revision`` and give the application role its rights; does nothing where it is there.

    Args:
        url: the database, as the role that owns the schema (``postgresql://...``). Another role will do where the
            schema is that of this release already.

    Raises:
        FailedPreconditionError: reason MIGRATION_ROLE_REQUIRED: the schema is to change and is not this role's.
            SCHEMA_TOO_NEW: a later release has upgraded it, and this one cannot work with it.
        UnavailableError: the database cannot be reached, or a lock was not free in time (MIGRATION_LOCKED), or a
            statement took too long (MIGRATION_TOO_SLOW); nothing is changed, and it can be tried again.
        InvalidArgumentError: the URL is not one of a PostgreSQL database.
    """
    with _migrating(url) as connection:
        if _fit_of(connection) is SchemaFit.NEWER:
            return
        if not _owns_schema(connection):
            _require_current_schema(connection)
            return
        _require_known_schema(connection)
        command.upgrade(_config(connection), revision)
        _say_who_may_go_on(connection)
        apply_grants(connection)


def downgrade(url: str | URL, revision: str = "base") -> None:
    """Take the schema back to ``revision``; raises as ``upgrade`` does, and where that would lose rows."""
    with _migrating(url) as connection:
        _require_known_schema(connection)
        command.downgrade(_config(connection), revision)
        _say_who_may_go_on(connection)


def current_revision(url: str | URL) -> str | None:
    """The revision that the schema is at; None for a database without one."""
    with _transaction(url) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str:
    """The newest revision that this release knows."""
    head = ScriptDirectory.from_config(_config(None)).get_current_head()
    assert head is not None, "the package carries at least one revision"
    return head


def schema_fit(found: str | None, comment: str | None) -> SchemaFit:
    """How a schema at revision ``found``, with ``comment`` on its table of revisions, stands to this release."""
    known = _known_revisions()
    if found == known[0]:
        return SchemaFit.CURRENT
    if found is None or found in known:
        return SchemaFit.OLDER
    oldest = re.fullmatch(re.escape(_OLDEST_BESIDE) + r"(\w+)", comment or "")
    return SchemaFit.NEWER if oldest is not None and oldest[1] in known else SchemaFit.TOO_NEW


#: What ``schema_fit`` is asked with: one row of two columns; any role may read them.
SCHEMA_QUERY = f"SELECT (SELECT version_num FROM {_TABLE}), obj_description(to_regclass('{_TABLE}'), 'pg_class')"  # noqa: S608


def _fit_of(connection: Connection) -> SchemaFit:
    if connection.scalar(text("SELECT to_regclass(:table)"), {"table": _TABLE}) is None:
        return SchemaFit.OLDER
    found, comment = connection.execute(text(SCHEMA_QUERY)).one()
    return schema_fit(found, comment)


def _require_known_schema(connection: Connection) -> None:
    if _fit_of(connection) is SchemaFit.TOO_NEW:
        found = MigrationContext.configure(connection).get_current_revision() or ""
        raise FailedPreconditionError(
            f"the schema is at revision {found}, which is of a later release, and this release ({head_revision()}) "
            "cannot work with it",
            reason="SCHEMA_TOO_NEW",
            hint="start the later release, or take the schema back with it first",
            metadata={"found": found, "wanted": head_revision()},
        )


def _say_who_may_go_on(connection: Connection) -> None:
    """Note the oldest release that may go on beside this schema: the last revision that is not additive, or the first.

    A revision is what a release has as its newest; so whoever knows that one has everything that was not additive.
    """
    if connection.scalar(text("SELECT to_regclass(:table)"), {"table": _TABLE}) is None:
        return
    found = MigrationContext.configure(connection).get_current_revision()
    oldest = ""
    for script in _scripts():  # newest first
        oldest = script.revision if found is not None and script.revision <= found else oldest
        if oldest and not is_additive(script.doc, script.longdoc):
            break
    comment = f"'{_OLDEST_BESIDE}{oldest}'" if oldest else "NULL"
    connection.execute(text(f"COMMENT ON TABLE {_TABLE} IS {comment}"))


def is_additive(*description: str) -> bool:
    """Whether a revision says that releases of before go on beside it."""
    return any(re.search(r"^Additive\b", part, re.MULTILINE) for part in description)


@cache
def _known_revisions() -> tuple[str, ...]:
    """Of this release, newest first. What a release knows does not change while it runs."""
    return tuple(script.revision for script in _scripts())


def _scripts() -> list[Script]:
    """Every revision of this release, newest first."""
    return list(ScriptDirectory.from_config(_config(None)).walk_revisions())


def _owns_schema(connection: Connection) -> bool:
    """Whether the role of ``connection`` may migrate: it owns the tables, or may make the first of them."""
    owner = text("SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('alembic_version')")
    owns_tables = connection.scalar(owner)
    if owns_tables is None:
        owns_tables = connection.scalar(text("SELECT has_schema_privilege(current_schema(), 'CREATE')"))
    return bool(owns_tables)


def _require_current_schema(connection: Connection) -> None:
    found, wanted = MigrationContext.configure(connection).get_current_revision(), head_revision()
    if found != wanted:
        raise FailedPreconditionError(
            f"the schema is at revision {found or 'none'}, this release needs {wanted}, and this database role does "
            "not own it",
            reason="MIGRATION_ROLE_REQUIRED",
            hint="set SALTERN_MIGRATION_DATABASE_URL to the URL of the role that owns the schema",
            metadata={"found": found or "", "wanted": wanted},
        )


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


@contextmanager
def _migrating(url: str | URL) -> Iterator[Connection]:
    """A transaction in which nobody else migrates."""
    with _transaction(url) as connection:
        _set_timeouts(connection, lock_ms=_TURN_TIMEOUT_MS, statement_ms=_TURN_TIMEOUT_MS)
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _ADVISORY_LOCK_ID})
        _set_timeouts(connection, lock_ms=_LOCK_TIMEOUT_MS, statement_ms=_STATEMENT_TIMEOUT_MS)
        # Row-level security binds the owner too: without this a revision would look for rows and find none.
        connection.execute(text("SELECT set_config(:name, :all, true)"), {"name": TENANT_SETTING, "all": EVERY_TENANT})
        yield connection


def _require_utf8(connection: Connection) -> None:
    """Names for people and audit events hold any text; the hash of an event is over its UTF-8."""
    encoding = connection.scalar(text("SELECT current_setting('server_encoding')"))
    if encoding != "UTF8":
        raise FailedPreconditionError(
            f"the database has the encoding {encoding}, and the service needs UTF8",
            reason="DATABASE_ENCODING",
            hint="make it anew: CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0",
            metadata={"encoding": str(encoding)},
        )


@contextmanager
def _transaction(url: str | URL) -> Iterator[Connection]:
    engine = create_engine(
        sqlalchemy_url(url),
        poolclass=NullPool,
        # In a database of another encoding text comes as it lies there: read as UTF-8, so that it can be refused.
        connect_args={"connect_timeout": 5, "application_name": "saltern-migrations", "client_encoding": "utf8"},
    )
    try:
        with engine.begin() as connection:
            _require_utf8(connection)
            yield connection
    except OperationalError as error:
        sqlstate = getattr(error.orig, "sqlstate", None)
        if sqlstate == _QUERY_CANCELED:
            raise UnavailableError(
                "a statement of the migration took too long; the schema is unchanged",
                reason="MIGRATION_TOO_SLOW",
                hint="start again when the database has less to do",
            ) from error
        if sqlstate in _LOCKED:
            raise UnavailableError(
                "the migration did not get a lock in time; the schema is unchanged",
                reason="MIGRATION_LOCKED",
                hint="end long transactions on this database (pg_stat_activity shows them), then start again",
            ) from error
        raise UnavailableError(
            "cannot reach the database to migrate it",
            reason="DATABASE_UNAVAILABLE",
            hint="check that PostgreSQL runs and that SALTERN_MIGRATION_DATABASE_URL or SALTERN_DATABASE_URL is right",
        ) from error
    finally:
        engine.dispose()


def _set_timeouts(connection: Connection, *, lock_ms: int, statement_ms: int) -> None:
    for name, value_ms in (("lock_timeout", lock_ms), ("statement_timeout", statement_ms)):
        connection.execute(text("SELECT set_config(:name, :value, true)"), {"name": name, "value": str(value_ms)})
