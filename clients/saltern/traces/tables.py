"""Traces as tables: requests with times and lengths, and no prompt. Nothing in them says which prefixes were shared.

=============  =====================================================================================================
format         columns
=============  =====================================================================================================
``azure``      ``TIMESTAMP,ContextTokens,GeneratedTokens``: calendar time (Azure 2023, and 2024 with its zone)
``burstgpt``   ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``, in any order, seconds;
               ``Session ID`` and ``Elapsed time`` where they are there
``servegen``   no heading; windows of 600 s: start (s), requests/s, coefficient of variation, ``Gamma`` or ``Weibull``,
               two parameters: one file is one client. Arrivals are **drawn** from it: gaps of the named distribution
               with the first parameter as its shape, scaled to the window's rate, from a seed
=============  =====================================================================================================
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from saltern.traces.lines import Line, read_lines
from saltern.traces.options import LoadOptions, Timed, file_provenance, in_order, trace_name
from saltern.traces.request import Arrival, Identity, Trace, TraceRequest

AZURE_HEADING: Final = ("timestamp", "contexttokens", "generatedtokens")
_BURSTGPT_HEADING: Final = ("timestamp", "request tokens", "response tokens")
AZURE_EXPECTED: Final = "TIMESTAMP,ContextTokens,GeneratedTokens: ISO 8601 time, two whole numbers"
BURSTGPT_EXPECTED: Final = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type: seconds, whole numbers"
)
SERVEGEN_EXPECTED: Final = "window start (s), requests/s, CV, Gamma or Weibull, shape, scale: six columns, no heading"
NO_IDENTITY: Final = "times and lengths only: nothing says which prompts share a prefix"
_WINDOW_S: Final = 600.0
_RATE_MAX_PER_S: Final = 1_000_000.0
_SHAPE_MIN: Final = 0.01
_TOKENS_MAX: Final = 2**31 - 1


def cells(line: Line) -> list[str]:
    """The cells of one line; a quoted cell with a line break in it is refused."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.text], strict=True))]
    except (csv.Error, StopIteration) as error:
        line.refuse(f"no row of a CSV file ({error})", "expected cells with commas between them")


def is_azure(heading: list[str]) -> bool:
    return tuple(cell.lower() for cell in heading) == AZURE_HEADING


def is_burstgpt(heading: list[str]) -> bool:
    return {cell.lower() for cell in heading}.issuperset(_BURSTGPT_HEADING)


def is_servegen(row: list[str]) -> bool:
    return len(row) == 6 and row[3] in {"Gamma", "Weibull", ""} and all(_is_number(row[at]) for at in (0, 1, 2, 4, 5))


def load_azure(path: Path, options: LoadOptions) -> Trace:
    """Requests of the Azure LLM inference traces (CC-BY-4.0; Splitwise, ISCA 2024)."""
    return _lengths_only(path, "azure", lambda: in_order(lambda: _read_azure(path), options, rebase=True))


def load_burstgpt(path: Path, options: LoadOptions) -> Trace:
    """Requests of a table with the columns of BurstGPT, found by their headings."""
    return _lengths_only(path, "burstgpt", lambda: in_order(lambda: _read_burstgpt(path), options, rebase=True))


def load_servegen(path: Path, options: LoadOptions) -> Trace:
    """Arrivals drawn from a client's windows; lengths are those of ``options``, since the file has none."""
    lengths = (
        f"every request has {options.input_tokens} tokens in and {options.output_tokens} out, as asked"
        if options.input_tokens
        else "the file has no lengths: requests have 0 tokens (--input-tokens and --output-tokens set them)"
    )
    drawn = f"arrivals drawn from the rate and distribution of each window, seed {options.seed}"
    return Trace(
        name=trace_name(path),
        provenance=file_provenance(path, "servegen", steps=(drawn, lengths), seed=options.seed),
        block_tokens=0,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.NONE,
        identity_note=NO_IDENTITY,
        notes=(drawn, lengths),
        opener=lambda: in_order(lambda: _draw_servegen(path, options), options, rebase=False),
    )


def _lengths_only(path: Path, file_format: str, opener: Callable[[], Iterator[TraceRequest]]) -> Trace:
    return Trace(
        name=trace_name(path),
        provenance=file_provenance(path, file_format),
        block_tokens=0,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.NONE,
        identity_note=NO_IDENTITY,
        opener=opener,
    )


def _read_azure(path: Path) -> Iterator[Timed]:
    lines = read_lines(path)
    heading = next(lines)
    if not is_azure(cells(heading)):
        heading.refuse("another heading", f"expected {AZURE_EXPECTED}")
    for line in lines:
        row = cells(line)
        if len(row) != len(AZURE_HEADING):
            line.refuse(f"{len(row)} cells", f"expected {AZURE_EXPECTED}")
        try:
            at = datetime.fromisoformat(row[0])
            at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            line.refuse(f"{row[0][:64]!r} is no time", f"expected {AZURE_EXPECTED}")
        yield line, at_s, _request(line, row[1], row[2], AZURE_EXPECTED)


def _read_burstgpt(path: Path) -> Iterator[Timed]:
    lines = read_lines(path)
    heading = next(lines)
    names = [cell.lower() for cell in cells(heading)]
    if not is_burstgpt(names) or len(set(names)) != len(names):
        heading.refuse("another heading, or a name in it twice", f"expected {BURSTGPT_EXPECTED}")
    time, tokens_in, tokens_out = (names.index(name) for name in _BURSTGPT_HEADING)
    session = names.index("session id") if "session id" in names else None
    elapsed = names.index("elapsed time") if "elapsed time" in names else None
    for line in lines:
        row = cells(line)
        if len(row) != len(names):
            line.refuse(f"{len(row)} cells under {len(names)} headings", f"expected {BURSTGPT_EXPECTED}")
        at_s = _number(line, row[time], BURSTGPT_EXPECTED)
        api_s = _number(line, row[elapsed], BURSTGPT_EXPECTED) if elapsed is not None and row[elapsed] else None
        name = row[session] if session is not None else ""
        yield line, at_s, _request(line, row[tokens_in], row[tokens_out], BURSTGPT_EXPECTED, session=name, api_s=api_s)


def _draw_servegen(path: Path, options: LoadOptions) -> Iterator[Timed]:
    before_s = None
    for line in read_lines(path):
        row = cells(line)
        if not is_servegen(row):
            line.refuse("no window of arrivals", f"expected {SERVEGEN_EXPECTED}")
        start_s, rate, _, shape, _ = (_number(line, row[at], SERVEGEN_EXPECTED) for at in (0, 1, 2, 4, 5))
        if before_s is not None and start_s < before_s + _WINDOW_S:
            line.refuse(f"a window at {start_s:g} s after that at {before_s:g} s", "expected windows of 600 s in order")
        before_s = start_s
        if rate == 0:
            continue
        if rate > _RATE_MAX_PER_S or shape < _SHAPE_MIN or not row[3]:
            line.refuse(f"{rate:g} requests/s of shape {shape:g}", f"expected {SERVEGEN_EXPECTED}")
        chance = random.Random(f"{options.seed} {start_s}")  # noqa: S311 - traffic, not a secret
        at_s = start_s + _gap_s(chance, row[3], shape, rate)
        while at_s < start_s + _WINDOW_S:
            yield (
                line,
                at_s,
                TraceRequest(arrival_s=0.0, input_tokens=options.input_tokens, output_tokens=options.output_tokens),
            )
            at_s += _gap_s(chance, row[3], shape, rate)


def _gap_s(chance: random.Random, distribution: str, shape: float, rate_per_s: float) -> float:
    """Time to the next request: mean 1/rate, spread by the distribution's shape."""
    if distribution == "Gamma":
        return chance.gammavariate(shape, 1 / (shape * rate_per_s))
    return chance.weibullvariate(1 / (math.gamma(1 + 1 / shape) * rate_per_s), shape)


def _request(
    line: Line, tokens_in: str, tokens_out: str, expected: str, *, session: str = "", api_s: float | None = None
) -> TraceRequest:
    if not all(text.isascii() and text.isdigit() and len(text) <= 10 for text in (tokens_in, tokens_out)):
        line.refuse(f"{tokens_in[:32]!r} and {tokens_out[:32]!r} are no numbers of tokens", f"expected {expected}")
    if max(int(tokens_in), int(tokens_out)) > _TOKENS_MAX:
        line.refuse(f"more than {_TOKENS_MAX} tokens", f"expected {expected}")
    return TraceRequest(
        arrival_s=0.0, input_tokens=int(tokens_in), output_tokens=int(tokens_out), session=session, api_s=api_s
    )


def _number(line: Line, text: str, expected: str) -> float:
    """A number from 0 on that is not endless."""
    if not _is_number(text):
        line.refuse(f"{text[:32]!r} is no number from 0 on", f"expected {expected}")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) <= 2**53
    except ValueError:
        return False
