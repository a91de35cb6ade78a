"""Rounds of the victim alone, beside the flood, and beside as much CPU burnt as the flood's client takes.

The three come in turn, so that a busy machine is as busy for each. On a machine with few CPUs the flooder's client
competes with the victim's for one: the third kind of round tells what that does, so that the rest is the store's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from tests.noisy.flooder import Flood
from tests.noisy.setting import BLOCK_BYTES, CAPACITY_BYTES, CHAIN_BLOCKS, FLOODER, TIMES_THE_RATE, VICTIM, Pins, Reach
from tests.noisy.victim import TURNS_PER_S, Round

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("alone", "beside the flood", "beside burnt CPU")
ALONE, FLOODED, BURNT = KINDS
#: What the victim moves in a second while all is well.
VICTIM_BYTES_PER_S = TURNS_PER_S * CHAIN_BLOCKS * BLOCK_BYTES
T = TypeVar("T")


class Figures(msgspec.Struct):
    """All rounds of one kind together.

    Attributes:
        hit_rate: of blocks.
        node_cpu: share of one CPU that the node took.
    """

    rounds: int
    turns: int
    hit_rate: float
    lookup_p50_ms: float
    lookup_p99_ms: float
    get_p50_ms: float
    get_p99_ms: float
    late: int
    wrong: int
    victim_cpu: float
    node_cpu: float


class Report(msgspec.Struct):
    """What came of a run; ratios are of medians over rounds, each beside its neighbours in time."""

    transport: str
    pins: Pins
    rounds: int
    round_s: float
    kinds: dict[str, Figures]
    flood_bytes_per_s: float
    flood_times_the_rate: float
    flood_stored: int
    flood_refused: int
    flood_cpu: float
    hit_rate_ratio: float
    ratios: dict[str, dict[str, float]]


class Process:
    """A child that answers lines with lines."""

    def __init__(self, module: str, argument: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, argument], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._process.args!r} has ended"
        return line

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


@contextmanager
def child(module: str, argument: str) -> Iterator[Process]:
    process = Process(module, argument)
    try:
        yield process
    finally:
        process.end()


def measure(
    *, rounds: int, round_s: float, transport: str, pins: Pins, flat_out: bool, say: Callable[[str], None]
) -> Report:
    """Run ``rounds`` of each kind.

    Args:
        flat_out: the flooder goes as fast as it can instead of at TIMES_THE_RATE.
    """
    pace = 0 if flat_out else TIMES_THE_RATE * VICTIM_BYTES_PER_S
    heard: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    node_cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    floods: list[Flood] = []
    with child("tests.noisy.node_main", json.dumps(pins.node)) as node:
        reached = json.loads(node.hear())

        def reach(tenant: str, cpus: list[int]) -> str:
            made = Reach(reached["wire"], reached["shm"], reached["tokens"][tenant], transport, cpus)
            return msgspec.json.encode(made).decode()

        with (
            child("tests.noisy.victim", reach(VICTIM, pins.victim)) as victim,
            child("tests.noisy.flooder", reach(FLOODER, pins.flooder)) as flooder,
        ):
            victim.hear()
            flooder.hear()
            # The flood has filled the pool before anything is measured: what follows is its steady state.
            filled_bytes = 0
            while filled_bytes < CAPACITY_BYTES:
                flooder.say("flood 1 0")
                filled_bytes += msgspec.json.decode(flooder.hear(), type=Flood).moved_bytes
            for number in range(rounds):
                turn = number % len(KINDS)
                for kind in KINDS[turn:] + KINDS[:turn]:
                    before_s = node.cpu_s
                    if kind == FLOODED:
                        flooder.say(f"flood {round_s} {pace}")
                    elif kind == BURNT:
                        flooder.say(f"burn {round_s} {floods[-1].cpu_s}")
                    victim.say(f"{round_s} {number}")  # the same prompts, and as many new ones, in each kind
                    told = msgspec.json.decode(victim.hear(), type=Round)
                    if kind != ALONE:
                        flood = msgspec.json.decode(flooder.hear(), type=Flood)
                        floods += [flood] if kind == FLOODED else []
                    heard[kind].append(told)
                    node_cpu[kind].append((node.cpu_s - before_s) / round_s)
                say(
                    f"round {number + 1} of {rounds}: "
                    + ", ".join(f"{kind} {_brief(heard[kind][-1])}" for kind in KINDS)
                )
    return _report(transport, pins, round_s, heard, node_cpu, floods)


def _report(
    transport: str,
    pins: Pins,
    round_s: float,
    heard: dict[str, list[Round]],
    node_cpu: dict[str, list[float]],
    floods: Sequence[Flood],
) -> Report:
    kinds = {kind: _figures(heard[kind], node_cpu[kind], round_s) for kind in KINDS}
    flood_s = len(floods) * round_s
    pace = sum(flood.moved_bytes for flood in floods) / flood_s
    return Report(
        transport=transport,
        pins=pins,
        rounds=len(floods),
        round_s=round_s,
        kinds=kinds,
        flood_bytes_per_s=pace,
        flood_times_the_rate=pace / VICTIM_BYTES_PER_S,
        flood_stored=sum(flood.stored for flood in floods),
        flood_refused=sum(flood.refused for flood in floods),
        flood_cpu=sum(flood.cpu_s for flood in floods) / flood_s,
        hit_rate_ratio=kinds[FLOODED].hit_rate / kinds[ALONE].hit_rate,
        ratios={
            f"{over} / {under}": {
                what: _median([
                    percentile(getattr(a, f"{call}_ms"), share) / percentile(getattr(b, f"{call}_ms"), share)
                    for a, b in zip(heard[over], heard[under], strict=True)
                ])
                for what, call, share in _QUANTITIES
            }
            for over, under in ((FLOODED, ALONE), (BURNT, ALONE), (FLOODED, BURNT))
        },
    )  # fmt: skip


_QUANTITIES = [
    (f"{call} {name}", call, share) for call in ("lookup", "get") for name, share in (("p50", 0.5), ("p99", 0.99))
]


def _figures(rounds: Sequence[Round], node_cpu: Sequence[float], round_s: float) -> Figures:
    lookups = [value for one in rounds for value in one.lookup_ms]
    gets = [value for one in rounds for value in one.get_ms]
    hits, misses = sum(one.hits for one in rounds), sum(one.misses for one in rounds)
    return Figures(
        rounds=len(rounds),
        turns=sum(one.turns for one in rounds),
        hit_rate=hits / (hits + misses),
        lookup_p50_ms=percentile(lookups, 0.5),
        lookup_p99_ms=percentile(lookups, 0.99),
        get_p50_ms=percentile(gets, 0.5),
        get_p99_ms=percentile(gets, 0.99),
        late=sum(one.late for one in rounds),
        wrong=sum(one.wrong for one in rounds),
        victim_cpu=sum(one.cpu_s for one in rounds) / len(rounds) / round_s,
        node_cpu=sum(node_cpu) / len(node_cpu),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are at or below."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def _brief(told: Round) -> str:
    return f"{percentile(told.get_ms, 0.5):.2f}/{percentile(told.get_ms, 0.99):.2f} ms"
