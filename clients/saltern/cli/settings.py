"""Options that every command has, before or after its name: ``saltern --output json usage`` is
``saltern usage --output json``. Environment variables stand in for those that are not given."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from saltern.tls import ClientTls

OUTPUT_TABLE: Final = "table"
OUTPUT_JSON: Final = "json"
DEADLINE_DEFAULT_MS: Final = 10_000
_DEADLINE_MAX_MS: Final = 3_600_000


@dataclass(slots=True)
class Settings:
    """What the global options say; commands get it as ``ctx.obj``."""

    control: str | None = None
    api_key_file: Path | None = None
    tls_ca: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    data_dir: Path | None = None
    output: str = OUTPUT_TABLE
    deadline_ms: int = DEADLINE_DEFAULT_MS
    no_color: bool = False
    debug: bool = False

    @property
    def json(self) -> bool:
        return self.output == OUTPUT_JSON

    @property
    def tls(self) -> ClientTls | None:
        """TLS as the options say it, None for plain text; raises InvalidArgumentError where part of it is missing."""
        if self.tls_ca is None and self.tls_cert is None and self.tls_key is None and not self.tls_server_name:
            return None
        from saltern.tls import client_tls

        return client_tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)


def settings_of(ctx: click.Context) -> Settings:
    """The invocation's one Settings, made on first use."""
    return ctx.find_root().ensure_object(Settings)


def default_data_dir() -> Path:
    """Where ``saltern up`` keeps its data when nothing else is said."""
    if os.geteuid() == 0:
        return Path("/var/lib/saltern")
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "saltern"


def global_options() -> list[click.Option]:
    """Fresh instances of the global options, each of which writes into :class:`Settings`."""
    path = click.Path(path_type=Path)

    def option(*names: str, **attributes: Any) -> click.Option:
        return GlobalOption(names, expose_value=False, callback=_store, **attributes)

    return [
        option("--control", metavar="HOST:PORT", help="Control plane to talk to.", envvar="SALTERN_CONTROL"),
        option(
            "--api-key-file",
            type=path,
            metavar="FILE",
            help="File that holds the API key; SALTERN_API_KEY may hold the key itself.",
            envvar="SALTERN_API_KEY_FILE",
        ),
        option(
            "--tls-ca",
            metavar="FILE",
            help="Use TLS with control plane and nodes, trusting this authority; 'system' for the system's.",
            envvar="SALTERN_TLS_CA",
        ),
        option(
            "--tls-cert",
            type=path,
            metavar="FILE",
            help="Certificate to show where clients need one.",
            envvar="SALTERN_TLS_CERT",
        ),
        option("--tls-key", type=path, metavar="FILE", help="Its private key.", envvar="SALTERN_TLS_KEY"),
        option(
            "--tls-server-name",
            metavar="NAME",
            help="Name in the control plane's certificate, if not that of --control.",
            envvar="SALTERN_TLS_SERVER_NAME",
        ),
        option(
            "--data-dir",
            type=path,
            metavar="DIR",
            help="Data of a local `saltern up`, used without --control: its run.json says where it is.",
            envvar="SALTERN_DATA_DIR",
        ),
        option(
            "--output",
            "-o",
            type=click.Choice([OUTPUT_TABLE, OUTPUT_JSON]),
            help="Tables for people, proto JSON for programs.",
            envvar="SALTERN_OUTPUT",
        ),
        option(
            "--deadline-ms",
            type=click.IntRange(1, _DEADLINE_MAX_MS),
            metavar="MS",
            help=f"Longest wait for each call; {DEADLINE_DEFAULT_MS} by default.",
            envvar="SALTERN_DEADLINE_MS",
        ),
        option("--no-color", is_flag=True, default=None, help="No colours; NO_COLOR does the same."),
        option("--debug", is_flag=True, default=None, help="Show the traceback of an error.", envvar="SALTERN_DEBUG"),
    ]


class GlobalOption(click.Option):
    """Marks an option as global, so that help shows it apart."""


def _store(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    settings, name = settings_of(ctx), str(option.name)
    # An option on the command line beats the environment, wherever either is looked at.
    from_environment = ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT
    if value is None or (from_environment and ctx.parent is not None):
        return
    setattr(settings, name, value)


class _WithGlobalOptions(click.Command):
    """A command that also takes the global options and lists them apart in its help."""

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        attributes.setdefault("context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 110})
        attributes["params"] = [*(attributes.get("params") or ()), *global_options()]
        super().__init__(name, **attributes)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        everywhere: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                (everywhere if isinstance(parameter, GlobalOption) else own).append(record)
        for title, records in (("Options", own), ("Options of every command", everywhere)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        format_examples(ctx, formatter)


def format_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """What ends every help: examples, where there are any, and the exit codes."""
    from saltern.cli.examples import examples_of
    from saltern.cli.failure import EXIT_CODES_TEXT

    if examples := examples_of(ctx.command_path):
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")  # as it is typed, however long
    with formatter.section("Exit codes"):
        formatter.write_text(EXIT_CODES_TEXT)


class Command(_WithGlobalOptions):
    """A leaf command of ours."""


class Group(_WithGlobalOptions, click.Group):
    """A group of ours: its commands are :class:`Command` and its groups :class:`Group` unless they say otherwise."""

    command_class = Command
    group_class = type

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        super().format_options(ctx, formatter)
