"""``saltern replay``: what a cache would do for recorded traffic, what it costs, and when it pays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from saltern.cli.interrupts import terminated_as_interrupted
from saltern.cli.parameters import SizeParameter
from saltern.cli.replay_calibrate import calibrate
from saltern.cli.replay_options import FILE, engines_option, html_option, profile_options, profiles_of, traffic_options
from saltern.cli.report_file import write_report
from saltern.cli.settings import Group, settings_of
from saltern.errors import InvalidArgumentError

# The engine and the loaders are imported when a command runs, so that help is quick.
if TYPE_CHECKING:
    from saltern.replay.engines import ReplayEngine
    from saltern.replay.results import Column
    from saltern.replay.setup import ReplaySetup, TenantQuota
    from saltern.traces.request import Trace

_COLUMNS = ("no-cache", "cold", "warm", "shared", "after-restart", "node-lost")
_RUN = "run"
_MEASURED_OPTIONS = ("block_bytes", "in_flight", "speed", "transport")


class _ReplayGroup(Group):
    """``saltern replay TRACE`` is ``saltern replay run TRACE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


@click.group("replay", cls=_ReplayGroup)
def replay() -> None:
    """Replay recorded traffic: hits, transfer, tail latency, fairness, failures and cost, together.

    `saltern replay TRACE...` is `saltern replay run TRACE...`.
    """


@replay.command(_RUN)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "--engine",
    "engine_name",
    type=click.Choice(("simulated", "measured")),
    default="simulated",
    show_default=True,
    help="In virtual time, or on real nodes that are started for it.",
)
@click.option("--column", "columns", multiple=True, type=click.Choice(_COLUMNS), help="Only these. [default: all]")
@profile_options
@click.option(
    "--calibrate",
    "calibration",
    type=FILE,
    metavar="FILE",
    help="Fit the prefill time model to measured times to first token, see `saltern replay calibrate`.",
)
@engines_option
@click.option(
    "--routing",
    type=click.Choice(("round-robin", "session", "prefix")),
    default="round-robin",
    show_default=True,
    help="How requests find an engine.",
)
@click.option(
    "--engine-cache-tokens", type=click.IntRange(0), default=0, metavar="N", help="What each engine keeps itself."
)
@click.option("--nodes", type=click.IntRange(1), default=8, show_default=True, help="Cache nodes.")
@click.option("--node-memory", type=SizeParameter(), default="1TiB", show_default=True, help="Of each node.")
@click.option("--node-ssd", type=SizeParameter(), default="0", help="SSD of each node. [default: none]")
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="TENANT[,[ssd-]reserved=SIZE][,[ssd-]limit=SIZE][,weight=N]",
    help="Of a tenant, over all nodes.",
)
@click.option(
    "--eviction",
    type=click.Choice(("two-queue", "lru", "fifo")),
    default="two-queue",
    show_default=True,
    help="As `saltern serve node` has it.",
)
@click.option(
    "--reservations",
    type=click.Choice(("strict", "earning")),
    default="strict",
    show_default=True,
    help="As `saltern serve node` has it.",
)
@click.option(
    "--use",
    type=click.Choice(("client", "chain")),
    default="client",
    show_default=True,
    help="What a request does to the order of eviction: as the SDK, or as reference hit rates.",
)
@click.option("--slo-ttft", type=click.FloatRange(0), default=10.0, show_default=True, metavar="S", help="Target.")
@click.option("--slo-end-to-end", type=click.FloatRange(0), metavar="S", help="Target. [default: none]")
@click.option("--think-scale", type=click.FloatRange(0), default=1.0, metavar="X", help="Tool delays times X.")
@click.option("--think-cap", type=click.FloatRange(0), metavar="S", help="Tool delays of at most S.")
@click.option(
    "--restart",
    type=click.Choice(("lost", "kept")),
    default="lost",
    show_default=True,
    help="What nodes have after a restart: nothing, or what they had.",
)
@click.option(
    "--restart-seconds",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="S",
    help="How long they are away.",
)
@traffic_options
@click.option(
    "--block-bytes", type=SizeParameter(), help="Measured: bytes that stand for one block, at most its own. [64KiB]"
)
@click.option("--in-flight", type=click.IntRange(1, 64), metavar="N", help="Measured: prompts at once. [default: 8]")
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Measured: seconds of traffic in one second. [default: as fast as nodes answer]",
)
@click.option(
    "--transport", type=click.Choice(("auto", "rdma", "shm", "tcp")), help="Measured: as of the SDK. [default: auto]"
)
@click.option("--json", "json_file", type=FILE, help="Write the report here, for `saltern replay diff`.")
@click.option("--csv", "csv_file", type=FILE, help="Write all figures here, one on each line.")
@html_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    traces: Sequence[str],
    engine_name: str,
    columns: Sequence[str],
    requests: int | None,
    block_tokens: int | None,
    seed: int,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Replay traces column by column: in virtual time through the node's own code, or on real nodes.

    A TRACE is a file, NAME=FILE[,KEY=VALUE...] for one tenant of several (as `saltern trace compose --tenant`), or a
    YAML composition. Ctrl-C prints what is known so far; a second one ends it at once. `--engine measured` starts a
    control plane and nodes of its own on this machine, moves real bytes through the SDK, restarts and kills nodes, and
    removes all of it afterwards; prefill is modelled.

    \b
    saltern replay conversation.jsonl.gz --engines 8 --nodes 4 --node-memory 1TiB
    saltern replay chat=conversation.jsonl.gz agent=sessions.jsonl.gz,think-cap=60 --block-tokens 512
    """
    from saltern.cli.replay_tables import print_report
    from saltern.replay.assemble import run_replay
    from saltern.replay.html import report_page
    from saltern.replay.results import Column, encode_report
    from saltern.replay.rows import to_csv

    settings = settings_of(ctx)
    engine = _engine(engine_name, options, _say if sys.stderr.isatty() and not settings.json else lambda _: None)
    trace = traces_of(traces, requests=requests, block_tokens=block_tokens, seed=seed)
    setup = _setup(options, seed)
    wanted = [Column(name) for name in columns or _COLUMNS]

    def progress(column: Column, served: int) -> None:
        if not settings.json and sys.stderr.isatty():
            click.echo(f"\r{column}: {served:,} requests\x1b[K", err=True, nl=False)

    with terminated_as_interrupted():
        report, ended = run_replay(trace, setup, wanted, engine, progress)
    if not settings.json and sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)
    if json_file is not None:
        write_report(json_file, encode_report(report))
    if csv_file is not None:
        write_report(csv_file, to_csv(report).encode())
    if html_file is not None:
        write_report(html_file, report_page(report).encode())
    print_report(settings, report)
    if ended is not None:
        raise ended


@replay.command("diff")
@click.argument("first", type=FILE, metavar="A.json")
@click.argument("second", type=FILE, metavar="B.json")
@html_option
@click.option(
    "--across-experiments", is_flag=True, help="Compare reports of other traffic or of another engine all the same."
)
@click.pass_context
def diff(ctx: click.Context, /, *, first: Path, second: Path, html_file: Path | None, across_experiments: bool) -> None:
    """Compare two reports that `--json` wrote: first what they were made with, then what came out.

    Reports of other traffic or of another engine are refused (exit code 5) after their differences were shown.
    """
    from saltern.cli import replay_diff
    from saltern.replay.diff import compare_reports, require_same_experiment
    from saltern.replay.html import diff_page
    from saltern.replay.results import read_report

    settings = settings_of(ctx)
    comparison = compare_reports(
        read_report(first), read_report(second), first_name=str(first), second_name=str(second)
    )
    if not settings.json:
        replay_diff.print_differences(settings, comparison)
    if not across_experiments:
        require_same_experiment(comparison)
    if html_file is not None:
        write_report(html_file, diff_page(comparison).encode())
    if settings.json:
        replay_diff.print_json_comparison(comparison)
    else:
        replay_diff.print_changes(settings, comparison)


replay.add_command(calibrate)


def traces_of(names: Sequence[str], *, requests: int | None, block_tokens: int | None, seed: int) -> Trace:
    """One trace of all that was named.

    Raises:
        InvalidArgumentError, NotFoundError: as loading and composing do.
    """
    from saltern.cli.trace_parts import parse_tenant
    from saltern.traces import compose
    from saltern.traces.compositions import Composition, build, read_composition
    from saltern.traces.load import load_trace
    from saltern.traces.options import LoadOptions
    from saltern.traces.request import Identity

    if len(names) == 1 and names[0].endswith((".yaml", ".yml")):
        path = Path(names[0])
        trace = build(read_composition(path), path.parent)
    elif len(names) == 1 and "=" not in names[0]:
        trace = load_trace(Path(names[0]), LoadOptions(block_tokens=block_tokens, seed=seed))
    else:
        parts = [parse_tenant(name if "=" in name else f"{_stem(name)}={name}") for name in names]
        if len(dict(parts)) < len(parts):
            raise InvalidArgumentError(
                "two traces of one name", reason="INVALID_COMPOSITION", hint="name them apart: NAME=FILE"
            )
        trace = build(Composition(tenants=dict(parts), block_tokens=block_tokens, seed=seed), Path())
    if block_tokens is not None and trace.identity is not Identity.NONE and trace.block_tokens != block_tokens:
        trace = compose.reblock(trace, block_tokens)
    return trace if requests is None else compose.take(trace, requests)


def _stem(name: str) -> str:
    """A tenant's name for a file that has none."""
    stem = Path(name).name.partition(".")[0].lower()
    return "".join(letter if letter.isalnum() else "-" for letter in stem).strip("-") or "trace"


def _engine(name: str, options: dict[str, Any], say: Callable[[str], None]) -> ReplayEngine:
    """The engine of this name; raises InvalidArgumentError where an option is of the other one."""
    from saltern.replay.engines import find_engine
    from saltern.replay.results import EngineKind

    given = {key: value for key in _MEASURED_OPTIONS if (value := options[key]) is not None}
    kind = EngineKind(name)
    if kind is EngineKind.MEASURED:
        from saltern.replay.measured.engine import MeasuredEngine
        from saltern.replay.measured.options import MeasuredOptions

        return MeasuredEngine(MeasuredOptions(**given), say)
    if given:
        raise InvalidArgumentError(
            f"--{next(iter(given)).replace('_', '-')} is of measured replays",
            reason="INVALID_REPLAY",
            hint="add --engine measured, or leave it out",
        )
    return find_engine(kind)


def _say(text: str) -> None:
    click.echo(f"\r{text}\x1b[K", err=True, nl=False)


def _setup(options: dict[str, Any], seed: int) -> ReplaySetup:
    from saltern.replay.setup import ReplaySetup, Restart, Routing, Slo, ToolDelays, Use

    profiles = profiles_of(options["profiles"])
    model, hardware = profiles.model(options["model"]), profiles.machine(options["hardware"])
    if (calibration := options.get("calibration")) is not None:
        from saltern.replay.calibrate import calibrated

        model, hardware = calibrated(calibration, model, hardware)
    return ReplaySetup(
        model=model,
        hardware=hardware,
        nodes=options["nodes"],
        node_bytes=options["node_memory"],
        node_ssd_bytes=options["node_ssd"],
        engines=options["engines"],
        routing=Routing(options["routing"]),
        engine_cache_tokens=options["engine_cache_tokens"],
        quotas=dict(map(parse_quota, options["quotas"])),
        eviction=options["eviction"],
        reservations=options["reservations"],
        use=Use(options["use"]),
        slo=Slo(ttft_s=options["slo_ttft"], end_to_end_s=options["slo_end_to_end"]),
        delays=ToolDelays(scale=options["think_scale"], cap_s=options["think_cap"]),
        restart=Restart(options["restart"]),
        restart_s=options["restart_seconds"],
        seed=seed,
    ).checked()


def parse_quota(text: str) -> tuple[str, TenantQuota]:
    """``TENANT,reserved=SIZE,limit=SIZE,ssd-reserved=SIZE,ssd-limit=SIZE,weight=N`` as (tenant, quota).

    Raises:
        InvalidArgumentError: another form, or a size or weight that is none.
    """
    from saltern.replay.setup import TenantQuota
    from saltern.sizes import parse_size

    tenant, *settings = text.split(",")
    found: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in ("reserved", "limit", "ssd-reserved", "ssd-limit"):
            found[f"{key.replace('-', '_')}_bytes"] = parse_size(value)
        elif key == "weight" and value.isdecimal() and 1 <= int(value) <= 1000:
            found["weight"] = int(value)
        else:
            raise InvalidArgumentError(
                f"--quota {text!r} has {setting!r}",
                reason="INVALID_REPLAY",
                hint="write TENANT,reserved=SIZE,limit=SIZE,ssd-reserved=SIZE,ssd-limit=SIZE,weight=1..1000",
            )
    return tenant, TenantQuota(**found)
