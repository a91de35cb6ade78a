"""The command ``saltern demo``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from saltern.cli.failure import EXIT_INTERNAL, EXIT_OK, one_line
from saltern.cli.interrupts import terminated_as_interrupted
from saltern.cli.render import make_console, print_json
from saltern.cli.settings import OUTPUT_JSON, Command, Settings, settings_of
from saltern.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.progress import Progress

_REQUESTS_DEFAULT = 1000
_REQUESTS_MAX = 100_000


@click.command("demo", cls=Command)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Requests in the Mooncake JSONL form, plain or gzip. Without it: the conversation trace in the folder "
    "SALTERN_TRACES, else generated agent sessions.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default=Path("build/demo"),
    show_default=True,
    help="Where report.json goes.",
)
@click.option(
    "--requests",
    type=click.IntRange(2, _REQUESTS_MAX),
    default=_REQUESTS_DEFAULT,
    show_default=True,
    help="Requests to send, cold and again warm.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --output json.")
@click.pass_context
def demo(ctx: click.Context, *, trace: Path | None, output_dir: Path, requests: int, as_json: bool) -> int:
    """Show Saltern end to end on this machine: two tenants on one node, real bytes, and proofs.

    Starts a private stack on free ports in a temporary folder, makes two tenants with different quotas, replays agent
    traffic through the SDK cold and then warm, compares every byte, and then tries what must be refused: reading the
    other tenant's blocks, forged and expired tokens, the other's namespace, a put past the limit. Needs
    saltern-server; leaves nothing behind but DIR/report.json. Exits with 1 if a proof fails.
    """
    from saltern.demo.plan import check_memory, default_trace, load_trace, make_plan
    from saltern.demo.report import print_report, report_dict
    from saltern.demo.scenario import run_demo

    settings = settings_of(ctx)
    if as_json:
        settings.output = OUTPUT_JSON
    report_path = _prepare(output_dir)
    plan = make_plan(load_trace(trace or default_trace(), requests=requests))
    check_memory(plan)
    with terminated_as_interrupted(), _ProgressLine(settings) as progress:
        report = run_demo(plan, progress)
    document = report_dict(report)
    report_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if settings.json:
        print_json(document)
    else:
        print_report(settings, report)
        click.echo(f"Report: {report_path}")
    return EXIT_OK if report.holds else EXIT_INTERNAL


def _prepare(output_dir: Path) -> Path:
    """Make the folder before the work, and remove an old report: a run that fails must not leave a good one behind."""
    path = output_dir / "report.json"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"cannot write into {str(output_dir)!r}: {getattr(error, 'strerror', None) or error}",
            reason="FOLDER_NOT_WRITABLE",
            hint="name another folder with --output-dir",
        ) from None
    return path


class _ProgressLine:
    """Progress on stderr: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self._console = make_console(settings, stderr=True)
        self._bar: Progress | None = None

    def __enter__(self) -> _ProgressLine:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(one_line(text))

    def start_pass(self, title: str, requests: int) -> Callable[[], None]:
        if self._bar is None:
            self.say(f"replaying {requests} requests, {title}")
            return lambda: None
        bar, task = self._bar, self._bar.add_task(f"replaying, {title}", total=requests)
        return lambda: bar.advance(task)
