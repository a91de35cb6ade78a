"""The targets, each a figure of a report beside the number that it has to reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from saltern.bench.batches import BatchResult
from saltern.bench.case import OURS, Case, Contender, Role

SOCKET_SHARE: Final = 0.8
MEMCPY_SHARE: Final = 0.8
MOONCAKE_TRANSFER: Final = 1.5
MOONCAKE_LOOKUP: Final = 2.0
LMCACHE_SHARED_MEMORY: Final = 4.0
CPU_SHARE: Final = 0.6
PING_PONG: Final = 1.2


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound.

    Attributes:
        figure: what was seen; None where it could not be measured, for the reason in ``note``.
        at_most: the bound is an upper one.
    """

    name: str
    figure: float | None
    bound: float
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound

    @property
    def verdict(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "figure": self.figure,
            "bound": self.bound,
            "direction": "at most" if self.at_most else "at least",
            "verdict": self.verdict,
            "note": self.note,
        }


def targets(cases: Sequence[Case], batches: Sequence[BatchResult]) -> list[Target]:
    """Every target that the cases speak to."""
    return [target for case in cases for target in _of_case(case)] + [
        _of_batch(result) for result in batches if result.store == OURS
    ]


def _of_case(case: Case) -> Iterator[Target]:
    if case.name.startswith("TCP"):
        yield _beside(case, "bare socket pair", SOCKET_SHARE)
        yield _beside(case, "Mooncake", MOONCAKE_TRANSFER)
        yield _beside_best(case)
        yield _cpu_beside_best(case)
    elif case.name.startswith("shared memory"):
        yield _beside(case, "memcpy", MEMCPY_SHARE)
        yield _beside(case, "LMCache shared memory", LMCACHE_SHARED_MEMORY)
    elif case.unit == "us":
        limit = case.of(Role.LIMIT)[0]
        yield Target(f"{case.name} / {limit.name}", 1 / case.ratio(limit), PING_PONG, at_most=True)
    else:
        yield _beside(case, "Mooncake", MOONCAKE_LOOKUP)


def _beside(case: Case, name: str, bound: float) -> Target:
    other = case.find(name)
    if other is None:
        return Target(f"{case.name} / {name}", None, bound, note=_why_absent(case, name))
    return Target(f"{case.name} / {name}", case.ratio(other), bound)


def _beside_best(case: Case) -> Target:
    """Ahead of every peer: of the one that was fastest."""
    peers = case.of(Role.PEER)
    if not peers:
        return Target(f"{case.name} / best peer", None, 1.0, note="no peer ran")
    best = max(peers, key=lambda peer: peer.figure)
    return Target(f"{case.name} / best peer", case.ratio(best), 1.0, note=best.name)


def _cpu_beside_best(case: Case) -> Target:
    name = f"{case.name}, CPU s/GB / best peer"
    peers = [peer for peer in case.of(Role.PEER) if peer.cpu is not None]
    if not peers or case.ours.cpu is None:
        return Target(name, None, CPU_SHARE, at_most=True, note="no peer ran")
    best = min(peers, key=_cpu_s_per_gb)
    return Target(name, _cpu_s_per_gb(case.ours) / _cpu_s_per_gb(best), CPU_SHARE, at_most=True, note=best.name)


def _cpu_s_per_gb(contender: Contender) -> float:
    assert contender.cpu is not None
    return contender.cpu.s_per_gb


def _of_batch(result: BatchResult) -> Target:
    works = 0.0 if result.failure else 1.0
    return Target(f"a batch of {result.keys:,} keys works", works, 1.0, note=result.failure)


def _why_absent(case: Case, name: str) -> str:
    return next((contender.failure for contender in case.contenders if contender.name == name), "it did not run")
