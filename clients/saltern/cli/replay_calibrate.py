"""``saltern replay calibrate``: the prefill time model from measured times to first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from saltern.cli.render import Table, print_json
from saltern.cli.report_file import write_report
from saltern.cli.settings import Command, Settings, settings_of

if TYPE_CHECKING:
    from saltern.replay.calibrate import Fit

_FILE = click.Path(path_type=Path)
#: Samples that are shown: all of a small file, the farthest off of a large one.
_SHOWN_MAX = 20


@click.command("calibrate", cls=Command)
@click.argument("file", type=_FILE, metavar="FILE")
@click.option("--model", default="llama-3-70b", show_default=True, metavar="NAME", help="Profile of what was measured.")
@click.option("--hardware", default="8xa800", show_default=True, metavar="NAME", help="Profile of the engine.")
@click.option("--profile", "profiles", multiple=True, type=_FILE, help="JSON file of profiles of your own.")
@click.option("--name", default="calibrated", show_default=True, help="What the fitted profiles are called.")
@click.option("--write", "output_file", type=_FILE, metavar="FILE", help="Write them here, for --profile.")
@click.pass_context
def calibrate(
    ctx: click.Context,
    /,
    *,
    file: Path,
    model: str,
    hardware: str,
    profiles: Sequence[Path],
    name: str,
    output_file: Path | None,
) -> None:
    """Fit prefill times to measured ones: overhead, a linear and a quadratic term, none of them negative.

    FILE is CSV with the heading prompt_tokens,cached_tokens,ttft_ms, or JSON objects with these names, one on each line
    or in one list. Measure one prompt at a time on an idle engine, short and long ones, some with a part cached: a wait
    in a queue would be taken for prefill.

    \b
    saltern replay calibrate ttft.csv --model qwen3-8b --hardware 1xh100 --write mine.json
    saltern replay conversation.jsonl.gz --profile mine.json --model calibrated --hardware calibrated
    """
    import msgspec

    from saltern.replay.calibrate import fit, read_samples
    from saltern.replay.profiles import builtin_profiles, read_profiles

    settings = settings_of(ctx)
    known = builtin_profiles()
    for path in profiles:
        known = read_profiles(path).over(known)
    found = fit(read_samples(file))
    fitted = found.profiles(name, known.model(model), known.machine(hardware), file.name)
    if output_file is not None:
        write_report(output_file, msgspec.json.format(msgspec.json.encode(fitted), indent=2) + b"\n")
    if settings.json:
        print_json(_document(found) | {"profiles": msgspec.to_builtins(fitted)})
        return
    _print_fit(settings, found)
    click.echo(f"efficiency {fitted.hardware[name].efficiency:.3f} of the peak of {hardware}")
    if output_file is not None:
        click.echo(f"written: {output_file}; use it by --profile {output_file} --model {name} --hardware {name}")


def _document(found: Fit) -> dict[str, Any]:
    return {
        "samples": len(found.samples),
        "overheadS": found.overhead_s,
        "linearSPerToken": found.linear_s,
        "attentionSPerPair": found.attention_s,
        "rSquared": found.r_squared,
        "rmsS": found.rms_s,
        "meanRelativeError": found.mean_relative_error,
        "residuals": [
            {**sample._asdict(), "residual_s": residual}
            for sample, residual in zip(found.samples, found.residuals_s, strict=True)
        ],
    }


def _print_fit(settings: Settings, found: Fit) -> None:
    table = Table()
    table.add("TTFT in ms", "overhead + linear (n - p) + attention (n^2 - p^2), n tokens of which p are cached")
    table.add("overhead", f"{found.overhead_s * 1e3:.4g}")
    table.add("linear", f"{found.linear_s * 1e3:.4g} a token")
    table.add("attention", f"{found.attention_s * 1e3:.4g} a pair")
    explained = "-" if found.r_squared is None else f"{found.r_squared:.6f}"
    table.add("samples", f"{len(found.samples):,}; R^2 {explained}, RMS residual {found.rms_s * 1e3:.4g} ms")
    table.add("mean relative error", f"{found.mean_relative_error:.2%}")
    table.print(settings)
    click.echo()
    pairs = sorted(zip(found.samples, found.residuals_s, strict=True), key=lambda pair: -abs(pair[1]))
    headings = ["PROMPT", "CACHED", "MEASURED MS", "FITTED MS", "RESIDUAL MS"]
    residuals = Table(*headings, right=headings)
    for sample, off_s in pairs[:_SHOWN_MAX]:
        times = (sample.ttft_s, sample.ttft_s - off_s, off_s)
        residuals.add(
            f"{sample.prompt_tokens:,}", f"{sample.cached_tokens:,}", *(f"{time_s * 1e3:,.2f}" for time_s in times)
        )
    residuals.print(settings)
    if len(pairs) > _SHOWN_MAX:
        click.echo(f"the {_SHOWN_MAX} that are farthest off, of {len(pairs):,}; -o json has all")
    click.echo()
