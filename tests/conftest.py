"""Fixtures for every test: folders that PostgreSQL's user can reach, and one database server per session."""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import psycopg.sql
import pytest
import structlog
from sqlalchemy import URL

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from controlplane.postgres.roles import ensure_database

# How fast examples are made says something about the machine and what runs beside, nothing about the code.
hypothesis.settings.register_profile("saltern", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("saltern")

# A shell that starts pytest in the background has SIGINT ignored, and the processes that tests interrupt would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracebacks as servers log them: structlog's own, for people, shows every local variable, which takes seconds for some.
_RENDERER = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _RENDERER])


@dataclass(frozen=True)
class FreshDatabase:
    """URLs of one database, as the migrations' role and as the service's role."""

    name: str
    owner: URL
    app: URL


class SessionPostgres:
    """The session's server; every test that wants a database asks for a fresh one."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.server = server
        self._numbers = itertools.count(1)
        self._templates: dict[Callable[[FreshDatabase], None], str] = {}

    @contextmanager
    def fresh_database(self, prepare: Callable[[FreshDatabase], None] | None = None) -> Iterator[FreshDatabase]:
        """A database of its own, dropped at the end of the block (open connections are cut).

        ``prepare`` fills a template once per session, for example by running the migrations, and each database asked
        for with the same function is a copy of it. It must leave no connection open.
        """
        template = "template1"
        if prepare is not None:
            if prepare not in self._templates:
                filled = self._create("template1")
                prepare(filled)
                self._templates[prepare] = filled.name
            template = self._templates[prepare]
        database = self._create(template)
        try:
            yield database
        finally:
            with self.server.connect("superuser", "postgres") as connection:
                name = psycopg.sql.Identifier(database.name)
                connection.execute(psycopg.sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))

    def _create(self, template: str) -> FreshDatabase:
        name = f"test_{next(self._numbers)}"
        with self.server.connect("superuser", "postgres") as connection:
            ensure_database(connection, name, template=template)
        return FreshDatabase(name, self.server.url("owner", name), self.server.url("app", name))


@contextmanager
def _reachable_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="saltern-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def reachable_tmp_path() -> Iterator[Path]:
    """Like ``tmp_path``, but PostgreSQL's unprivileged user can pass through it: pytest's own folders are 0700."""
    with _reachable_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[SessionPostgres]:
    """One running server for the whole session."""
    with _reachable_folder() as folder, EmbeddedPostgres(PostgresConfig(folder / "postgres")) as server:
        yield SessionPostgres(server)
