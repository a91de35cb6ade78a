"""The commands that this package plugs into the ``saltern`` command line (entry points ``saltern.commands``).

They raise errors of :mod:`saltern.errors`; the command line prints them and chooses the exit code.
"""

from __future__ import annotations

import asyncio
import shlex
from datetime import timedelta
from pathlib import Path

import click

from controlplane.tier_below import ENGINES, tier_below
from saltern import tracing
from saltern.cli.parameters import DURATION, SIZE

_PATH = click.Path(path_type=Path)


@click.command("control")
@click.option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes any free one. [127.0.0.1:7700]")
@click.option(
    "--metrics-listen", metavar="HOST:PORT", help="Metrics and health over HTTP; 'off' for none. [127.0.0.1:7704]"
)
@click.option("--console-listen", metavar="HOST:PORT", help="Serve the console to browsers there. [off]")
@click.option("--console-prices", type=_PATH, help="Price file, by which the console says what usage costs.")
@click.option("--database-url", metavar="URL", help="PostgreSQL, as the application's role.")
@click.option("--migration-database-url", metavar="URL", help="PostgreSQL, as the role that owns the schema.")
@click.option("--state-dir", type=_PATH, help="Folder for the key-encryption key and the bootstrap token.")
@click.option(
    "--kms-endpoint", metavar="unix:///PATH", help="Socket of a KMS v2 plug-in that seals key-encryption keys."
)
@click.option(
    "--signing-key-max-age", type=DURATION, help="A new key signs tokens after so long: 1h to 366d. [default: 30d]"
)
@click.option(
    "--audit-checkpoint-dir", type=_PATH, help="Folder for signed checkpoints of the audit trail. [in --state-dir]"
)
@click.option(
    "--audit-checkpoint-url", metavar="s3://BUCKET/FOLDER", help="Keep them in an object store instead, written once."
)
@click.option(
    "--audit-checkpoint-interval-s", type=float, metavar="SECONDS", help="How often audit chains are signed. [60]"
)
@click.option("--ready-file", type=_PATH, help="Written when the process serves, removed when it stops.")
@click.option("--tls-cert", type=_PATH, help="Certificate and chain, PEM; read again when it changes. [plain text]")
@click.option("--tls-key", type=_PATH, help="Its private key; nobody else may read it.")
@click.option("--tls-client-ca", type=_PATH, help="Turn away clients without a certificate of this authority.")
@click.option("--allow-plaintext", is_flag=True, default=None, help="Listen beyond this host without TLS.")
@click.option(
    "--allow-unbound-node-keys",
    is_flag=True,
    default=None,
    help="Take node keys that were made without --node, for any node; until they are replaced.",
)
def serve_control(ready_file: Path | None, signing_key_max_age: timedelta | None, **given: object) -> None:
    """Serve the control plane over a Postgres database.

    Every option but --ready-file can come from the environment instead: SALTERN_CONTROL_LISTEN,
    SALTERN_CONTROL_METRICS_LISTEN, SALTERN_CONSOLE_LISTEN, SALTERN_CONSOLE_PRICES, SALTERN_DATABASE_URL,
    SALTERN_MIGRATION_DATABASE_URL, SALTERN_STATE_DIR, SALTERN_KMS_ENDPOINT, SALTERN_CONTROL_TLS_CERT,
    SALTERN_CONTROL_TLS_KEY, SALTERN_CONTROL_TLS_CLIENT_CA, SALTERN_ALLOW_PLAINTEXT, SALTERN_ALLOW_UNBOUND_NODE_KEYS,
    SALTERN_SIGNING_KEY_MAX_AGE_S (in seconds). A URL with a password in it should: everybody on the host can read a
    command line.
    """
    import uvloop

    from controlplane.log import configure_logging
    from controlplane.server import serve
    from controlplane.settings import load_settings
    from saltern.core_files import forbid_core_files

    age_s = None if signing_key_max_age is None else round(signing_key_max_age.total_seconds())
    settings = load_settings(**given, signing_key_max_age_s=age_s)
    forbid_core_files()
    configure_logging()
    stop_tracing = tracing.start("saltern-control")
    try:
        uvloop.run(serve(settings, ready_file=ready_file))
    finally:
        stop_tracing()


@click.command("rewrap")
@click.option("--database-url", metavar="URL", help="PostgreSQL, as the application's role.")
@click.option("--state-dir", type=_PATH, help="Folder with the file of key-encryption keys.")
@click.option("--kms-endpoint", metavar="unix:///PATH", help="Socket of a KMS v2 plug-in.")
@click.option("--rotate", is_flag=True, help="First begin to use a key that was appended, or a new one of the KMS.")
def serve_rewrap(*, rotate: bool, **given: object) -> None:
    """Wrap every secret of a database under the newest key-encryption key; ends with a count of what each key has.

    For a database whose control planes are stopped; beside running ones it helps them. It can be killed at any moment
    and run again. While control planes run, `saltern key-encryption-key rotate` is all that is needed.
    """
    from controlplane.key_encryption.offline import rewrap
    from controlplane.log import configure_logging
    from controlplane.settings import load_settings
    from saltern.core_files import forbid_core_files

    settings = load_settings(**given)
    forbid_core_files()
    configure_logging()
    asyncio.run(rewrap(settings, click.echo, rotate=rotate))


@click.command("up")
@click.option(
    "--data-dir",
    type=_PATH,
    envvar="SALTERN_DATA_DIR",
    help="Where everything is kept. [root: /var/lib/saltern, else ~/.local/share/saltern]",
)
@click.option("--nodes", type=click.IntRange(0, 64), default=1, show_default=True, help="Number of cache nodes.")
@click.option("--dram", type=SIZE, default="1GiB", show_default=True, help="Cache memory of each node.")
@click.option("--ssd", type=SIZE, help="What each node may keep below DRAM. [default: nothing]")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=ENGINES[0],
    show_default=True,
    help="Who keeps that: files in the data directory, or a Mooncake store, sealed.",
)
@click.option("--mooncake-master", metavar="HOST:PORT", help="Master of the Mooncake store.")
@click.option(
    "--warm/--cold",
    default=False,
    show_default=True,
    help="Keep DRAM in /dev/shm when stopped, until the next start or reboot; it serves what it held then.",
)
@click.option(
    "--tls", is_flag=True, help="Serve over TLS, with a certificate authority of its own in the data directory."
)
@click.option(
    "--ports",
    type=click.Choice(["fixed", "auto"]),
    default="fixed",
    show_default=True,
    help="fixed: 7700 and up; auto: any free ports, for a second stack on this machine.",
)
@click.option(
    "--database-url",
    metavar="URL",
    envvar="SALTERN_DATABASE_URL",
    help="A PostgreSQL to use instead of a private one; with a password in it, set SALTERN_DATABASE_URL instead. "
    "The role that owns the schema goes into SALTERN_MIGRATION_DATABASE_URL.",
)
def up(
    *,
    data_dir: Path | None,
    nodes: int,
    dram: int,
    ssd: int | None,
    engine: str,
    mooncake_master: str | None,
    warm: bool,
    tls: bool,
    ports: str,
    database_url: str | None,
) -> None:
    """Run control plane, Postgres and nodes on this machine until stopped."""
    from controlplane.up import StackOptions, run_stack
    from saltern.cli.settings import default_data_dir

    options = StackOptions(
        data_dir=(data_dir or default_data_dir()).expanduser().absolute(),
        nodes=nodes,
        dram_bytes=dram,
        below=tier_below(engine, ssd, mooncake_master),
        warm=warm,
        fixed_ports=ports == "fixed",
        command="saltern" if data_dir is None else f"saltern --data-dir {shlex.quote(str(data_dir))}",
        database_url=database_url,
        tls=tls,
    )
    asyncio.run(run_stack(options, click.echo, lambda line: click.echo(line, err=True)))
