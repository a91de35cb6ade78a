"""``saltern plan``: from traffic and a target to nodes, memory, SSD and reservations, checked by a simulation.

::

    trace --> hit curves, one pass --> division among tenants --> machines --> simulated --> enough? --> Plan
                                              ^                                   |
                                              +------- more, or less -------------+

The curve *predicts*: LRU, one pool, each request after the one before. The simulation *checks*: the node's own core,
several nodes, second copies, requests beside each other. Both are told, and what is promised is what was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import msgspec

from saltern.replay.assemble import assumptions, part_facts, trace_facts
from saltern.replay.capacity import Divider, Division
from saltern.replay.engines import ReplayEngine
from saltern.replay.plan_results import Plan, PlannedTenant, PlanPoint, PlanTarget, PlanTrial, TenantCurve
from saltern.replay.results import Assumption, Column, ColumnResult
from saltern.replay.room import rounded_up
from saltern.replay.setup import ReplaySetup, Slo
from saltern.replay.sizing import BUSY_MAX, Sizing, Traffic, size
from saltern.replay.survey import survey
from saltern.traces.request import Trace
from saltern.traces.reuse import HitCurve, hit_curves

#: Simulations that one plan may take.
_TRIALS_MAX: Final = 6
#: A rate that misses its target by less is not told apart from it.
_RATE_SLACK: Final = 0.0005
#: Above what all distinct blocks take: nodes are unevenly full, and heads of chains are kept twice.
_ROOM_MAX: Final = 2.0
#: Two sizes this close are not told apart, nor a rate that is this little above what was wanted.
_CLOSE: Final = 1.1
_NEAR: Final = 0.01
_CURVE_POINTS: Final = 64
_LEAST_SHARE: Final = 0.01

#: What is being done, for whoever waits.
PlanProgress = Callable[[str], None]


def make_plan(
    trace: Trace,
    base: ReplaySetup,
    target: PlanTarget,
    engine: ReplayEngine,
    progress: PlanProgress = lambda _: None,
    *,
    sampled: float = 1.0,
) -> Plan:
    """Find the least that reaches the target. Ctrl-C once something was simulated ends the search with what is known.

    Args:
        base: engines, models, machines; ``node_bytes`` and ``node_ssd_bytes`` are the most that one node may have.
        sampled: share of the blocks that curves are made of.

    Raises:
        InvalidArgumentError: there is no target, the trace has no prefixes or is damaged.
    """
    target.check()
    base = msgspec.structs.replace(base, slo=Slo(ttft_s=target.slo_ttft_s), quotas={}).checked()
    progress("reading the trace")
    curves = hit_curves(trace, sampled=sampled)
    traffic = Traffic(
        together=curves.all,
        divider=Divider(curves.tenants),
        recorded_s=survey(trace).recorded_s,
        block_tokens=trace.block_tokens,
        block_bytes=trace.block_tokens * base.model.kv_bytes_per_token,
    )
    search = _Search(trace, base, target, engine, traffic)
    search.progress = progress
    complete = True
    try:
        chosen, shortfall = search.run()
        verdict = _verdict(target, chosen, shortfall)
    except KeyboardInterrupt:
        if not search.trials:
            raise
        complete = False
        chosen, shortfall = search.so_far()
        verdict = f"not finished, interrupted: {shortfall}: {_missed(target, chosen)}"
    return Plan(
        trace=trace_facts(trace, trace.provenance),
        parts=[part_facts(part) for part in trace.provenance.parts],
        program=f"saltern {version('saltern')}",
        target=target,
        reached=not shortfall,
        verdict=verdict,
        setup=chosen.sizing.setup,
        nodes_reason=chosen.sizing.reason,
        trials=[trial.told() for trial in search.trials],
        chosen=search.trials.index(chosen),
        tenants=_tenants(curves.tenants, chosen, traffic),
        curve=_points(curves.all, traffic.block_bytes),
        tenant_curves=[
            TenantCurve(tenant=name, points=_points(curve, traffic.block_bytes))
            for name, curve in curves.tenants.items()
        ],
        infinite_hit_rate=curves.all.infinite_hit_rate,
        unique_blocks=curves.all.unique_blocks,
        block_bytes=traffic.block_bytes,
        sampled=sampled,
        complete=complete,
        assumptions=[*_own_assumptions(sampled), *assumptions(trace, chosen.sizing.setup, engine)],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """One size, what the curves say of it, and what came of it."""

    sizing: Sizing
    predicted_hit_rate: float
    result: ColumnResult

    @property
    def within_share(self) -> float:
        return self.result.within_slo / self.result.requests if self.result.requests else 0.0

    def reaches(self, target: PlanTarget) -> bool:
        if target.hit_rate is not None and self.result.hit_rate < target.hit_rate - _RATE_SLACK:
            return False
        return target.slo_ttft_s is None or self.within_share >= target.slo_share

    def told(self) -> PlanTrial:
        setup = self.sizing.setup
        return PlanTrial(
            nodes=setup.nodes,
            node_bytes=setup.node_bytes,
            node_ssd_bytes=setup.node_ssd_bytes,
            predicted_hit_rate=self.predicted_hit_rate,
            simulated_hit_rate=self.result.hit_rate,
            ssd_hit_rate=self.result.ssd.hit_tokens / self.result.prompt_tokens
            if self.result.ssd is not None and self.result.prompt_tokens
            else 0.0,
            ttft_p95_s=self.result.ttft.p95_s,
            within_share=self.within_share,
            usd_per_hour=self.sizing.usd_per_hour,
            complete=self.result.complete,
        )


class _Search:
    """Tries sizes until the least that is known to be enough is close to the most that is known not to be."""

    def __init__(
        self, trace: Trace, base: ReplaySetup, target: PlanTarget, engine: ReplayEngine, traffic: Traffic
    ) -> None:
        self._trace, self._base, self._target, self._engine, self._traffic = trace, base, target, engine, traffic
        self._room = max(1, traffic.divider.blocks_max)
        self.progress: PlanProgress = lambda _: None
        self.trials: list[_Trial] = []

    def run(self) -> tuple[_Trial, str]:
        """What is suggested, and why it falls short of the target; empty where it does not."""
        target = self._target
        if target.hit_rate is None and target.slo_ttft_s is None:
            assert target.budget_usd_per_hour is not None
            return self._within_budget(target.budget_usd_per_hour)
        best = self._traffic.together.infinite_hit_rate
        if target.hit_rate is not None and target.hit_rate > best:
            return self._try(self._room), (
                f"no cache reaches a hit rate of {target.hit_rate:.4f} on this traffic: one without end hits "
                f"{best:.4f}, since every other prompt token comes for the first time. What follows holds all of it"
            )
        found = self._least()
        if found is None:
            chosen = max(self.trials, key=lambda trial: (trial.within_share, trial.result.hit_rate))
            return chosen, f"{_missed(target, chosen)} in the largest cache that was tried"
        budget = target.budget_usd_per_hour
        if budget is not None and found.sizing.usd_per_hour > budget:
            affordable, why = self._within_budget(budget)
            least = f"the target takes {found.sizing.usd_per_hour:.2f} USD an hour, and the budget is {budget:.2f}"
            return affordable, f"{least}; {why or _missed(target, affordable)} for the budget"
        return found, ""

    def so_far(self) -> tuple[_Trial, str]:
        """The best of what was simulated before the search was cut short, whole trials first, and what it reaches."""

        def worth(trial: _Trial) -> tuple[bool, bool, float]:
            reaches = trial.reaches(self._target)
            return trial.result.complete, reaches, -trial.sizing.usd_per_hour if reaches else trial.result.hit_rate

        best = max(self.trials, key=worth)
        count = sum(trial.result.complete for trial in self.trials)
        if not count:
            return best, f"not one size was simulated to its end; of {best.result.requests:,} requests"
        return best, f"of {count} simulated, a size that {'is' if best.reaches(self._target) else 'is not'} enough"

    def _least(self) -> _Trial | None:
        """The smallest size that was found to be enough; None if none was."""
        low, high, found = 0, math.ceil(self._room * _ROOM_MAX), None
        blocks = self._blocks_for(self._target.hit_rate or self._traffic.together.infinite_hit_rate / 2)
        while len(self.trials) < _TRIALS_MAX:
            trial = self._try(blocks)
            if trial.reaches(self._target):
                high, found = blocks, trial
            elif blocks >= high:
                break
            else:
                low = blocks
            if found is not None and (self._is_near(found) or high <= max(low * _CLOSE, self._room * _LEAST_SHARE)):
                break
            blocks = self._next(trial, low, high, is_enough=found is not None)
        return found

    def _is_near(self, trial: _Trial) -> bool:
        """Whether what reaches the hit rate is hardly more than was wanted."""
        rate = self._target.hit_rate
        is_all = self._target.slo_ttft_s is None
        return rate is not None and is_all and trial.result.hit_rate <= rate + _NEAR

    def _next(self, last: _Trial, low: int, high: int, *, is_enough: bool) -> int:
        """The size to try between one that is not enough and one that is, or that is the most."""
        if self._target.hit_rate is not None and self._target.slo_ttft_s is None:
            # What the simulation has lost or gained beside the curve, it will about the same at the next size.
            aimed = self._blocks_for(self._target.hit_rate + last.predicted_hit_rate - last.result.hit_rate)
            if low < aimed < high:
                return aimed
        if is_enough:
            return min(high, max(low + 1, round(math.sqrt(max(low, self._room * _LEAST_SHARE) * high))))
        return min(high, max(low + 1, min(self._room, 2 * low) if low < self._room else high))

    def _blocks_for(self, rate: float) -> int:
        """What the curves say; for more than they ever hit, room for everything."""
        division = self._traffic.divider.for_hits(rate * self._traffic.together.input_tokens)
        return max(1, self._room if division is None else sum(division.values()))

    def _within_budget(self, budget: float) -> tuple[_Trial, str]:
        """The most that is not dearer."""
        if self._sized(1).usd_per_hour > budget:
            least = self._try(1)
            return least, f"one node costs {least.sizing.usd_per_hour:.2f} USD an hour, and the budget is {budget:.2f}"
        low, high = 1, math.ceil(self._room * _ROOM_MAX)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._sized(middle).usd_per_hour <= budget else (low, middle - 1)
        return self._try(low), ""

    def _division(self, blocks: int) -> Division:
        return self._traffic.divider.of_blocks(blocks)

    def _sized(self, blocks: int) -> Sizing:
        return size(self._base, self._traffic, self._division(blocks))

    def _try(self, blocks: int) -> _Trial:
        division = self._division(blocks)
        sizing = size(self._base, self._traffic, division)
        setup = sizing.setup
        self.progress(
            f"simulating {setup.nodes} nodes, {blocks:,} blocks (trial {len(self.trials) + 1} of {_TRIALS_MAX} at most)"
        )
        curve = self._traffic.together
        predicted = self._traffic.divider.hit_tokens(division) / curve.input_tokens if curve.input_tokens else 0.0
        # One column; what is yielded before Ctrl-C is raised is a part of it, and worth telling.
        for result in self._engine.replay(self._trace, setup, [Column.SHARED], lambda column, served: None):
            self.trials.append(_Trial(sizing, predicted, result))
        return self.trials[-1]


# ---- what is said


def _missed(target: PlanTarget, trial: _Trial) -> str:
    """What a size reaches where it is not all that was asked for."""
    said = []
    if target.hit_rate is not None:
        said.append(f"a hit rate of {trial.result.hit_rate:.4f} where {target.hit_rate:.4f} is wanted")
    if target.slo_ttft_s is not None:
        said.append(
            f"{trial.within_share:.1%} of requests within {target.slo_ttft_s:g} s where {target.slo_share:.1%} are "
            "wanted"
        )
    return f"simulated {' and '.join(said)}" if said else f"simulated hit rate {trial.result.hit_rate:.4f}"


def _verdict(target: PlanTarget, trial: _Trial, shortfall: str) -> str:
    if shortfall:
        return f"not reached: {shortfall}"
    setup = trial.sizing.setup
    wanted = []
    if target.hit_rate is not None:
        wanted.append(f"a hit rate of {target.hit_rate:.4f}")
    if target.slo_ttft_s is not None:
        wanted.append(f"{target.slo_share:.1%} of requests within {target.slo_ttft_s:g} s")
    if target.budget_usd_per_hour is not None:
        wanted.append(f"at most {target.budget_usd_per_hour:.2f} USD an hour")
    nodes = "1 node reaches" if setup.nodes == 1 else f"{setup.nodes} nodes reach"
    within = "" if target.slo_ttft_s is None else f", {trial.within_share:.1%} of requests within the target"
    return (
        f"{nodes} {' and '.join(wanted)}: predicted hit rate {trial.predicted_hit_rate:.4f}, simulated "
        f"{trial.result.hit_rate:.4f}{within}, for {trial.sizing.usd_per_hour:.2f} USD an hour"
    )


def _tenants(curves: Mapping[str, HitCurve], chosen: _Trial, traffic: Traffic) -> dict[str, PlannedTenant]:
    extent_bytes = rounded_up(traffic.block_bytes)
    found = {}
    for name, curve in curves.items():
        dram, ssd = chosen.sizing.dram[name], chosen.sizing.ssd[name]
        simulated = chosen.result.tenants.get(name)
        found[name] = PlannedTenant(
            requests=curve.requests,
            prompt_tokens=curve.input_tokens,
            unique_bytes=curve.unique_blocks * extent_bytes,
            dram_reserved_bytes=dram * extent_bytes,
            ssd_reserved_bytes=ssd * extent_bytes,
            infinite_hit_rate=curve.infinite_hit_rate,
            predicted_hit_rate=curve.hit_rate(dram + ssd),
            simulated_hit_rate=None if simulated is None else simulated.hit_rate,
        )
    return found


def _points(curve: HitCurve, block_bytes: int) -> list[PlanPoint]:
    """At equal steps up to all distinct blocks."""
    last = max(1, curve.unique_blocks)
    sizes = [round(last * step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    return [PlanPoint(size_bytes=blocks * block_bytes, hit_rate=curve.hit_rate(blocks)) for blocks in sizes]


def _own_assumptions(sampled: float) -> list[Assumption]:
    said = "every block" if sampled == 1 else f"{sampled:.2%} of the blocks, chosen by a hash (SHARDS, FAST'15)"
    return [
        Assumption(
            name="prediction",
            value=f"LRU stack distances of {said}: each request after the one before, walls between tenants",
            source="Mattson et al., IBM Systems Journal 9(2), 1970",
        ),
        Assumption(
            name="division",
            value="the next block to whoever gains most by it, along the concave hull of each curve",
            source="Qureshi and Patt, MICRO 2006; Beckmann and Sanchez, HPCA 2015",
        ),
        Assumption(
            name="nodes",
            value=f"enough for memory, SSD, and traffic of {BUSY_MAX:.0%} of links and devices on the average",
        ),
    ]
