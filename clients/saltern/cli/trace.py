"""``saltern trace``: look into trace files, and make one of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from saltern.cli.charts import sparkline
from saltern.cli.failure import say
from saltern.cli.render import Table, make_console, print_json
from saltern.cli.settings import Group, Settings, settings_of
from saltern.errors import InvalidArgumentError, SalternError

# The loaders are imported when a command runs, so that help is quick.
if TYPE_CHECKING:
    from saltern.traces.request import Trace
    from saltern.traces.summary import Counts, Summary

_FILE = click.Path(path_type=Path)
_BLOCK_TOKENS = click.IntRange(1, 1_048_576)


@click.group("trace", cls=Group)
def trace() -> None:
    """Look into recorded traffic, and compose traces of several tenants from it."""


@trace.command()
@click.argument("file", type=_FILE)
@click.option("--format", "file_format", metavar="NAME", help="Format, if not found by the first line.")
@click.option(
    "--block-tokens",
    type=_BLOCK_TOKENS,
    metavar="N",
    help="Block size of ids in the file, or of the blocks to make of texts.",
)
@click.option("--sort", is_flag=True, help="Put requests in order of time (up to a million).")
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Look at the first N only.")
@click.option(
    "--input-tokens", type=click.IntRange(0), default=0, metavar="N", help="ServeGen: length of every prompt."
)
@click.option("--output-tokens", type=click.IntRange(0), default=0, metavar="N", help="ServeGen: of every answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="ServeGen: of the drawn arrivals.")
@click.pass_context
def show(
    ctx: click.Context,
    *,
    file: Path,
    file_format: str | None,
    block_tokens: int | None,
    sort: bool,
    requests: int | None,
    input_tokens: int,
    output_tokens: int,
    seed: int,
) -> None:
    """Say what is in a trace: kind, sha256, sizes, what its prompts share, when requests arrive."""
    from saltern.traces import compose
    from saltern.traces.load import load_trace, parse_format
    from saltern.traces.options import LoadOptions

    options = LoadOptions(
        block_tokens=block_tokens, sort=sort, input_tokens=input_tokens, output_tokens=output_tokens, seed=seed
    )
    loaded = load_trace(file, options, file_format=parse_format(file_format) if file_format else None)
    _summarise(settings_of(ctx), loaded if requests is None else compose.take(loaded, requests))


@trace.command("compose")
@click.argument("composition", type=_FILE, required=False)
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    metavar="NAME=FILE[,KEY=VALUE...]",
    help="A tenant from a trace file. Keys: format, shift, scale, clip=START..END, requests, burst=EVERY/LENGTH, "
    "think-scale, think-cap, shared, groups, session-every, gap-max, read-block-tokens, input-tokens, output-tokens, "
    "spacing, sort. Times in seconds.",
)
@click.option(
    "--scan",
    "scans",
    multiple=True,
    metavar="NAME,rate=R,seconds=S,tokens=N",
    help="A tenant that never asks for anything twice.",
)
@click.option("--block-tokens", type=_BLOCK_TOKENS, metavar="N", help="Block size of all of it.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), metavar="S", help="Stop after S seconds of it.")
@click.option("--seed", type=int, metavar="N", help="Of everything drawn by chance; 0 by default.")
@click.option(
    "--output-file",
    type=_FILE,
    metavar="FILE",
    help="Write the requests here as JSON lines, gzip if it ends in .gz, and their provenance beside it.",
)
@click.pass_context
def compose_command(
    ctx: click.Context,
    *,
    composition: Path | None,
    tenants: Sequence[str],
    scans: Sequence[str],
    block_tokens: int | None,
    seconds: float | None,
    seed: int | None,
    output_file: Path | None,
) -> None:
    """Make one trace of several tenants, from a YAML file or from options, and say what is in it.

    \b
    saltern trace compose mix.yaml --output-file mix.jsonl.gz
    saltern trace compose --tenant chat=conversation.jsonl.gz,clip=0..900 \\
        --tenant agent=sessions.jsonl.gz,think-cap=60 --scan scan,rate=0.5,seconds=900,tokens=32768 \\
        --block-tokens 512
    """
    from saltern.cli.trace_parts import parse_scan, parse_tenant
    from saltern.traces.compositions import Clip, Composition, build, read_composition
    from saltern.traces.write import write_trace

    if (composition is None) == (not tenants and not scans):
        raise InvalidArgumentError(
            "cannot compose without parts, or from a file and options at once",
            reason="INVALID_COMPOSITION",
            hint="name a YAML file, or tenants by --tenant and --scan",
        )
    if composition is not None:
        wanted, folder = read_composition(composition), composition.parent
    else:
        parts = dict(map(parse_tenant, tenants)) | dict(map(parse_scan, scans))
        if len(parts) != len(tenants) + len(scans):
            raise InvalidArgumentError("two tenants of one name", reason="INVALID_COMPOSITION", hint="name them apart")
        wanted, folder = Composition(tenants=parts), Path()
    composed = build(
        Composition(
            tenants=wanted.tenants,
            block_tokens=wanted.block_tokens if block_tokens is None else block_tokens,
            seed=wanted.seed if seed is None else seed,
            clip=wanted.clip if seconds is None else Clip(end_s=seconds),
        ),
        folder,
    )
    if output_file is not None:
        written = write_trace(composed, output_file)
        say(f"wrote {written.requests} requests to {output_file}, sha256 {written.sha256}", err=True)
    _summarise(settings_of(ctx), composed)


def _summarise(settings: Settings, loaded: Trace) -> None:
    """Count and print; where counting ends early, print what is known so far and pass on why."""
    from saltern.traces.summary import Summary

    summary = Summary(loaded)
    try:
        summary.read()
    except (SalternError, KeyboardInterrupt):
        with suppress(BrokenPipeError):
            _print(settings, summary)
        raise
    _print(settings, summary)


def _print(settings: Settings, summary: Summary) -> None:
    if settings.json:
        print_json(summary.to_dict())
        return
    for rows in (_facts(summary), _sharing(summary)):
        table = Table()
        for row in rows:
            table.add(*row)
        table.print(settings)
        say()
    if len(summary.tenants) > 1:
        _print_tenants(settings, summary)
        say()
    bins = summary.arrivals.bins()
    console = make_console(settings)
    say(f"arrivals, {_duration(summary.arrivals.bin_s)} each, at most {max(bins, default=0)} requests")
    say(sparkline([float(count) for count in bins], encoding=console.encoding))
    if not summary.complete:
        say("NOT COMPLETE: what is above was read before the trace or the command ended")


def _facts(summary: Summary) -> list[tuple[str, Any]]:
    provenance = summary.trace.provenance
    rows: list[tuple[str, Any]] = [
        ("trace", summary.trace.name),
        ("kind", f"{provenance.format}, {summary.trace.arrival} arrivals"),
        ("sha256", provenance.sha256),
    ]
    for part in provenance.parts:
        rows.append((f"  {Path(part.source).name}", part.sha256))
        rows.extend(("", f"{step}") for step in part.steps)
    rows.extend(("step", step) for step in provenance.steps)
    if provenance.seed is not None:
        rows.append(("seed", provenance.seed))
    total = summary.total
    rows += [
        ("requests", f"{total.requests:,} in {_duration(summary.duration_s)}"),
        ("sessions", f"{summary.sessions:,} and {summary.subagents:,} sub-agents" if summary.sessions else "-"),
        ("input tokens", f"{total.input_tokens:,}{_mean(total.input_tokens, total.requests)}"),
        ("output tokens", f"{total.output_tokens:,}{_mean(total.output_tokens, total.requests)}"),
    ]
    return rows


def _sharing(summary: Summary) -> list[tuple[str, Any]]:
    loaded, total = summary.trace, summary.total
    rows: list[tuple[str, Any]] = [("prefix identity", f"{loaded.identity}: {loaded.identity_note}")]
    if not loaded.block_tokens:
        return [*rows, ("hit rate", "unknown: ids are synthesised only when asked (compose, shared=TOKENS)")]
    if not summary.countable:
        return [*rows, ("hit rate", "not counted: too many distinct blocks; --requests N looks at fewer")]
    rows += [
        ("block size", f"{loaded.block_tokens} tokens"),
        ("blocks", f"{total.blocks:,}, {total.unique_blocks:,} of them distinct"),
        ("infinite hit rate", f"{total.infinite_hit_rate:.4f} of prompt tokens, by a cache without end"),
    ]
    if summary.without_blocks:
        rows.append(("without blocks", f"{summary.without_blocks:,} requests, shorter than a block"))
    return rows


def _print_tenants(settings: Settings, summary: Summary) -> None:
    right = ("REQUESTS", "INPUT TOKENS", "BLOCKS", "DISTINCT", "INFINITE HIT RATE")
    table = Table("TENANT", *right, right=right)
    told = summary.countable and bool(summary.trace.block_tokens)
    for name, counts in sorted(summary.tenants.items()):
        table.add(name or "-", *_tenant_cells(counts, told))
    table.print(settings)


def _tenant_cells(counts: Counts, told: bool) -> list[str]:
    return [
        f"{counts.requests:,}",
        f"{counts.input_tokens:,}",
        f"{counts.blocks:,}",
        f"{counts.unique_blocks:,}" if told else "-",
        f"{counts.infinite_hit_rate:.4f}" if told else "-",
    ]


def _mean(tokens: int, requests: int) -> str:
    return f", {tokens / requests:,.0f} on average" if requests else ""


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds:,.3g} s" if seconds < 120 else f"{seconds / 60:,.1f} min"
