"""Two reports beside each other: what differs comes first, and different experiments are not compared by mistake."""

from __future__ import annotations

import pytest

from saltern.errors import FailedPreconditionError
from saltern.replay.diff import Change, Comparison, Difference, compare_reports, require_same_experiment
from saltern.replay.results import Column, EngineKind
from saltern.replay.rows import Unit, change_cell, percent_cell
from tests.clients.replay.reports import report


def change(comparison: Comparison, column: Column, key: str, tenant: str | None = None) -> Change:
    found = [one for one in comparison.changes if (one.column, one.key, one.tenant) == (column, key, tenant)]
    assert len(found) == 1
    return found[0]


def test_a_report_beside_itself_has_no_difference_and_no_change() -> None:
    comparison = compare_reports(report(), report())
    require_same_experiment(comparison)
    assert comparison.differences == []
    assert comparison.left_out == []
    assert comparison.changes
    assert all(one.is_equal for one in comparison.changes)


def test_a_change_is_absolute_and_relative() -> None:
    comparison = compare_reports(report(hit_rate=0.4), report(hit_rate=0.5, nodes=4))
    require_same_experiment(comparison)
    assert comparison.differences == [Difference("setup.nodes", "2", "4")]
    rate = change(comparison, Column.SHARED, "hit_rate")
    assert (rate.first, rate.second, rate.unit) == (0.4, 0.5, Unit.RATE)
    assert (rate.absolute, rate.relative) == (pytest.approx(0.1), pytest.approx(0.25))
    assert change(comparison, Column.SHARED, "hit_rate", "chat").relative == pytest.approx(0.25)
    assert change(comparison, Column.SHARED, "completions").is_equal


def test_what_is_not_known_has_no_change() -> None:
    one, other = report(), report()
    other.columns[3].share_of_opt = 0.5
    one.columns[3].shed, other.columns[3].shed = 0, 0
    comparison = compare_reports(one, other)
    share = change(comparison, Column.SHARED, "share_of_opt")
    assert (share.first, share.second, share.absolute, share.relative) == (None, 0.5, None, None)
    assert not share.is_equal
    assert change(comparison, Column.SHARED, "shed").relative is None, "nothing is no share of zero"
    assert not [
        one for one in comparison.changes if (one.column, one.key, one.tenant) == (Column.NO_CACHE, "hit_rate", None)
    ]


def test_the_last_bits_of_sums_are_no_change() -> None:
    one, other = report(), report()
    other.columns[3].prefill_s = one.columns[3].prefill_s * (1 + 1e-13)
    assert change(compare_reports(one, other), Column.SHARED, "prefill_s").is_equal


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (report(sha256="cd" * 32), "trace.sha256"),
        (report(engine=EngineKind.MEASURED), "engine"),
    ],
)
def test_different_experiments_are_refused(other: object, name: str) -> None:
    comparison = compare_reports(report(), other, first_name="a.json", second_name="b.json")  # type: ignore[arg-type]
    assert comparison.differences[0].name == name
    with pytest.raises(FailedPreconditionError, match=f"different experiments.*{name}") as refused:
        require_same_experiment(comparison)
    assert refused.value.reason == "DIFFERENT_EXPERIMENTS"
    assert "--across-experiments" in refused.value.hint
    assert comparison.changes, "for who wants them all the same"


def test_other_requests_under_the_same_name_are_another_experiment() -> None:
    other = report()
    other.columns[3].requests = 99
    with pytest.raises(FailedPreconditionError, match="requests of shared"):
        require_same_experiment(compare_reports(report(), other))
    other.columns[3].shed = 1
    require_same_experiment(compare_reports(report(), other))


def test_engines_that_differ_are_both_named_and_their_assumptions_told() -> None:
    other = report(engine=EngineKind.MEASURED)
    other.assumptions[0].value = "of clocks"
    comparison = compare_reports(report(), other)
    assert comparison.engine == "simulated beside measured"
    assert Difference("assumption, time", "of small", "of clocks") in comparison.differences


def test_columns_of_one_report_only_and_parts_are_left_out() -> None:
    one, other = report(columns=[Column.COLD, Column.SHARED]), report(columns=[Column.SHARED, Column.NODE_LOST])
    other.columns[0].complete = False
    comparison = compare_reports(one, other)
    assert comparison.changes == []
    assert [reason.partition(":")[0] for reason in comparison.left_out] == ["shared", "cold", "node-lost"]


def test_every_setting_is_compared() -> None:
    one, other = report(tenants=["a"]), report(tenants=["b"])
    names = {found.name for found in compare_reports(one, other).differences}
    assert {"setup.quotas.a.reservedBytes", "setup.quotas.b.weight"} <= names
    assert "setup.quotas.a.limitBytes" not in names, "not limited in either"


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(0.1, Unit.RATE, "+0.1000"), (-3, Unit.COUNT, "-3"), (0, Unit.BYTES, "0"), (None, Unit.USD, "-")],
)
def test_changes_have_their_sign(value: float | None, unit: Unit, said: str) -> None:
    assert change_cell(value, unit) == said


def test_shares_have_their_sign() -> None:
    assert [percent_cell(value) for value in (0.25, -1.0, 0.0, None)] == ["+25.0%", "-100.0%", "0", "-"]
