"""The root command and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from saltern import tracing
from saltern.cli.audit import audit
from saltern.cli.credential import key
from saltern.cli.deferred import DeferredCommand, ServerCommand
from saltern.cli.failure import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    error_json,
    error_lines,
    exit_code,
    one_line,
    say,
)
from saltern.cli.key_encryption import key_encryption_key
from saltern.cli.namespace import namespace
from saltern.cli.node import node
from saltern.cli.quota import quota
from saltern.cli.salt import salt
from saltern.cli.settings import OUTPUT_JSON, Group, settings_of
from saltern.cli.share import share
from saltern.cli.signing import token
from saltern.cli.tenant import tenant
from saltern.cli.trace import trace
from saltern.cli.usage import usage
from saltern.errors import InvalidArgumentError, SalternError

_COMPLETION_VARIABLE = "_SALTERN_COMPLETE"  # as in saltern.cli.completion, which is imported only where it is needed
_EPILOG = (
    "Commands find a local `saltern up` by themselves. Elsewhere: --control HOST:PORT --api-key-file FILE. "
    'Completion: eval "$(saltern completion bash)" (or zsh, fish).'
)


@click.group(cls=Group, epilog=_EPILOG)
@click.version_option(package_name="saltern", prog_name="saltern")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Saltern: one shared KV cache for many tenants, each with its own walls."""
    settings = settings_of(ctx)
    # Commands that a server package brings have options of their own; a global --data-dir reaches them as a default.
    if settings.data_dir is not None:
        ctx.default_map = {"up": {"data_dir": str(settings.data_dir)}}


@cli.group(cls=Group)
def serve() -> None:
    """Run one server process (for service managers; `up` runs a whole local stack)."""


serve.add_command(ServerCommand("control", "serve-control", "Serve the control plane over a Postgres database."))
serve.add_command(ServerCommand("node", "serve-node", "Serve one cache node."))
serve.add_command(ServerCommand("rewrap", "serve-rewrap", "Wrap every secret of a database under the newest key."))
for command in (
    ServerCommand("up", "up", "Run control plane, Postgres and nodes on this machine until stopped."),
    tenant,
    namespace,
    quota,
    salt,
    share,
    key,
    token,
    key_encryption_key,
    usage,
    DeferredCommand("top", "saltern.cli.top:top", "Watch who uses the cache now, and how."),
    node,
    audit,
    trace,
    DeferredCommand("replay", "saltern.cli.replay:replay", "Say what a cache would do for recorded traffic."),
    DeferredCommand("plan", "saltern.cli.plan:plan", "Say how much cache a target takes, for recorded traffic."),
    DeferredCommand("apply", "saltern.cli.apply:apply", "Make a deployment what files say."),
    DeferredCommand("export-config", "saltern.cli.apply:export_config", "Write tenants as a file for apply."),
    DeferredCommand("completion", "saltern.cli.completion:completion", "Print what makes a shell complete."),
    DeferredCommand("doctor", "saltern.cli.doctor:doctor", "Check everything between here and the cache."),
    DeferredCommand("demo", "saltern.demo.command:demo", "Show two tenants on one node, end to end, with proofs."),
    DeferredCommand("bench", "saltern.bench.command:bench", "Measure speed beside the machine's own limits."),
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; the only place that turns an error into one."""
    if _COMPLETION_VARIABLE in os.environ:
        from saltern.cli.completion import complete

        complete(cli.main)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show must not end the command
            stream.reconfigure(errors="backslashreplace")
    try:
        # Not cli.main(): that has exit codes of its own for a reader that went away.
        with _tracing(arguments), cli.make_context("saltern", list(arguments)) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except Exception as error:
        if "--debug" in arguments or os.environ.get("SALTERN_DEBUG"):
            say("".join(traceback.format_exception(error)), err=True, nl=False)
        return _report(error, arguments)
    except KeyboardInterrupt:
        say("interrupted", err=True)
        return EXIT_INTERRUPTED


@contextmanager
def _tracing(arguments: Sequence[str]) -> Iterator[None]:
    """A span for the command, where traces are wanted; of its words only those that name it. Servers make their own."""
    words: list[str] = []
    group: click.Command | None = cli
    for word in arguments:
        if isinstance(group, click.Group) and word in group.commands:
            words.append(word)
            group = group.commands[word]
    if not tracing.is_wanted() or words[:1] in (["serve"], ["up"]):
        yield
        return
    stop = tracing.start("saltern-cli")
    try:
        with tracing.span(" ".join(["saltern", *words])):
            yield
    finally:
        stop()


def _report(error: Exception, arguments: Sequence[str]) -> int:
    match error:
        case SalternError():
            say(error_json(error) if _wants_json(arguments) else error_lines(error), err=True)
            return exit_code(error)
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return EXIT_USAGE
        case click.Abort():
            say("interrupted", err=True)
            return EXIT_INTERRUPTED
        case click.ClickException():
            return _report(_usage_error(error), arguments)
        case OSError() if error.errno == errno.EPIPE:
            # The reader of our output went away (`saltern audit list | head`): nothing is left to say, to nobody.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        case _:
            kind = type(error).__name__
            say(f"error: {kind}: {one_line(str(error))[:500]}", err=True)
            say("hint: this is a fault of ours; run it again with --debug and report what it shows", err=True)
            return EXIT_INTERNAL


def _usage_error(error: click.ClickException) -> InvalidArgumentError:
    """Wrong use as an error of the tree; the hint is the parser's own or names the help to read."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "saltern"
    hint = getattr(error, "hint", "") or f"see `{command} --help`"
    return InvalidArgumentError(error.format_message(), reason="USAGE", hint=hint)


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether errors go out as JSON; also decided where parsing failed before the options were known."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in {"--output", "-o"}:
            return (value or "".join(arguments[index + 1 : index + 2])) == OUTPUT_JSON
        if argument == f"-o{OUTPUT_JSON}":
            return True
    return os.environ.get("SALTERN_OUTPUT") == OUTPUT_JSON
