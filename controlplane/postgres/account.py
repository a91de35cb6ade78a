"""The unprivileged account PostgreSQL runs as, and which folders that account can pass through."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from saltern.errors import FailedPreconditionError

# PostgreSQL refuses to run as root. "postgres" is there where a system package made it; "nobody" is there always.
UNPRIVILEGED_NAMES = ("postgres", "nobody")


@dataclass(frozen=True)
class ServerAccount:
    """User and group of the server process; supplementary groups are dropped."""

    name: str
    uid: int
    gid: int

    @property
    def is_self(self) -> bool:
        """True where the server runs as the user that the launcher runs as."""
        return self.uid == os.geteuid()

    def can_pass(self, folder: Path) -> bool:
        """True where the mode bits of ``folder`` let this account look up names in it."""
        info = folder.stat()
        if info.st_uid == self.uid:
            return bool(info.st_mode & stat.S_IXUSR)
        if info.st_gid == self.gid:
            return bool(info.st_mode & stat.S_IXGRP)
        return bool(info.st_mode & stat.S_IXOTH)

    def first_barrier(self, folder: Path) -> Path | None:
        """The outermost of ``folder`` and its parents that this account cannot pass, or None.

        Raises:
            OSError: ``folder`` does not exist.
        """
        resolved = folder.resolve(strict=True)
        if self.is_self:
            return None
        return next((part for part in (*reversed(resolved.parents), resolved) if not self.can_pass(part)), None)


def choose_account(cluster: Path) -> ServerAccount:
    """The account to run the server as: ourselves, or for root the owner of ``cluster``, else an unprivileged one.

    An existing cluster keeps its owner, also where a "postgres" user has appeared since it was made.

    Raises:
        FailedPreconditionError: the cluster belongs to somebody else, or root finds no unprivileged user.
    """
    owner_uid = cluster.stat().st_uid if cluster.exists() else None
    own_uid = os.geteuid()
    if own_uid != 0:
        if owner_uid is not None and owner_uid != own_uid:
            raise FailedPreconditionError(
                f"the database in {cluster} belongs to user {_name_of(owner_uid)}, "
                f"this process runs as {_name_of(own_uid)}",
                reason="POSTGRES_WRONG_USER",
                hint="run as that user or as root, or choose another --data-dir",
            )
        return ServerAccount(_name_of(own_uid), own_uid, os.getegid())
    if owner_uid:
        try:
            return _account(pwd.getpwuid(owner_uid))
        except KeyError:  # a volume from another machine: a number without a name is as good
            return ServerAccount(str(owner_uid), owner_uid, cluster.stat().st_gid)
    for name in UNPRIVILEGED_NAMES:
        try:
            return _account(pwd.getpwnam(name))
        except KeyError:
            continue
    raise FailedPreconditionError(
        f"PostgreSQL refuses to run as root and none of the users {', '.join(UNPRIVILEGED_NAMES)} exists here",
        reason="POSTGRES_NO_UNPRIVILEGED_USER",
        hint="create one of them, run as an ordinary user, or set SALTERN_DATABASE_URL to a running server",
    )


def check_data_dir_reachable(data_dir: Path, account: ServerAccount) -> None:
    """Raise FailedPreconditionError, naming the folder, where ``account`` cannot pass through to ``data_dir``."""
    barrier = account.first_barrier(data_dir)
    if barrier is None:
        return
    info = barrier.stat()
    raise FailedPreconditionError(
        f"PostgreSQL runs as user {account.name}, which cannot pass through {barrier} "
        f"(mode {stat.S_IMODE(info.st_mode):04o}, owner {_name_of(info.st_uid)}) to reach {data_dir}",
        reason="POSTGRES_DATA_DIR_UNREACHABLE",
        hint=f"choose a --data-dir outside it, such as /var/lib/saltern, or run: chmod o+x {barrier}",
    )


def _account(entry: pwd.struct_passwd) -> ServerAccount:
    return ServerAccount(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
