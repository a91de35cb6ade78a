"""Bounded labels: increments are counted once, series never go back, labels do not flicker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.metrics.catalog import GET_HITS, PUTS_REFUSED
from dataplane.metrics.labels import OTHER, PATIENCE_S, Ledger, TenantLabels
from dataplane.metrics.readings import Readings
from saltern.names import TenantId

HITS = GET_HITS.series()
REFUSED = PUTS_REFUSED.series("NODE_FULL")
NAMES = [TenantId(f"tenant-{number}") for number in range(6)]
LABELS_MAX = 2


def rank(labels: TenantLabels, used: Mapping[TenantId, int], traffic: Mapping[TenantId, int], now_s: float) -> None:
    for tenant in NAMES:
        labels.weigh(tenant, used_bytes=used.get(tenant, 0), traffic_bytes=traffic.get(tenant, 0))
    labels.rank(now_s)


#: What may happen between scrapes: (tenant, "count", how much), (tenant, "remove", -), (tenant, "add", -).
EVENTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["count", "count", "count", "remove", "add"]), st.integers(0, 9)),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 700)), max_size=12))
def test_no_series_goes_back_and_every_increment_seen_is_counted_once(rounds: list[tuple[list, int]]) -> None:  # type: ignore[type-arg]
    labels, ledger = TenantLabels(LABELS_MAX), Ledger()
    truth: dict[TenantId, Counter[object]] = {name: Counter() for name in NAMES[:3]}
    total = lost = 0
    shown: dict[tuple[str, object], int] = {}
    ended = 0
    now_s = 0.0
    for events, passed_s in rounds:
        removed = set()
        for name, what, count in events:
            if what == "remove" and name in truth:
                # What it counted since the last scrape, nobody has seen.
                lost += sum(truth.pop(name).values())
                removed.add(name)
            elif what == "add" and name not in truth and name not in removed:
                truth[name] = Counter()
            elif what == "count" and name in truth:
                truth[name][HITS if count % 2 else REFUSED] += count
                total += count
        now_s += passed_s
        present = list(truth)
        if labels.retain(present) and labels.is_ranking_due(now_s):
            sizes = {name: sum(counted.values()) for name, counted in truth.items()}
            rank(labels, sizes, sizes, now_s)
        ledger.retain(present)
        for name in removed:
            ended += sum(shown.pop((name, series), 0) for series in (HITS, REFUSED))
        for name, counted in truth.items():
            readings: Readings = dict(counted)  # type: ignore[arg-type]
            for series, value in ledger.account(name, readings, is_labelled=name in labels).items():
                assert value >= shown.get((name, series), 0)
                shown[name, series] = value
        for series, value in ledger.other.items():
            assert value >= shown.get((OTHER, series), 0)
            shown[OTHER, series] = value
        assert len(labels) <= LABELS_MAX
        assert total - lost <= sum(shown.values()) + ended <= total


def test_all_have_labels_while_there_is_room_and_keep_them() -> None:
    labels = TenantLabels(3)
    assert not labels.retain(NAMES[:3])
    assert labels.retain(NAMES)
    rank(labels, dict.fromkeys(NAMES, 10**9), dict.fromkeys(NAMES, 10**9), 0)
    assert all(name in labels for name in NAMES[:3])
    assert len(labels) == 3


def test_the_largest_by_use_and_by_traffic_share_the_labels() -> None:
    labels = TenantLabels(2)
    labels.retain(NAMES)
    rank(labels, {NAMES[0]: 100, NAMES[1]: 90, NAMES[5]: 1}, {NAMES[5]: 1000, NAMES[4]: 900, NAMES[0]: 1}, 0)
    assert NAMES[0] in labels and NAMES[5] in labels


def test_a_label_is_withdrawn_only_after_long_patience_and_only_for_another() -> None:
    labels = TenantLabels(1)
    labels.retain(NAMES)
    rank(labels, {NAMES[0]: 100}, {}, 0)
    bigger = {NAMES[0]: 1, NAMES[1]: 100}
    rank(labels, bigger, {}, 20)
    rank(labels, bigger, {}, 20 + PATIENCE_S - 1)
    assert NAMES[0] in labels
    rank(labels, {NAMES[0]: 200, NAMES[1]: 100}, {}, 20 + PATIENCE_S)  # large again: patience begins anew
    rank(labels, bigger, {}, 40 + PATIENCE_S)
    assert NAMES[0] in labels
    rank(labels, bigger, {}, 60 + 2 * PATIENCE_S)
    assert NAMES[1] in labels and len(labels) == 1


def test_nobody_has_a_label_where_none_is_allowed() -> None:
    labels = TenantLabels(0)
    assert labels.retain(NAMES)
    rank(labels, {NAMES[0]: 100}, {NAMES[0]: 100}, 0)
    assert len(labels) == 0


def test_a_tenant_that_is_deleted_and_made_anew_between_two_scrapes_is_counted_on() -> None:
    ledger = Ledger()
    assert ledger.account(NAMES[0], {HITS: 10}, is_labelled=True)[HITS] == 10
    assert ledger.account(NAMES[0], {HITS: 3}, is_labelled=True)[HITS] == 13


def test_a_label_that_comes_late_begins_at_zero_and_one_that_comes_back_goes_on() -> None:
    ledger = Ledger()
    ledger.account(NAMES[0], {HITS: 10}, is_labelled=False)
    assert ledger.account(NAMES[0], {HITS: 10}, is_labelled=True)[HITS] == 0
    assert ledger.account(NAMES[0], {HITS: 15}, is_labelled=True)[HITS] == 5
    ledger.account(NAMES[0], {HITS: 20}, is_labelled=False)
    assert ledger.other[HITS] == 15
    assert ledger.account(NAMES[0], {HITS: 21}, is_labelled=True)[HITS] == 6
