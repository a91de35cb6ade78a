"""The commands that this package plugs into the ``saltern`` command line (entry points ``saltern.commands``).

They raise errors of :mod:`saltern.errors`; the command line prints them and chooses the exit code.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

_PATH = click.Path(path_type=Path)


@click.command("control")
@click.option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes any free one. [127.0.0.1:7700]")
@click.option("--database-url", metavar="URL", help="PostgreSQL, as the application's role.")
@click.option("--migration-database-url", metavar="URL", help="PostgreSQL, as the role that owns the schema.")
@click.option("--state-dir", type=_PATH, help="Folder for the key-encryption key and the bootstrap token.")
@click.option("--ready-file", type=_PATH, help="Written when the process serves, removed when it stops.")
@click.option("--allow-plaintext", is_flag=True, default=None, help="Listen beyond this host without TLS.")
def serve_control(ready_file: Path | None, **given: object) -> None:
    """Serve the control plane over a Postgres database.

    Every option but --ready-file can come from the environment instead: SALTERN_CONTROL_LISTEN, SALTERN_DATABASE_URL,
    SALTERN_MIGRATION_DATABASE_URL, SALTERN_STATE_DIR, SALTERN_ALLOW_PLAINTEXT.
    """
    from controlplane.log import configure_logging
    from controlplane.server import serve
    from controlplane.settings import load_settings

    settings = load_settings(**given)
    configure_logging()
    asyncio.run(serve(settings, ready_file=ready_file))
