"""The prefill time model fitted to measured times to first token, by nonnegative least squares in plain Python.

``ttft = overhead + linear (n - p) + attention (n^2 - p^2)`` for a prompt of n tokens of which the first p were cached
(:mod:`saltern.replay.prefill`). None of the three can be negative: a fit without that rule may give times below zero
for prompts that nobody measured. With three unknowns every set of those that are not zero is tried, which is exact
(C. L. Lawson and R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23, on when that is the solution).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.replay.profiles import HardwareProfile, ModelProfile, Profiles

COLUMNS: Final = ("prompt_tokens", "cached_tokens", "ttft_ms")
TOKENS_MAX: Final = 100_000_000
_TTFT_MAX_MS: Final = 86_400_000.0
_ROWS_MAX: Final = 1_000_000
_FILE_MAX_BYTES: Final = 256 * 2**20
_TERMS: Final = 3
#: What fitted profiles are called unless somebody says otherwise.
CALIBRATED: Final = "calibrated"
#: Of the largest element of a matrix: a smaller pivot means that what was measured does not tell the terms apart.
_PIVOT_LEAST: Final = 1e-12
_HINT: Final = (
    "write CSV with the heading prompt_tokens,cached_tokens,ttft_ms (cached_tokens may be left out), or JSON objects "
    "with these names, one on each line or in one list"
)


class Sample(NamedTuple):
    """One measured request, on an engine that was idle when it came."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float

    @property
    def terms(self) -> tuple[float, float, float]:
        """What overhead, linear and attention seconds are multiplied by."""
        new = self.prompt_tokens - self.cached_tokens
        return 1.0, float(new), float(new) * (self.prompt_tokens + self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of the model's terms, and how well they say what was measured.

    Attributes:
        residuals_s: measured less fitted, in the order of the samples.
        r_squared: share of the variance that is explained; None where all times were the same.
    """

    samples: Sequence[Sample]
    overhead_s: float
    linear_s: float
    attention_s: float
    residuals_s: Sequence[float]
    r_squared: float | None

    @property
    def rms_s(self) -> float:
        return math.sqrt(math.fsum(one * one for one in self.residuals_s) / len(self.residuals_s))

    @property
    def worst(self) -> tuple[Sample, float]:
        """The sample that is farthest off, and its residual in seconds."""
        return max(zip(self.samples, self.residuals_s, strict=True), key=lambda pair: abs(pair[1]))

    @property
    def mean_relative_error(self) -> float:
        """Mean of |residual| / measured."""
        ratios = [abs(off) / one.ttft_s for one, off in zip(self.samples, self.residuals_s, strict=True)]
        return math.fsum(ratios) / len(ratios)

    def profiles(self, name: str, model: ModelProfile, hardware: HardwareProfile, source: str) -> Profiles:
        """Profiles of a model and a machine called ``name``, which prefill in the fitted times.

        The linear operations stay the model's own and give the machine's efficiency; what attention took becomes the
        operations that take so long at that efficiency.

        Raises:
            InvalidArgumentError: CANNOT_CALIBRATE: the linear term is 0.
        """
        if not self.linear_s:
            _refuse("the fit finds no time for each token (the linear term is 0)")
        efficiency = model.linear_flops_per_token / (self.linear_s * hardware.peak_flops_per_s)
        attention_flops = self.attention_s * hardware.peak_flops_per_s * efficiency
        fitted = (
            f"fitted to {len(self.samples)} times to first token of {source}: RMS residual {self.rms_s * 1e3:.3g} ms, "
            f"mean relative error {self.mean_relative_error:.1%}"
        )
        replaced = msgspec.structs.replace
        return Profiles(
            models={
                name: replaced(
                    model,
                    name="",
                    attention_flops_per_pair=attention_flops,
                    source=f"{model.source}; attention {fitted}",
                )
            },
            hardware={
                name: replaced(
                    hardware,
                    name="",
                    efficiency=efficiency,
                    overhead_s=self.overhead_s,
                    source=f"{hardware.source}; efficiency and overhead {fitted}",
                )
            },
        )


def fit(samples: Sequence[Sample]) -> Fit:
    """The three terms, none below 0, with the least sum of squared residuals.

    Raises:
        InvalidArgumentError: CANNOT_CALIBRATE: the samples do not tell the terms apart.
    """
    if len({sample.terms for sample in samples}) < _TERMS:
        _refuse(f"{len(samples)} samples with fewer than {_TERMS} different prompts")
    rows = [sample.terms for sample in samples]
    times_s = [sample.ttft_s for sample in samples]
    # Terms differ by many orders of magnitude: each is taken as a share of its largest.
    scales = [max(row[term] for row in rows) for term in range(_TERMS)]
    scaled = [[row[term] / scales[term] for term in range(_TERMS)] for row in rows]
    best: tuple[float, list[float]] | None = None
    for size in range(_TERMS, 0, -1):
        for chosen in combinations(range(_TERMS), size):
            found = _least_squares(scaled, times_s, chosen)
            if found is None or min(found) < 0:
                continue
            squares = math.fsum((time_s - _dot(row, found)) ** 2 for row, time_s in zip(scaled, times_s, strict=True))
            if best is None or squares < best[0]:
                best = squares, found
    if best is None:
        _refuse("the samples do not tell overhead, linear and attention time apart")
    overhead_s, linear_s, attention_s = (value / scale for value, scale in zip(best[1], scales, strict=True))
    residuals_s = [time_s - _dot(row, best[1]) for row, time_s in zip(scaled, times_s, strict=True)]
    mean_s = math.fsum(times_s) / len(times_s)
    variance = math.fsum((time_s - mean_s) ** 2 for time_s in times_s)
    return Fit(
        samples=samples,
        overhead_s=overhead_s,
        linear_s=linear_s,
        attention_s=attention_s,
        residuals_s=residuals_s,
        r_squared=1 - best[0] / variance if variance else None,
    )


def _least_squares(
    rows: Sequence[Sequence[float]], times_s: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """All three terms, those not chosen being 0, by normal equations; None where they have no one solution."""
    matrix = [
        [math.fsum(row[a] * row[b] for row in rows) for b in chosen]
        + [math.fsum(row[a] * time_s for row, time_s in zip(rows, times_s, strict=True))]
        for a in chosen
    ]
    solved = _solve(matrix)
    if solved is None:
        return None
    found = [0.0] * _TERMS
    for term, value in zip(chosen, solved, strict=True):
        found[term] = value
    return found


def _solve(matrix: list[list[float]]) -> list[float] | None:
    """Of equations with their right sides in the last column, by Gauss elimination with pivots; changes the matrix."""
    size = len(matrix)
    least = _PIVOT_LEAST * max(abs(value) for row in matrix for value in row[:size])
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) <= least:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [matrix[row][size] / matrix[row][row] for row in range(size)]


def _dot(row: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(row, values, strict=True))


def _refuse(what: str) -> NoReturn:
    raise InvalidArgumentError(
        f"cannot calibrate by {what}",
        reason="CANNOT_CALIBRATE",
        hint="measure prompts of several lengths, from short to the longest that is served, alone on an idle engine; "
        "some with a part of them cached",
    )


def calibrated(path: Path, model: ModelProfile, hardware: HardwareProfile) -> tuple[ModelProfile, HardwareProfile]:
    """The same model and machine with prefill times fitted to those of a file; raises as reading and fitting do."""
    profiles = fit(read_samples(path)).profiles(CALIBRATED, model, hardware, path.name)
    return profiles.model(CALIBRATED), profiles.machine(CALIBRATED)


# ---- files


def read_samples(path: Path) -> list[Sample]:
    """The samples of a CSV or JSON file.

    Raises:
        InvalidArgumentError: INVALID_CALIBRATION: it cannot be read, or a line is not as expected; names the line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read {str(path)!r} ({error.strerror})", reason="INVALID_CALIBRATION", hint=_HINT
        ) from None
    if len(content) > _FILE_MAX_BYTES:
        _damaged(path, 1, f"the file is longer than {_FILE_MAX_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _damaged(path, content.count(b"\n", 0, error.start) + 1, "expected UTF-8")
    start = text.lstrip()[:1]
    read = _json_list if start == "[" else _json_lines if start == "{" else _csv_rows
    samples: list[Sample] = []
    for line, values in read(path, text):
        if len(samples) >= _ROWS_MAX:
            _damaged(path, line, f"more than {_ROWS_MAX} samples")
        samples.append(_sample(path, line, values))
    if not samples:
        _damaged(path, 1, "there is no sample")
    return samples


_Rows = Iterator[tuple[int, dict[str, Any]]]


def _csv_rows(path: Path, text: str) -> _Rows:
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        heading = [name.strip() for name in next(rows, [])]
        missing = [name for name in COLUMNS if name not in heading and name != "cached_tokens"]
        if missing or len(set(heading)) < len(heading):
            _damaged(path, 1, f"expected a heading with {', '.join(COLUMNS)}, each once")
        for row in rows:
            if not row:
                continue
            if len(row) != len(heading):
                _damaged(path, rows.line_num, f"{len(row)} values under {len(heading)} headings")
            yield rows.line_num, dict(zip(heading, row, strict=True))
    except csv.Error as error:
        _damaged(path, rows.line_num, f"{error}")


def _json_lines(path: Path, text: str) -> _Rows:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, _object(path, number, _decoded(path, number, line))


def _json_list(path: Path, text: str) -> _Rows:
    """Objects of a list; the line of each is where the decoder stands behind it."""
    _decoded(path, 1, text)
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while (at := _behind_space(text, at)) < len(text) and text[at] != "]":
        line += text.count("\n", counted, at)
        counted = at
        value, at = decoder.raw_decode(text, at)
        yield line, _object(path, line, value)


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _decoded(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        _damaged(path, line + error.lineno - 1, f"expected JSON: {error.msg}")
    except RecursionError:
        _damaged(path, line, "JSON is nested too deeply")


def _object(path: Path, line: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        _damaged(path, line, "expected an object")
    return dict(value)


def _sample(path: Path, line: int, values: dict[str, Any]) -> Sample:
    prompt = _whole(path, line, "prompt_tokens", values.get("prompt_tokens"), least=1)
    cached = _whole(path, line, "cached_tokens", values.get("cached_tokens", 0), least=0)
    if cached >= prompt:
        _damaged(path, line, f"expected cached_tokens below the {prompt} of prompt_tokens: the last token is computed")
    given = values.get("ttft_ms")
    ttft_ms = math.nan
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        with suppress(ValueError, OverflowError):
            ttft_ms = float(given)
    if not 0 < ttft_ms <= _TTFT_MAX_MS:
        _damaged(path, line, f"expected ttft_ms as milliseconds above 0, not {str(given)[:40]!r}")
    return Sample(prompt, cached, ttft_ms / 1000)


def _whole(path: Path, line: int, name: str, given: object, *, least: int) -> int:
    """A whole number of tokens, written as one."""
    value = given
    if isinstance(given, str) and given.strip().isdecimal() and len(given) <= len(str(TOKENS_MAX)):
        value = int(given)
    if type(value) is not int or not least <= value <= TOKENS_MAX:
        _damaged(path, line, f"expected {name} as a whole number from {least} on, not {str(given)[:40]!r}")
    return value


def _damaged(path: Path, line: int, what: str) -> NoReturn:
    raise InvalidArgumentError(
        f"{path.name}, line {line}: {what}", reason="INVALID_CALIBRATION", hint=_HINT, metadata={"line": str(line)}
    )
