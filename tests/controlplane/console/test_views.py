"""What pages say, from messages of the services: no server, no database, no clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.console.views import texts
from controlplane.console.views.audit import Filter, event_rows, read_filter
from controlplane.console.views.charts import HEIGHT, WIDTH, Slot, bar_chart, ratio_chart
from controlplane.console.views.cost import cost_view, find_month, months_until
from controlplane.console.views.keys import key_rows
from controlplane.console.views.navigation import home, navigation
from controlplane.console.views.notices import find_notice
from controlplane.console.views.platform import newest_version, node_figures, node_rows, tenant_rows
from controlplane.console.views.salts import salt_view
from controlplane.console.views.sharing import group_views
from controlplane.console.views.usage import PERIODS, find_period, usage_view
from saltern.admin.v1.audit_pb2 import AuditEvent, ListAuditEventsRequest
from saltern.admin.v1.credentials_pb2 import ROLE_WRITER, ApiKey
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD
from saltern.admin.v1.salt_policies_pb2 import SaltEpoch, SaltPolicy
from saltern.admin.v1.sharing_groups_pb2 import SharingGroup, SharingGroupMember
from saltern.admin.v1.tenants_pb2 import Tenant
from saltern.admin.v1.usage_pb2 import Node, TierUsage, Usage, UsageRecord
from saltern.errors import InvalidArgumentError
from saltern.names import TenantId
from tenants.roles import Role

GIB = 1 << 30
NOW = datetime(2026, 11, 30, 7, 30, tzinfo=UTC)
ACME = TenantId("acme")
counts = st.integers(0, 10**15)


def record(hours_ago: int, **values: object) -> UsageRecord:
    made = UsageRecord(**values)  # type: ignore[arg-type]
    made.start_time.FromDatetime(NOW.replace(minute=0) - timedelta(hours=hours_ago))
    return made


# ---- words and numbers


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1 k"), (1234, "1.2 k"), (99_949, "99.9 k"), (999_499, "999 k"),
     (999_500, "1.0 M"), (1_500_000, "1.5 M"), (10**15, "1000 T")],
)  # fmt: skip
def test_a_headline_has_three_digits_and_a_letter(number: int, text: str) -> None:
    assert texts.short_count(number) == text


@given(counts)
def test_a_headline_is_the_number_within_its_digits(number: int) -> None:
    value, _, unit = texts.short_count(number).partition(" ")
    factor = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[unit]
    assert abs(float(value) * factor - number) <= 0.051 * max(factor, number / 10) and len(value) <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "none"), (1, "1 second"), (90, "90 seconds"), (3600, "1 hour"), (5400, "90 minutes"), (604_800, "7 days")],
)
def test_a_duration_is_told_in_the_largest_unit_that_divides_it(seconds: int, text: str) -> None:
    assert texts.duration(seconds) == text


def test_times_that_are_not_set_are_not_1970() -> None:
    unset = Tenant().create_time
    assert texts.stamp(unset) == texts.NOTHING and texts.stamp(unset, "never") == "never"
    assert texts.exact_stamp(unset) == texts.NOTHING and texts.ago(texts.to_datetime(unset), NOW) == "never"
    assert texts.ago(NOW - timedelta(seconds=119), NOW) == "119 seconds ago"
    assert texts.ago(NOW - timedelta(seconds=120), NOW) == "2 minutes ago"
    assert texts.ago(NOW + timedelta(seconds=5), NOW) == "0 seconds ago"  # a clock that is ahead
    assert texts.ratio(1, 0) == texts.NOTHING and texts.ratio(1, 3) == "33.3 %"


def test_a_value_of_a_newer_release_is_told_by_its_number() -> None:
    assert texts.enum_word(Node.State, Node.STATE_LIVE, "STATE_") == "live"
    assert texts.enum_word(Node.State, 77, "STATE_") == "77"


# ---- charts

slots = st.lists(st.tuples(st.none() | counts, st.none() | counts), min_size=1, max_size=40).map(
    lambda values: [Slot(f"h{number}", pair) for number, pair in enumerate(values)]
)


@given(slots)
def test_bars_are_stacked_within_the_drawing_and_the_highest_fills_it(shown: list[Slot]) -> None:
    chart = bar_chart("c", "C", shown, ("one", "two"), lambda value: f"{value}", slot_word="Hour")
    assert all(bar.x >= 0 and bar.x + bar.width <= WIDTH + 0.02 for bar in chart.bars)
    assert all(bar.y >= -0.03 and bar.y + bar.height <= HEIGHT + 0.03 for bar in chart.bars)
    totals = [sum(value or 0 for value in slot.values) for slot in shown]
    assert chart.is_empty == (max(totals) == 0)
    if not chart.is_empty:
        assert min(bar.y for bar in chart.bars) == pytest.approx(0, abs=0.03)
        assert chart.summary.endswith(f"(h{totals.index(max(totals))})")
    assert len(chart.rows) == sum(any(value is not None for value in slot.values) for slot in shown)
    assert [total for _, _, total in chart.legend] == [
        f"{sum(slot.values[series] or 0 for slot in shown)}" for series in (0, 1)
    ]


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40))
def test_a_line_is_broken_where_nothing_was_asked_for(values: list[float | None]) -> None:
    shown = [Slot(f"h{number}", (value,)) for number, value in enumerate(values)]
    chart = ratio_chart("r", "R", shown, slot_word="Hour", series="Rate")
    runs = sum(value is not None and (number == 0 or values[number - 1] is None) for number, value in enumerate(values))
    assert len(chart.lines) == len(chart.areas) == runs
    assert len(chart.points) == sum(value is not None for value in values)
    assert chart.is_empty == (not runs)
    assert chart.summary == "nothing was asked for" or chart.summary.startswith("between ")


def test_the_table_of_a_chart_has_the_newest_first_and_a_dash_for_what_is_not_known() -> None:
    shown = [Slot("early", (1, None)), Slot("none", (None, None)), Slot("late", (0, 2))]
    chart = bar_chart("c", "C", shown, ("one", "two"), lambda value: f"{value}", slot_word="Hour")
    assert chart.heads == ("Hour", "one", "two")
    assert chart.rows == (("late", "0", "2"), ("early", "1", texts.NOTHING))
    assert (chart.first, chart.last) == ("early", "late")


# ---- usage and cost


def test_an_overview_adds_up_what_the_records_say() -> None:
    usage = Usage(
        refused_by_reason={"QUOTA_EXCEEDED": 3, "NONE": 0}, evictions_by_cause={"neighbour": 2, "brand-new": 9}
    )
    usage.tiers.add(tier=TIER_DRAM, used_bytes=3 * GIB, limit_bytes=4 * GIB, reserved_bytes=GIB, entries=1234)
    usage.tiers.add(tier=TIER_SSD)
    usage.report_time.FromDatetime(NOW - timedelta(seconds=2))
    records = [
        record(0, hits=30, misses=10, tokens_saved=480, evictions=5, evictions_by_cause={"neighbour": 4, "quota": 1}),
        record(2, hits=0, misses=0),
        record(3, hits=0, misses=60, puts_refused=1, puts_stored=9),
    ]
    view = usage_view(usage, records, find_period("24h"), NOW)
    assert [figure.value for figure in view.figures] == ["30.0 %", "480", "5", "1"]
    assert view.figures[2].note == "4 of them for other tenants" and view.figures[3].note == "of 10 puts"
    (dram,) = view.tiers  # a tier without limit and use is not shown
    assert (dram.name, dram.used, dram.limit, dram.share, dram.state) == ("DRAM", "3 GiB", "4 GiB", "75.0 %", "ok")
    assert (dram.used_width, dram.reserved_at, dram.entries) == (750, 250, "1,234")
    rate = view.charts[0]
    assert len(rate.points) == 2, "an hour in which nothing was asked for has no rate"
    assert [(row.name, row.count) for row in view.evictions] == [("brand-new", "9"), ("neighbour", "2")]
    assert view.evictions[0].label == "brand-new" and view.evictions[1].help
    assert [(row.name, row.count) for row in view.refusals] == [("QUOTA_EXCEEDED", "3")]
    assert (view.reported, view.is_silent, view.ssd) == ("2 seconds ago", False, ())


@pytest.mark.parametrize(
    ("used", "limit", "state"),
    [(90, 100, "ok"), (91, 100, "near"), (100, 100, "near"), (101, 100, "over"), (1, 0, "over")],
)
def test_a_tier_says_how_near_its_limit_is(used: int, limit: int, state: str) -> None:
    usage = Usage(tiers=[TierUsage(tier=TIER_DRAM, used_bytes=used, limit_bytes=limit, reserved_bytes=50)])
    (tier,) = usage_view(usage, [], PERIODS[0], NOW).tiers
    assert tier.state == state and 0 <= tier.used_width <= 1000


def test_a_tenant_that_nobody_has_reported_is_silent_and_its_page_is_empty() -> None:
    view = usage_view(Usage(), [], PERIODS[0], NOW)
    assert view.is_silent and view.reported == "never" and all(chart.is_empty for chart in view.charts)
    assert view.figures[0].value == texts.NOTHING


def test_rare_causes_are_summed_up_so_that_colours_suffice() -> None:
    many = {f"cause-{number}": 10 - number for number in range(8)}
    view = usage_view(Usage(), [record(0, evictions_by_cause=many)], PERIODS[0], NOW)
    chart = view.charts[2]
    assert chart.heads[1:] == ("cause-0", "cause-1", "cause-2", "cause-3", "other")
    assert chart.rows[0][1:] == ("10", "9", "8", "7", f"{6 + 5 + 4 + 3}")


@pytest.mark.parametrize("period", PERIODS)
def test_a_period_ends_with_the_present_slot(period: object) -> None:
    assert period in PERIODS
    starts = find_period(period.name).starts(NOW)  # type: ignore[attr-defined]
    assert len(starts) == period.slots and starts[-1] <= NOW < starts[-1] + period.slot  # type: ignore[attr-defined]
    assert find_period("nonsense") is PERIODS[0] and find_period(None) is PERIODS[0]


def test_without_prices_there_are_amounts_and_no_money() -> None:
    day = record(0, dram_byte_seconds=str(GIB * 3600 * 2), read_bytes=GIB, is_open=True)
    view = cost_view([day], None)
    assert view.currency == "" and view.chart is None
    (row,) = view.rows
    assert (row.dram, row.moved, row.cost, row.is_open) == ("2.00", "1 GiB", "", True)


def test_months_are_found_by_name_and_go_over_the_year() -> None:
    month = find_month("2026-01", NOW)
    assert (month.begin, month.end) == (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC))
    assert find_month("2026-12", NOW).end == datetime(2027, 1, 1, tzinfo=UTC)
    for text in (None, "", "2026-13", "2026-1", "1999-01", "2026-01\n", "\u0662026-01"):
        assert find_month(text, NOW).name == "2026-11"
    assert [month.name for month in months_until(NOW)][::12] == ["2026-11", "2025-11"]


# ---- keys, salts, groups, the trail


def test_a_key_says_when_it_ends_and_whether_it_is_the_readers_own() -> None:
    keys = []
    for name, days in (("a", None), ("b", -1), ("c", 3), ("d", 30)):
        key = ApiKey(name=f"tenants/acme/apiKeys/{name}", role=ROLE_WRITER, project_id="p" if name == "a" else "")
        if days is not None:
            key.expire_time.FromDatetime(NOW + timedelta(days=days))
        keys.append(key)
    keys[3].previous.lookup = "0123"
    rows = key_rows(keys, NOW, own_subject="tenants/acme/apiKeys/d")
    assert [row.state for row in rows] == ["ok", "expired", "soon", "ok"]
    assert [row.is_own for row in rows] == [False, False, False, True]
    assert (rows[0].role, rows[0].bound_to, rows[0].expires, rows[0].last_used) == (
        "writer",
        "project p",
        "never",
        "never",
    )
    assert rows[3].previous.startswith("secret 0123 good until") and rows[0].previous == ""


def test_a_salt_policy_shows_the_current_epoch_first_and_no_salt() -> None:
    policy = SaltPolicy(scope=SaltPolicy.SCOPE_USER, epoch=3, epochs=[SaltEpoch(epoch=2), SaltEpoch(epoch=3)])
    policy.grace_period.FromTimedelta(timedelta(hours=24))
    view = salt_view(policy, NOW)
    assert [(row.number, row.is_current) for row in view.epochs] == [(3, True), (2, False)]
    assert (view.scope, view.period, view.grace, view.next_rotation) == ("user", "on demand", "1 day", "not scheduled")
    assert "users do not find" in view.scope_help


def test_invitations_come_first_and_only_what_can_be_left_is_offered() -> None:
    def group(name: str, *members: tuple[str, int]) -> SharingGroup:
        made = SharingGroup(name=name)
        for namespace, state in members:
            made.members.add(namespace=namespace, state=state)  # type: ignore[arg-type]
        return made

    member, invited = SharingGroupMember.STATE_ACCEPTED, SharingGroupMember.STATE_INVITED
    own = group("tenants/acme/sharingGroups/a", ("tenants/acme/namespaces/chat", member))
    joined = group(
        "tenants/beta/sharingGroups/b", ("tenants/beta/namespaces/x", member), ("tenants/acme/namespaces/y", member)
    )
    asked = group(
        "tenants/zeta/sharingGroups/z",
        ("tenants/acme/namespaces/chat", invited),
        ("tenants/gamma/namespaces/n", invited),
    )
    views = group_views([own, joined, asked], ACME)
    assert [(view.owner, view.is_owner) for view in views] == [("zeta", False), ("acme", True), ("beta", False)]
    assert [row.namespace for row in views[0].invitations] == ["chat"], (
        "another tenant's invitation is not ours to take"
    )
    assert [row.can_leave for view in views for row in view.members] == [False, False, False, False, True]


def test_a_filter_is_what_its_query_says_and_back() -> None:
    asked = read_filter(
        {"actor": " tenants/acme/apiKeys/x ", "outcome": "denied", "since": "2026-11-30T04:05", "junk": "1"}
    )
    assert asked == Filter(actor="tenants/acme/apiKeys/x", outcome="denied", since="2026-11-30T04:05")
    assert "junk" not in asked.query and Filter().query == "" and Filter().is_empty
    request = asked.list_request("tenants/acme", "")
    assert request.outcome == AuditEvent.OUTCOME_DENIED
    assert request.since.ToDatetime(tzinfo=UTC) == datetime(2026, 11, 30, 4, 5, tzinfo=UTC)
    assert Filter(outcome="nonsense").list_request("", "").outcome == ListAuditEventsRequest().outcome
    assert not asked.export_request("tenants/acme").HasField("until")


@pytest.mark.parametrize("text", ["yesterday", "2026-11-30T25:00", "0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00"])
def test_a_time_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Filter(since=text).list_request("", "")
    assert refused.value.reason == "INVALID_TIME"


def test_names_of_the_own_tenant_are_short_and_those_of_others_whole() -> None:
    event = AuditEvent(
        name="tenants/acme/auditEvents/7", actor="apiKeys/root", resource="tenants/acme/apiKeys/x", method="a.v1.S/M",
        outcome=AuditEvent.OUTCOME_DENIED,
    )  # fmt: skip
    (row,) = event_rows([event], "tenants/acme")
    assert (row.sequence, row.actor, row.resource, row.action) == (
        "7",
        "apiKeys/root",
        "apiKeys/x",
        "v1.S/M".rpartition(".")[2],
    )
    assert row.full_resource == "tenants/acme/apiKeys/x" and row.is_denied and (row.before, row.after) == ("", "")


# ---- the platform, and ways between pages


def test_the_fleet_in_numbers_counts_live_nodes_alone() -> None:
    nodes = [
        Node(name="nodes/a", state=Node.STATE_LIVE, dram_capacity_bytes=4 * GIB, granted_bytes=GIB, policy_version=7),
        Node(name="nodes/b", state=Node.STATE_LOST, dram_capacity_bytes=4 * GIB, granted_bytes=GIB),
        Node(name="nodes/c", state=Node.STATE_LIVE, policy_version=5, policy_lag=2),
    ]
    assert [(figure.value, figure.note) for figure in node_figures(nodes)] == [
        ("2", "of 3 registered"), ("4 GiB", "DRAM of live nodes"), ("25.0 %", "1 GiB granted to tenants"),
        ("7", "1 live node behind"),
    ]  # fmt: skip
    assert newest_version(nodes) == 7 and newest_version([]) == 0
    rows = node_rows(nodes, NOW)
    assert [(row.id, row.state, row.granted_width) for row in rows] == [
        ("a", "live", 250),
        ("b", "lost", 250),
        ("c", "live", 0),
    ]
    assert node_figures([])[2].value == texts.NOTHING


def test_a_tenant_without_quota_or_usage_has_a_row_too() -> None:
    usages = {"tenants/acme": Usage(tiers=[TierUsage(tier=TIER_DRAM, used_bytes=6, limit_bytes=4)], get_hits=1)}
    rows = tenant_rows([Tenant(name="tenants/acme"), Tenant(name="tenants/beta", state=Tenant.STATE_SUSPENDED)], usages)
    assert [(row.id, row.is_suspended, row.limit) for row in rows] == [
        ("acme", False, "4 B"),
        ("beta", True, "no quota"),
    ]
    assert rows[0].used_width == 1000 and rows[0].hit_rate == "100.0 %" and rows[1].hit_rate == texts.NOTHING


def test_blocks_that_an_engine_had_to_compute_count_in_its_hit_rate_though_it_never_asked_for_them() -> None:
    tenants, connector = [Tenant(name="tenants/acme")], Usage(get_hits=30, puts_stored=8, puts_refused=2)
    assert tenant_rows(tenants, {"tenants/acme": connector})[0].hit_rate == "75.0 %"
    records = [record(0, hits=30, puts_stored=10), record(1, hits=0, misses=10, puts_stored=10)]
    view = usage_view(connector, records, find_period("24h"), NOW)
    assert view.figures[0].value == "60.0 %"


def test_links_are_those_that_the_role_may_open() -> None:
    def labels(role: Role, own: str | None, shown: str | None, path: str = "") -> dict[str, list[str]]:
        groups = navigation(role, own and TenantId(own), shown and TenantId(shown), path)  # type: ignore[arg-type]
        return {group.heading: [link.label for link in group.links] for group in groups}

    whole = ["Overview", "Cost", "API keys", "Salts", "Sharing", "Audit trail"]
    assert labels(Role.TENANT_ADMIN, "acme", "acme") == {"acme": whole}
    assert labels(Role.PLATFORM_ADMIN, None, "acme")["acme"] == whole
    assert set(labels(Role.PLATFORM_ADMIN, None, None)) == {"Platform"}
    assert "API keys" not in labels(Role.WRITER, "acme", "acme")["acme"]
    (group,) = navigation(Role.TENANT_ADMIN, ACME, ACME, "/tenants/acme/keys/new")
    assert [link.label for link in group.links if link.is_current] == ["API keys"]
    assert (home(None), home(ACME), home(TenantId("a/b"))) == ("/tenants", "/tenants/acme", "/tenants/a%2Fb")


def test_a_link_names_a_notice_and_cannot_write_one() -> None:
    assert find_notice("<b>text</b>", None) == "" and find_notice(None, "7") == ""
    assert find_notice("key-deleted", "7").endswith("Policy version 7: nodes in touch take it up within seconds.")
    for version in ("x", "7<b>", "\u0667", "1" * 20, ""):
        assert find_notice("key-deleted", version) == find_notice("key-deleted", None)
