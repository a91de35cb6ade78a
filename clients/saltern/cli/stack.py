"""How a command finds the control plane and a credential for it.

1. ``--control`` with ``--api-key-file`` (or their environment variables; ``SALTERN_API_KEY`` may hold the key itself);
2. else the local stack of ``saltern up``: ``run.json`` in its data directory names the endpoint and the admin's key.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from saltern.cli.settings import Settings, default_data_dir, settings_of
from saltern.cli.waiting import remember_client
from saltern.errors import FailedPreconditionError, PermissionDeniedError, UnauthenticatedError, UnavailableError

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient, ApiKey
    from saltern.tls import ClientTls

_RUN_FILE_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """Where to call, with which credential, and whom to trust there (None: plain text).

    ``source`` says in words how it was found.
    """

    control: str
    api_key: ApiKey
    source: str
    tls: ClientTls | None = None


def read_run_file(data_dir: Path) -> dict[str, Any]:
    """Read the ``run.json`` of a running local stack.

    Raises:
        UnavailableError: none is running there. PermissionDeniedError: it is another user's.
        FailedPreconditionError: the file is damaged.
    """
    path = data_dir / "run.json"
    try:
        with path.open("rb") as file:
            content = file.read(_RUN_FILE_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise UnavailableError(
            f"no Saltern runs on the data directory {str(data_dir)!r}",
            reason="NO_LOCAL_STACK",
            hint="start one with `saltern up`, or name a control plane: --control HOST:PORT --api-key-file FILE",
        ) from None
    except (OSError, ValueError) as error:
        raise PermissionDeniedError(
            f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            reason="RUN_FILE_NOT_READABLE",
            hint="run as the user that started `saltern up`, or pass --control and --api-key-file",
        ) from None
    try:
        run = json.loads(content)
        types = {"control_endpoint": str, "admin_api_key_file": str, "pid": int}
        if any(type(run[name]) is not kind for name, kind in types.items()):
            raise ValueError("ill-typed")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FailedPreconditionError(
            f"{str(path)!r} is not what `saltern up` writes",
            reason="RUN_FILE_DAMAGED",
            hint="stop the stack, remove the file and start `saltern up` again",
        ) from None
    if not Path("/proc", str(run["pid"])).exists():
        # The stack was killed. Its port may be anybody's by now, and the admin's key must not go there.
        raise UnavailableError(
            f"the Saltern on the data directory {str(data_dir)!r} has ended without a word",
            reason="NO_LOCAL_STACK",
            hint="start it again with `saltern up`",
        )
    return dict(run)


def find_target(settings: Settings) -> Target:
    """Find the control plane and the credential; raises SalternError with what to pass where something is missing."""
    from saltern.admin_client import ApiKey, read_api_key

    api_key: ApiKey | None = None
    if settings.api_key_file is not None:
        api_key = read_api_key(settings.api_key_file)
    elif secret := os.environ.get("SALTERN_API_KEY"):
        api_key = ApiKey(secret)
    if settings.control is not None:
        if api_key is None:
            raise UnauthenticatedError(
                f"no API key was given for the control plane {settings.control[:128]!r}",
                reason="NO_API_KEY",
                hint="pass --api-key-file FILE, or set SALTERN_API_KEY_FILE or SALTERN_API_KEY",
            )
        return Target(settings.control, api_key, "--control", settings.tls)
    data_dir = settings.data_dir or default_data_dir()
    run = read_run_file(data_dir)
    return Target(
        run["control_endpoint"],
        api_key or read_api_key(Path(run["admin_api_key_file"])),
        f"local stack in {data_dir}",
        settings.tls or run_file_tls(run),
    )


def run_file_tls(run: dict[str, Any]) -> ClientTls | None:
    """Whom to trust at a local stack of ``saltern up --tls``; None for one that serves plain text."""
    if not run.get("tls_ca"):
        return None
    from saltern.tls import ClientTls

    return ClientTls(Path(str(run["tls_ca"])))


def connect(ctx: click.Context) -> AdminClient:
    """An AdminClient for this command, closed when the command ends."""
    from saltern.admin_client import AdminClient

    settings = settings_of(ctx)
    target = find_target(settings)
    client = AdminClient(target.control, target.api_key, deadline_ms=settings.deadline_ms, tls=target.tls)
    ctx.call_on_close(client.close)
    remember_client(ctx, client)
    return client
