"""What ``saltern plan`` suggests, as values with one JSON form (camelCase); sizes bytes, rates 0 to 1."""

from __future__ import annotations

import csv
import io

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.replay.results import Assumption, EngineKind, TraceFacts
from saltern.replay.setup import ReplaySetup
from saltern.spreadsheets import text_cell

FORMAT_VERSION = 1


class _Result(msgspec.Struct, rename="camel", kw_only=True):
    pass


class PlanTarget(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """What is wanted; all that is set must hold. None: not asked for.

    Attributes:
        hit_rate: of all prompt tokens.
        slo_ttft_s: time to first token that ``slo_share`` of the requests must meet.
        budget_usd_per_hour: of the store.
    """

    hit_rate: float | None = None
    slo_ttft_s: float | None = None
    slo_share: float = 0.95
    budget_usd_per_hour: float | None = None

    def check(self) -> None:
        """Raises InvalidArgumentError (INVALID_PLAN): nothing is asked for, or something that cannot be."""
        wanted = (self.hit_rate, self.slo_ttft_s, self.budget_usd_per_hour)
        if all(one is None for one in wanted):
            _refuse("without a target", "name one: --hit-rate, --slo-ttft-ms or --budget")
        if self.hit_rate is not None and not 0 < self.hit_rate <= 1:
            _refuse(f"for a hit rate of {self.hit_rate:g}", "a rate is above 0, up to 1")
        if not 0 < self.slo_share <= 1:
            _refuse(f"for {self.slo_share:g} of the requests", "a share is above 0, up to 1")
        for value in wanted[1:]:
            if value is not None and not 0 < value < float("inf"):
                _refuse(f"for {value:g}", "times and budgets are above 0")


def _refuse(what: str, hint: str) -> None:
    raise InvalidArgumentError(f"cannot plan {what}", reason="INVALID_PLAN", hint=hint)


class PlanPoint(_Result):
    """One point of a curve."""

    size_bytes: int
    hit_rate: float


class TenantCurve(_Result):
    """One tenant's, alone in a cache."""

    tenant: str
    points: list[PlanPoint]


class PlannedTenant(_Result):
    """What one tenant should have, over all nodes.

    Attributes:
        unique_bytes: of all its distinct blocks: more is of no use to it.
        dram_reserved_bytes, ssd_reserved_bytes: to be reserved for it; 0 where others gain more by every block.
        infinite_hit_rate: of a cache without end.
        predicted_hit_rate: by its curve, behind walls of that size.
        simulated_hit_rate: beside the others.
    """

    requests: int
    prompt_tokens: int
    unique_bytes: int
    dram_reserved_bytes: int
    ssd_reserved_bytes: int
    infinite_hit_rate: float
    predicted_hit_rate: float
    simulated_hit_rate: float | None


class PlanTrial(_Result):
    """One size that was simulated.

    Attributes:
        ssd_hit_rate: the part of ``simulated_hit_rate`` that was read from SSD.
        within_share: of requests that met the target of time; 1 where there is none.
        usd_per_hour: of the store.
        complete: False for a simulation that was cut short: its figures are of the requests until then.
    """

    nodes: int
    node_bytes: int
    node_ssd_bytes: int
    predicted_hit_rate: float
    simulated_hit_rate: float
    ssd_hit_rate: float
    ttft_p95_s: float
    within_share: float
    usd_per_hour: float
    complete: bool = True


class Plan(_Result):
    """A suggestion and what it rests on.

    Attributes:
        reached: the simulation of the suggestion met the target.
        verdict: one sentence; says what is missing where it was not reached.
        setup: of the suggestion, as a replay takes it.
        nodes_reason: what the number of nodes follows from.
        trials: every size that was simulated, in order; ``chosen`` is the number of the suggestion.
        sampled: share of the blocks that curves are made of; 1: they are exact.
        complete: False if the search was cut short: the suggestion is the best of what was known then.
    """

    trace: TraceFacts
    target: PlanTarget
    reached: bool
    verdict: str
    setup: ReplaySetup
    nodes_reason: str
    trials: list[PlanTrial]
    chosen: int
    tenants: dict[str, PlannedTenant]
    curve: list[PlanPoint]
    tenant_curves: list[TenantCurve]
    infinite_hit_rate: float
    unique_blocks: int
    block_bytes: int
    sampled: float
    complete: bool = True
    engine: EngineKind = EngineKind.SIMULATED
    parts: list[TraceFacts] = []
    format_version: int = FORMAT_VERSION
    program: str = ""
    assumptions: list[Assumption] = []

    @property
    def suggestion(self) -> PlanTrial:
        return self.trials[self.chosen]


def encode_plan(plan: Plan) -> bytes:
    """The plan as JSON: one object, indented, with a line's end."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n"


def plan_csv(plan: Plan) -> str:
    """The curves: tenant (empty for all in one cache), size, hit rate by LRU."""
    text = io.StringIO(newline="")
    lines = csv.writer(text)  # RFC 4180: with its line end, CR and LF in names are quoted too
    lines.writerow(["trace_sha256", "tenant", "size_bytes", "lru_hit_rate"])
    for tenant, points in [("", plan.curve), *((one.tenant, one.points) for one in plan.tenant_curves)]:
        for point in points:
            lines.writerow([plan.trace.sha256, text_cell(tenant), point.size_bytes, f"{point.hit_rate:.6f}"])
    return text.getvalue()
