"""How cache is best divided among tenants, from what each hits with how much: rules without I/O.

The next block goes to whoever gains most by it (M. K. Qureshi and Y. N. Patt, "Utility-based cache partitioning", MICRO
2006). A curve with a cliff gains nothing until its working set fits, so what is compared is its concave hull, whose
corners lie on the curve (N. Beckmann and D. Sanchez, "Talus", HPCA 2015); a division stops between two corners only for
the tenant that comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from saltern.traces.reuse import HitCurve

#: Blocks of each tenant, by name.
Division = dict[str, int]


class _Step(NamedTuple):
    """From one corner of a tenant's hull to the next."""

    gain: float  # prompt tokens hit more, for each block
    tenant: str
    blocks: int  # of the next corner
    hit_tokens: float  # there


def concave_hull(curve: HitCurve) -> list[tuple[int, float]]:
    """(blocks, prompt tokens hit) of the corners, ascending, from (0, 0) on: no line between two points is above it."""
    corners: list[tuple[int, float]] = []
    for point in enumerate(curve.hits):
        while len(corners) > 1 and _turns_up(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    while len(corners) > 1 and corners[-1][1] == corners[-2][1]:
        corners.pop()  # more blocks that hit no more
    return [(round(at / curve.sampled), tokens) for at, tokens in corners]


def _turns_up(first: tuple[int, float], second: tuple[int, float], third: tuple[int, float]) -> bool:
    run, rise = second[0] - first[0], second[1] - first[1]
    return (third[1] - first[1]) * run >= rise * (third[0] - first[0])


class Divider:
    """Divides caches of any size, or of any number of hits, among the same tenants."""

    def __init__(self, curves: Mapping[str, HitCurve]) -> None:
        self._curves = dict(curves)
        self._steps = sorted(
            (step for tenant, curve in self._curves.items() for step in _steps(tenant, curve)), reverse=True
        )

    @property
    def best_hit_tokens(self) -> float:
        """With blocks enough for everything."""
        return sum(curve.hits[-1] for curve in self._curves.values())

    @property
    def blocks_max(self) -> int:
        """Beyond so many blocks nobody hits more."""
        return sum(self._divide_fully().values())

    def hit_tokens(self, division: Mapping[str, int]) -> float:
        """What tenants hit behind walls of these sizes."""
        return sum(self._curves[tenant].hit_tokens(blocks) for tenant, blocks in division.items())

    def of_blocks(self, total_blocks: int) -> Division:
        """So many blocks; what nobody gains by is divided as the rest is."""
        division = dict.fromkeys(self._curves, 0)
        left = total_blocks
        for step in self._steps:
            part = step.blocks - division[step.tenant]
            if part >= left:
                division[step.tenant] += left
                return division
            division[step.tenant] = step.blocks
            left -= part
        given = sum(division.values())
        return {tenant: blocks * total_blocks // given if given else 0 for tenant, blocks in division.items()}

    def for_hits(self, hit_tokens: float) -> Division | None:
        """The fewest blocks that hit so many tokens; None where none do."""
        division = dict.fromkeys(self._curves, 0)
        hits = dict.fromkeys(self._curves, 0.0)
        missing = hit_tokens
        for step in self._steps:
            if missing <= 0:
                return division
            gained = step.hit_tokens - hits[step.tenant]
            if gained >= missing:
                least = self._curves[step.tenant].capacity_for(hits[step.tenant] + missing)
                division[step.tenant] = step.blocks if least is None else min(step.blocks, least)
                return division
            division[step.tenant], hits[step.tenant] = step.blocks, step.hit_tokens
            missing -= gained
        return division if missing <= 0 else None

    def _divide_fully(self) -> Division:
        division = dict.fromkeys(self._curves, 0)
        for step in self._steps:
            division[step.tenant] = step.blocks
        return division


def _steps(tenant: str, curve: HitCurve) -> Iterator[_Step]:
    corners = concave_hull(curve)
    for (blocks, tokens), (more_blocks, more_tokens) in pairwise(corners):
        yield _Step((more_tokens - tokens) / (more_blocks - blocks), tenant, more_blocks, more_tokens)
