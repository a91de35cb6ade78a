"""What a replay found, as values with one JSON form (camelCase): filled by every engine, read by every output.

Two engines fill it and are never mixed in one report: **simulated** (the node's own core in virtual time) and
**measured** (real nodes and real bytes; prefill is modelled all the same). ``None`` is *not known*: a figure that an
engine cannot give is left out, never guessed. Times are seconds, sizes bytes, rates 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.replay.measures import Measures
from saltern.replay.setup import ReplaySetup

#: Of the JSON form; a reader refuses a later one.
FORMAT_VERSION: Final = 1


class EngineKind(StrEnum):
    """Where figures come from; printed beside each of them."""

    SIMULATED = "simulated"
    MEASURED = "measured"

    @property
    def note(self) -> str:
        """What that means for who reads the figures."""
        if self is EngineKind.SIMULATED:
            return "the node's code in virtual time; no figure below was measured"
        return "real nodes and bytes; prefill and decoding are modelled"


class Column(StrEnum):
    """One way to run the same traffic; docs/replay.md says what each means."""

    NO_CACHE = "no-cache"  #: no Saltern: engines have only what is in their own memory
    COLD = "cold"  #: from empty nodes, each tenant behind walls of its own share
    WARM = "warm"  #: the same traffic once more, on what ``cold`` has left behind
    SHARED = "shared"  #: from empty nodes, all tenants in one pool under the quotas that were set up
    AFTER_RESTART = "after-restart"  #: as ``shared``; half way through every node restarts
    NODE_LOST = "node-lost"  #: as ``shared``; half way through one node is gone for good


class _Result(msgspec.Struct, rename="camel", kw_only=True):
    """Unknown fields of a later program are ignored, missing ones take their defaults."""


class TraceFacts(_Result):
    """Which requests: complete enough to find and check them again."""

    name: str
    format: str
    sha256: str
    arrival: str
    identity: str
    identity_note: str
    block_tokens: int
    notes: list[str] = []
    provenance: dict[str, Any] = {}


class Assumption(_Result):
    """Something that figures rest on and that nobody measured here."""

    name: str
    value: str
    source: str = ""


class Quantiles(_Result):
    """Of one kind of time, in seconds, over ``count`` requests; nearest rank, exact."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0

    @classmethod
    def of(cls, times_s: Iterable[float]) -> Self:
        """Nearest-rank quantiles; all zero for no times. While they are ranked they take 32 bytes each."""
        ranked = sorted(times_s)
        if not ranked:
            return cls()

        def rank(share: float) -> float:
            return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

        return cls(
            count=len(ranked),
            mean_s=math.fsum(ranked) / len(ranked),
            p50_s=rank(0.50),
            p95_s=rank(0.95),
            p99_s=rank(0.99),
            max_s=ranked[-1],
        )


class Series(_Result):
    """Over time, in bins of ``bin_s``; a bin without prompt tokens has hit rate None.

    Attributes:
        occupancy_bytes: of each tenant as each bin begins, on all nodes together.
    """

    bin_s: float = 0.0
    hit_rate: list[float | None] = []
    read_bytes: list[int] = []
    written_bytes: list[int] = []
    occupancy_bytes: dict[str, list[int]] = {}


class TenantResult(_Result):
    """One tenant in one column.

    Attributes:
        hit_rate: prompt tokens that were not prefilled because Saltern had them, over prompt tokens.
        alone_hit_rate: its hit rate in the ``cold`` column, behind walls of its share; None if that was not run.
        rho: ``hit_rate / alone_hit_rate``; None where a cache does not serve it alone either.
        slowdown: mean TTFT over that in the ``cold`` column: above 1 the neighbours cost it time.
        occupancy_share: of the bytes held at the end by all tenants.
        evicted_by: of its entries that were evicted, by whose put; its own are under its own name.
        within_slo: requests that met every target.
        ssd_hit_tokens: the part of ``hit_tokens`` that was on SSD.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ssd_hit_tokens: int = 0
    hit_rate: float = 0.0
    alone_hit_rate: float | None = None
    rho: float | None = None
    slowdown: float | None = None
    occupancy_bytes: int = 0
    occupancy_share: float = 0.0
    evictions_by_cause: dict[str, int] = {}
    evicted_by: dict[str, int] = {}
    refused_by_reason: dict[str, int] = {}
    within_slo: int = 0
    ttft: Quantiles = msgspec.field(default_factory=Quantiles)
    end_to_end: Quantiles = msgspec.field(default_factory=Quantiles)


class SsdResult(_Result):
    """The SSD tier of all nodes in one column.

    Attributes:
        hit_tokens: the part of the column's that was on SSD.
        read_bytes, written_bytes: of blocks; what was written again when space was reclaimed is in the latter.
        dropped: blocks that memory gave up and SSD did not take; ``dropped_by_reason`` says why.
        evictions: blocks lost when space was reclaimed.
        resident_bytes: of blocks, at the end.
    """

    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    dropped_by_reason: dict[str, int] = {}
    evictions: int = 0
    resident_bytes: int = 0

    @property
    def dropped(self) -> int:
        return sum(self.dropped_by_reason.values())


class NodeResult(_Result):
    """One cache node in one column; ``busy_s`` is how long its link carried bytes."""

    read_bytes: int = 0
    written_bytes: int = 0
    resident_bytes: int = 0
    busy_s: float = 0.0


class ColumnResult(_Result):
    """What happened to the traffic in one column.

    Attributes:
        complete: every request of the trace was served; otherwise figures cover those that were.
        requests: that were served to their end: *completions*.
        shed: that found a queue full and were turned away.
        prompt_tokens, output_tokens: of those.
        hit_tokens: prompt tokens whose prefill was skipped because Saltern had their blocks.
        engine_hit_tokens: the same because the engine that served the request had them itself.
        duration_s: from the first arrival to the end of the last answer.
        recorded_s: from the first arrival to the last, as the trace has it: what machines are paid for.
        read_bytes, written_bytes: moved from and to nodes.
        read_s, written_s: that the links of nodes were busy with each, summed over nodes.
        transfer_s, prefill_s, queue_s: summed over requests; TTFT is their sum.
        within_slo: completions that met every target.
        hit_rate: ``hit_tokens / prompt_tokens``.
        share_of_infinite, share_of_opt: hit rate over that of a cache without end, and of the best choice of victims
            (Belady, one pool of the nodes' blocks); None where there is none to compare with.
        cost_per_completion_usd: of completions within the SLO; None without prices or without such completions.
        relative_cost: the same over that of ``no-cache``: (1 + extra cost) / (ratio of completions).
        ssd: None where nodes have none.
        block_accesses: blocks of prompts that nodes were asked for or given; 0 where there were no nodes.
        driver_cpu_s: CPU seconds that driving took: of the simulator, or of the load generator.
        measures: what only a measured replay can say; None in a simulated one.
    """

    column: Column
    complete: bool = False
    requests: int = 0
    shed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    engine_hit_tokens: int = 0
    duration_s: float = 0.0
    recorded_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    queue_s: float = 0.0
    evictions_by_cause: dict[str, int] = {}
    refused_by_reason: dict[str, int] = {}
    ttft: Quantiles = msgspec.field(default_factory=Quantiles)
    end_to_end: Quantiles = msgspec.field(default_factory=Quantiles)
    within_slo: int = 0
    hit_rate: float = 0.0
    share_of_infinite: float | None = None
    share_of_opt: float | None = None
    cost_per_completion_usd: float | None = None
    relative_cost: float | None = None
    tenants: dict[str, TenantResult] = {}
    nodes: dict[str, NodeResult] = {}
    series: Series = msgspec.field(default_factory=Series)
    ssd: SsdResult | None = None
    block_accesses: int = 0
    driver_cpu_s: float = 0.0
    measures: Measures | None = None

    @property
    def moved_bytes(self) -> float:
        """From and to nodes, of the model's own blocks also where smaller ones stood for them."""
        scale = 1.0 if self.measures is None else self.measures.bytes_scale
        return (self.read_bytes + self.written_bytes) * scale

    @property
    def goodput_per_s(self) -> float:
        """Completions within the SLO, each second."""
        return self.within_slo / self.duration_s if self.duration_s else 0.0

    @property
    def min_rho(self) -> float | None:
        """The least rho of any tenant that a cache serves; None where there is none."""
        return min((tenant.rho for tenant in self.tenants.values() if tenant.rho is not None), default=None)


class References(_Result):
    """Hit rates to compare with, over the same requests; None where blocks were too many to count.

    Attributes:
        infinite_hit_rate: of a cache without end, from empty.
        infinite_warm_hit_rate: of one that has seen all of it before.
        opt_hit_rate: Belady's MIN with bypass in one pool of ``capacity_blocks``.
    """

    infinite_hit_rate: float | None = None
    infinite_warm_hit_rate: float | None = None
    opt_hit_rate: float | None = None
    capacity_blocks: int = 0
    unique_blocks: int | None = None
    note: str = ""


class SensitivityCell(_Result):
    """Relative cost if prices and completions were other than they are."""

    extra_cost: float
    completions_ratio: float
    relative_cost: float


class BreakEven(_Result):
    """Where caching stops to pay, everything else as it is; None where it never or always does.

    Attributes:
        bandwidth_bytes_per_s: below it, reading a prefix of ``prefix_tokens`` takes longer than computing it.
        hold_s: by tier, how long a block may wait for its next use until keeping it costs more than computing it.
        hit_rate: at which the time saved by skipped prefill pays for the store, at the prices given.
    """

    prefix_tokens: int
    bandwidth_bytes_per_s: float
    hold_s: dict[str, float] = {}
    hit_rate: float | None = None


class CostResult(_Result):
    """Whether ``column`` pays beside ``no-cache``, and what that rests on.

    Attributes:
        extra_cost: of store, network and operations, as a share of what the engines cost.
        completions_ratio: completions within the SLO over those without a cache.
        relative_cost: ``(1 + extra_cost) / completions_ratio``; None where nothing met the SLO on either side.
        verdict: one sentence: *pays* or *does not pay*, and at which assumption that flips.
    """

    column: Column
    extra_cost: float
    completions_ratio: float | None
    relative_cost: float | None
    pays: bool | None
    verdict: str
    sensitivity: list[SensitivityCell] = []
    break_even: BreakEven | None = None


class ReplayReport(_Result):
    """All of one replay.

    Attributes:
        complete: every column of the setup is here and complete; False after Ctrl-C or a damaged trace, and ``ended``
            then says why.
    """

    engine: EngineKind
    setup: ReplaySetup
    trace: TraceFacts
    parts: list[TraceFacts] = []
    format_version: int = FORMAT_VERSION
    program: str = ""
    complete: bool = False
    ended: str = ""
    assumptions: list[Assumption] = []
    columns: list[ColumnResult] = []
    references: References = msgspec.field(default_factory=References)
    costs: list[CostResult] = []

    def column(self, column: Column) -> ColumnResult | None:
        """The result of one column, or None if it was not run."""
        return next((result for result in self.columns if result.column is column), None)


def encode_report(report: ReplayReport) -> bytes:
    """The report as JSON: one object, indented, with a line's end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode_report(content: bytes, source: str = "report") -> ReplayReport:
    """The report that :func:`encode_report` wrote.

    Raises:
        InvalidArgumentError: reason INVALID_REPORT: it is no report, or one of a later program.
    """
    hint = "give a file that `saltern replay --json FILE` wrote"
    try:
        report = msgspec.json.decode(content, type=ReplayReport)
    except msgspec.DecodeError as error:  # validation errors too
        raise InvalidArgumentError(f"{source}: {str(error)[:300]}", reason="INVALID_REPORT", hint=hint) from None
    if report.format_version > FORMAT_VERSION:
        raise InvalidArgumentError(
            f"{source}: report format {report.format_version}, this program reads up to {FORMAT_VERSION}",
            reason="INVALID_REPORT",
            hint="use the version of saltern that wrote it",
        )
    return report


def read_report(path: Path) -> ReplayReport:
    """A report from a file; raises as :func:`decode_report`, also where the file cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read the report {str(path)!r} ({error.strerror})", reason="INVALID_REPORT", hint="name a file"
        ) from None
    return decode_report(content, str(path))
