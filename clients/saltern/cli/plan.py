"""``saltern plan``: how much cache a target takes, for recorded traffic."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from saltern.cli.interrupts import terminated_as_interrupted
from saltern.cli.parameters import SizeParameter
from saltern.cli.replay import traces_of
from saltern.cli.replay_options import FILE, engines_option, html_option, profile_options, profiles_of, traffic_options
from saltern.cli.report_file import write_report
from saltern.cli.settings import Command, settings_of

# The engine and the loaders are imported when the command runs, so that help is quick.
if TYPE_CHECKING:
    from saltern.replay.setup import ReplaySetup


@click.command("plan", cls=Command)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "--hit-rate", type=click.FloatRange(0, 1, min_open=True), metavar="RATE", help="Target: of prompt tokens."
)
@click.option(
    "--slo-ttft-ms", type=click.FloatRange(0, min_open=True), metavar="MS", help="Target: time to first token."
)
@click.option(
    "--slo-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.95,
    show_default=True,
    metavar="SHARE",
    help="Of requests that must meet it.",
)
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), metavar="USD", help="Target: what the store may cost an hour."
)
@profile_options
@engines_option
@click.option(
    "--node-memory", type=SizeParameter(), default="1TiB", show_default=True, help="The most that one node may have."
)
@click.option(
    "--node-ssd", type=SizeParameter(), default="0", help="The most SSD that one node may have. [default: none]"
)
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Of blocks to make curves of, where a trace has more than memory holds.",
)
@traffic_options
@click.option("--json", "json_file", type=FILE, help="Write the plan here.")
@click.option("--csv", "csv_file", type=FILE, help="Write the curves here, one point on each line.")
@html_option
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    *,
    traces: Sequence[str],
    hit_rate: float | None,
    slo_ttft_ms: float | None,
    slo_share: float,
    budget: float | None,
    model: str,
    hardware: str,
    profiles: Sequence[Path],
    engines: int,
    node_memory: int,
    node_ssd: int,
    sample: float,
    requests: int | None,
    block_tokens: int | None,
    seed: int,
    json_file: Path | None,
    csv_file: Path | None,
    html_file: Path | None,
) -> None:
    """Suggest memory, SSD and reservations of each tenant and the number of nodes, for traffic and a target.

    The suggestion is simulated before it is made: both the predicted and the simulated hit rate are told, and where
    the target cannot be reached, why. All targets that are named must hold. A TRACE is as for `saltern replay`.
    Ctrl-C prints what is known so far; a second one ends it at once.
    """
    from saltern.cli import plan_tables
    from saltern.replay.engines import find_engine
    from saltern.replay.html.plan_page import plan_page
    from saltern.replay.plan import make_plan
    from saltern.replay.plan_results import PlanTarget, encode_plan, plan_csv
    from saltern.replay.results import EngineKind
    from saltern.replay.setup import ReplaySetup

    settings = settings_of(ctx)
    target = PlanTarget(
        hit_rate=hit_rate,
        slo_ttft_s=None if slo_ttft_ms is None else slo_ttft_ms / 1000,
        slo_share=slo_share,
        budget_usd_per_hour=budget,
    )
    target.check()
    known = profiles_of(profiles)
    base = ReplaySetup(
        model=known.model(model),
        hardware=known.machine(hardware),
        node_bytes=node_memory,
        node_ssd_bytes=node_ssd,
        engines=engines,
        seed=seed,
    )
    shows_progress = not settings.json and sys.stderr.isatty()

    def progress(said: str) -> None:
        if shows_progress:
            click.echo(f"\r{said}\x1b[K", err=True, nl=False)

    engine = find_engine(EngineKind.SIMULATED)
    trace = traces_of(traces, requests=requests, block_tokens=block_tokens, seed=seed)
    with terminated_as_interrupted():
        made = make_plan(trace, base, target, engine, progress, sampled=sample)
    progress("")
    if json_file is not None:
        write_report(json_file, encode_plan(made))
    if csv_file is not None:
        write_report(csv_file, plan_csv(made).encode())
    if html_file is not None:
        write_report(html_file, plan_page(made).encode())
    plan_tables.print_plan(settings, made, replay_command(traces, made.setup, requests, block_tokens))
    if not made.complete:
        raise KeyboardInterrupt


def replay_command(
    traces: Sequence[str], setup: ReplaySetup, requests: int | None = None, block_tokens: int | None = None
) -> str:
    """The command that replays all columns with what is suggested."""
    words = ["saltern", "replay", *traces, "--model", setup.model.name, "--hardware", setup.hardware.name]
    words += ["--engines", str(setup.engines), "--nodes", str(setup.nodes), "--node-memory", str(setup.node_bytes)]
    if setup.node_ssd_bytes:
        words += ["--node-ssd", str(setup.node_ssd_bytes)]
    for name, quota in setup.quotas.items():
        if name and (quota.reserved_bytes or quota.ssd_reserved_bytes):
            ssd = f",ssd-reserved={quota.ssd_reserved_bytes}" if quota.ssd_reserved_bytes else ""
            words += ["--quota", f"{name},reserved={quota.reserved_bytes or 0}{ssd}"]
    if requests is not None:
        words += ["--requests", str(requests)]
    if block_tokens is not None:
        words += ["--block-tokens", str(block_tokens)]
    return shlex.join(words)
