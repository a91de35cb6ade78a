"""The server's roles and databases, and the file that keeps their passwords.

Three roles, so that a fault in the service cannot undo row-level security (I2):

* ``superuser``: made by initdb, used by the launcher only;
* ``owner``: owns the databases and runs the migrations;
* ``app``: what the service connects as; owns nothing, has neither SUPERUSER nor BYPASSRLS.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psycopg
from psycopg import sql

from saltern.errors import FailedPreconditionError

Role: TypeAlias = Literal["superuser", "owner", "app"]
Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

ROLE_NAMES: Mapping[Role, str] = {"superuser": "postgres", "owner": "saltern_owner", "app": "saltern_app"}
DATABASE_NAME = "saltern"
_PASSWORD_BYTES = 32


def create_passwords(path: Path) -> None:
    """Write a fresh random password for every role to ``path`` (mode 0600), whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({role: secrets.token_urlsafe(_PASSWORD_BYTES) for role in ROLE_NAMES}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_passwords(path: Path) -> dict[Role, str]:
    """The password of every role.

    Raises:
        FailedPreconditionError: the file is gone or is not what ``create_passwords`` wrote.
    """
    try:
        content = json.loads(path.read_text())
        return {role: str(content[role]) for role in ROLE_NAMES}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise FailedPreconditionError(
            f"the passwords of this database are not in {path}: it is missing or damaged",
            reason="POSTGRES_PASSWORDS_MISSING",
            hint="restore that file from a backup; without it the database beside it cannot be opened",
        ) from None


def ensure_roles(connection: Connection, passwords: Mapping[Role, str]) -> None:
    """Create the owner and app roles where missing and set what they may do, every time.

    The server receives SCRAM verifiers, so no password can reach its log or its statistics views.
    """
    for role in ("owner", "app"):
        name = ROLE_NAMES[role]
        verifier = connection.pgconn.encrypt_password(passwords[role].encode(), name.encode(), b"scram-sha-256")
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone() is None:
            connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        connection.execute(
            sql.SQL(
                "ALTER ROLE {} WITH LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD {}"
            ).format(sql.Identifier(name), sql.Literal(verifier.decode()))
        )


def ensure_database(connection: Connection, name: str, *, template: str = "template1") -> None:
    """Create database ``name`` of the owner role where missing; only the owner and app roles may connect to it.

    ``connection`` is in autocommit mode. ``template``: the database to copy, with nobody connected to it.
    """
    database, owner, app = map(sql.Identifier, (name, ROLE_NAMES["owner"], ROLE_NAMES["app"]))
    if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
        connection.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(database, owner, sql.Identifier(template))
        )
    # Not in one transaction with the line above (CREATE DATABASE allows none): said again at every start instead.
    connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))
    connection.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(database, app))
