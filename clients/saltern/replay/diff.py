"""Two reports beside each other: first what differs in how they were made, then what came out.

Reports of other traffic or of another engine are other *experiments*. Their figures do not say what a change of the
setup does, so :func:`require_same_experiment` refuses them; who wants them anyway is told so in every heading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from saltern.errors import FailedPreconditionError
from saltern.replay.results import Column, ColumnResult, ReplayReport, TenantResult
from saltern.replay.rows import TENANT_ROWS, Row, TenantRow, Unit, Value, all_rows

#: Facts that make another experiment when they differ.
_EXPERIMENT: Final = frozenset({"engine", "trace.sha256"})
_ABSENT: Final = "-"


class Difference(msgspec.Struct, frozen=True, rename="camel"):
    """One thing that the reports were made with differently.

    Attributes:
        name: as the JSON form of a report has it, with dots.
        is_experiment: what came out cannot be laid to the setup.
    """

    name: str
    first: str
    second: str
    is_experiment: bool = False


class Change(msgspec.Struct, frozen=True, rename="camel"):
    """One figure in both.

    Attributes:
        tenant: None for a figure of the whole column.
        absolute: second less first; None where one is not known.
        relative: that over the first; None also where the first is 0.
    """

    column: Column
    tenant: str | None
    key: str
    label: str
    unit: Unit
    first: Value
    second: Value
    absolute: Value
    relative: float | None

    @property
    def is_equal(self) -> bool:
        return self.absolute == 0


class Comparison(msgspec.Struct, frozen=True, rename="camel"):
    """Of two reports.

    Attributes:
        first_name, second_name: what the reports are called, as files.
        differences: what they were made with; those of the experiment first.
        left_out: columns that are not compared, and why.
        changes: every figure that both have, column by column, tenants after their column.
    """

    first_name: str
    second_name: str
    first_engine: str
    second_engine: str
    same_experiment: bool
    differences: list[Difference]
    left_out: list[str]
    changes: list[Change]

    @property
    def engine(self) -> str:
        """What all figures are labelled with."""
        if self.first_engine == self.second_engine:
            return self.first_engine
        return f"{self.first_engine} beside {self.second_engine}"


def compare_reports(
    first: ReplayReport, second: ReplayReport, *, first_name: str = "A", second_name: str = "B"
) -> Comparison:
    """All of it; other experiments are compared too, and told apart by ``same_experiment``."""
    left_out: list[str] = []
    compared = [
        (one, other)
        for column in Column
        if (one := first.column(column)) is not None and (other := second.column(column)) is not None
        if _is_comparable(one, other, left_out)
    ]
    for ours, theirs, name in ((first, second, first_name), (second, first, second_name)):
        left_out += [f"{one.column}: only in {name}" for one in ours.columns if theirs.column(one.column) is None]
    found = [*_setup_differences(first, second), *_traffic_differences(compared)]
    return Comparison(
        first_name=first_name,
        second_name=second_name,
        first_engine=str(first.engine),
        second_engine=str(second.engine),
        same_experiment=not any(one.is_experiment for one in found),
        differences=sorted(found, key=lambda one: not one.is_experiment),
        left_out=left_out,
        changes=[change for one, other in compared for change in _changes(first, second, one, other)],
    )


def require_same_experiment(comparison: Comparison) -> None:
    """Nothing, where the reports are of one experiment.

    Raises:
        FailedPreconditionError: reason DIFFERENT_EXPERIMENTS: they are of other traffic or of another engine.
    """
    if comparison.same_experiment:
        return
    names = [one.name for one in comparison.differences if one.is_experiment]
    raise FailedPreconditionError(
        f"{comparison.first_name} and {comparison.second_name} are reports of different experiments: they differ in "
        f"{', '.join(names)}",
        reason="DIFFERENT_EXPERIMENTS",
        hint="replay the same trace with the same engine, or compare them all the same with --across-experiments",
        metadata={"differences": ", ".join(names)},
    )


# ---- what they were made with


def _setup_differences(first: ReplayReport, second: ReplayReport) -> list[Difference]:
    ours, theirs = _made_with(first), _made_with(second)
    if first.engine is not second.engine or first.program != second.program:
        # Otherwise they follow from the setup, and would only say it twice.
        ours |= {f"assumption, {one.name}": one.value for one in first.assumptions}
        theirs |= {f"assumption, {one.name}": one.value for one in second.assumptions}
    return [
        Difference(name, one, other, is_experiment=name in _EXPERIMENT)
        for name in {**ours, **theirs}
        if (one := ours.get(name, _ABSENT)) != (other := theirs.get(name, _ABSENT))
    ]


def _made_with(report: ReplayReport) -> dict[str, str]:
    trace = report.trace
    return {
        "engine": str(report.engine),
        "trace.sha256": trace.sha256,
        "trace.name": trace.name,
        "trace.blockTokens": str(trace.block_tokens),
        "trace.identity": trace.identity,
        "trace.arrival": trace.arrival,
        **{f"trace.parts.{number}": f"{part.name} {part.sha256}" for number, part in enumerate(report.parts)},
        **dict(_flat("setup", msgspec.to_builtins(report.setup))),
        "program": report.program,
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, _ABSENT if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _traffic_differences(compared: list[tuple[ColumnResult, ColumnResult]]) -> list[Difference]:
    """Other requests under the same name would be another experiment; those that were turned away are not counted."""
    return [
        Difference(f"requests of {one.column}", f"{_offered(one):,}", f"{_offered(other):,}", is_experiment=True)
        for one, other in compared
        if _offered(one) != _offered(other)
    ]


def _offered(result: ColumnResult) -> int:
    return result.requests + result.shed


def _is_comparable(one: ColumnResult, other: ColumnResult, left_out: list[str]) -> bool:
    if one.complete and other.complete:
        return True
    left_out.append(f"{one.column}: not complete, so its figures cover other requests")
    return False


# ---- what came out


def _changes(first: ReplayReport, second: ReplayReport, one: ColumnResult, other: ColumnResult) -> Iterator[Change]:
    for row in all_rows(first, second):
        yield from _change(one.column, None, row, row.value(one), row.value(other))
    for name in sorted(one.tenants.keys() & other.tenants.keys()):
        yield from _tenant_changes(one.column, name, one.tenants[name], other.tenants[name])


def _tenant_changes(column: Column, name: str, one: TenantResult, other: TenantResult) -> Iterator[Change]:
    for row in TENANT_ROWS:
        yield from _change(column, name, row, row.value(one), row.value(other))


def _change(column: Column, tenant: str | None, row: Row | TenantRow, first: Value, second: Value) -> Iterator[Change]:
    if first is None and second is None:
        return
    absolute = _less(first, second)
    yield Change(
        column=column,
        tenant=tenant,
        key=row.key,
        label=row.label.strip(),
        unit=row.unit,
        first=first,
        second=second,
        absolute=absolute,
        relative=absolute / first if absolute is not None and first else None,
    )


def _less(first: Value, second: Value) -> Value:
    """Second less first."""
    if first is None or second is None:
        return None
    # Sums of the same times in another order differ in their last bits.
    return 0 if math.isclose(first, second, rel_tol=1e-9) else second - first
