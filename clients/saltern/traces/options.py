"""What a loader may be told about a file that the file itself does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.traces.lines import Line, file_sha256
from saltern.traces.request import Provenance, TraceRequest

#: How far ``sort`` reaches: requests that it holds in memory at once.
SORT_MAX_REQUESTS: Final = 1_000_000
BLOCK_TOKENS_MAX: Final = 1_048_576


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to read a trace; each part is used by the formats it says.

    Attributes:
        block_tokens: block size of a file with ids that does not state it (otherwise found from the first requests), or
            the size of the blocks to make of texts and chunks.
        sort: put requests in order of time (up to a million) instead of refusing a file that is not.
        session_every_s: Claude Code form: session number k starts at k times this.
        gap_max_s: Claude Code form: longer gaps between two requests of a session count as this long.
        input_tokens, output_tokens: ServeGen form, which has no lengths: those of every request, 0 for unknown.
        spacing_s: plain prompts, which have no times: from one to the next.
        seed: ServeGen form, which gives rates: of the times drawn from them.
    """

    block_tokens: int | None = None
    sort: bool = False
    session_every_s: float = 60.0
    gap_max_s: float = 600.0
    input_tokens: int = 0
    output_tokens: int = 0
    spacing_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens is not None and not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            _refuse(f"blocks of {self.block_tokens} tokens", f"choose 1 to {BLOCK_TOKENS_MAX} tokens")
        if not all(0 <= value < float("inf") for value in (self.session_every_s, self.gap_max_s, self.spacing_s)):
            _refuse("a negative or endless time", "times are seconds from 0 on")
        if self.input_tokens < 0 or self.output_tokens < 0:
            _refuse("a negative number of tokens", "lengths are whole numbers from 0 on")


def _refuse(what: str, hint: str) -> None:
    raise InvalidArgumentError(f"cannot read a trace with {what}", reason="INVALID_TRACE_OPTION", hint=hint)


Timed = tuple[Line, float, TraceRequest]


def in_order(read: Callable[[], Iterator[Timed]], options: LoadOptions, *, rebase: bool) -> Iterator[TraceRequest]:
    """The requests of ``read`` (line, recorded time in seconds, request) with their arrival times, in order.

    Args:
        rebase: times are of some calendar or clock; the first request is at 0.

    Raises:
        InvalidArgumentError: a time before that of the request before it, unless ``options.sort``.
    """
    if options.sort:
        yield from _sorted(read, rebase)
        return
    start_s = before_s = None
    for line, at_s, request in read():
        if before_s is not None and at_s < before_s:
            line.refuse(
                f"time {at_s:.6f} s is before that of the request before it ({before_s:.6f} s)",
                "expected requests in order of time; --sort puts them in order",
            )
        start_s = start_s if start_s is not None else at_s if rebase else 0.0
        before_s = at_s
        yield replace(request, arrival_s=at_s - start_s)


def _sorted(read: Callable[[], Iterator[Timed]], rebase: bool) -> Iterator[TraceRequest]:
    held: list[tuple[float, int, TraceRequest]] = []
    for line, at_s, request in read():
        if len(held) == SORT_MAX_REQUESTS:
            line.refuse(f"more than {SORT_MAX_REQUESTS} requests to sort", "sort the file by time beforehand")
        held.append((at_s, len(held), request))
    held.sort(key=lambda timed: timed[:2])
    start_s = held[0][0] if held and rebase else 0.0
    for at_s, _, request in held:
        yield replace(request, arrival_s=at_s - start_s)


def file_provenance(
    path: Path, file_format: str, *, steps: tuple[str, ...] = (), seed: int | None = None
) -> Provenance:
    return Provenance(source=str(path), format=file_format, sha256=file_sha256(path), steps=steps, seed=seed)


def trace_name(path: Path) -> str:
    """The file's name without what says how it is packed."""
    name = path.name
    for ending in (".gz", ".jsonl", ".json", ".csv", ".txt"):
        name = name.removesuffix(ending)
    return name or path.name
