"""Reports survive JSON, profiles and setups refuse what cannot be, rows say what is not known."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.replay import engines
from saltern.replay.assemble import compare
from saltern.replay.engines import find_engine
from saltern.replay.profiles import builtin_profiles, read_profiles
from saltern.replay.results import (
    Column,
    ColumnResult,
    EngineKind,
    Quantiles,
    References,
    ReplayReport,
    TenantResult,
    TraceFacts,
    decode_report,
    encode_report,
    read_report,
)
from saltern.replay.rows import Unit, all_rows, cell, to_csv
from saltern.replay.setup import ReplaySetup, Slo, TenantQuota

PROFILES = builtin_profiles()
SETUP = ReplaySetup(model=PROFILES.model("qwen3-8b"), hardware=PROFILES.machine("1xh100"), node_bytes=2**30)
FACTS = TraceFacts(
    name="t",
    format="hash-ids",
    sha256="ab" * 32,
    arrival="absolute",
    identity="recorded",
    identity_note="",
    block_tokens=16,
)


def tenant(hit_rate: float, mean_s: float) -> TenantResult:
    return TenantResult(requests=1, hit_rate=hit_rate, ttft=Quantiles(count=1, mean_s=mean_s))


def report_of(*columns: ColumnResult) -> ReplayReport:
    return ReplayReport(engine=EngineKind.SIMULATED, setup=SETUP, trace=FACTS, columns=list(columns))


def test_a_report_is_the_same_after_json(tmp_path: Path) -> None:
    report = report_of(ColumnResult(column=Column.COLD, tenants={"a": tenant(0.5, 1.0)}))
    assert decode_report(encode_report(report)) == report
    path = tmp_path / "report.json"
    path.write_bytes(encode_report(report))
    assert read_report(path) == report
    document = json.loads(path.read_bytes())
    assert document["engine"] == "simulated"
    assert document["trace"]["sha256"] == FACTS.sha256
    assert document["setup"]["model"]["source"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"engine": "simulated"}', b'{"engine": "guessed"}', b"\xff"])
def test_what_is_no_report_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        decode_report(content)
    assert refused.value.reason == "INVALID_REPORT"


def test_a_report_of_a_later_program_is_refused() -> None:
    report = report_of()
    report.format_version = 99
    with pytest.raises(InvalidArgumentError, match="99"):
        decode_report(encode_report(report))


def test_quantiles_are_by_nearest_rank() -> None:
    found = Quantiles.of([float(number) for number in range(100, 0, -1)])
    assert (found.p50_s, found.p95_s, found.p99_s, found.max_s, found.mean_s) == (50, 95, 99, 100, 50.5)
    assert Quantiles.of([]).count == 0


def test_tenants_are_compared_with_themselves_alone() -> None:
    cold = ColumnResult(column=Column.COLD, complete=True, tenants={"a": tenant(0.5, 1.0), "scan": tenant(0.0, 1.0)})
    shared = ColumnResult(
        column=Column.SHARED, complete=True, hit_rate=0.3, tenants={"a": tenant(0.4, 1.5), "scan": tenant(0.1, 1.0)}
    )
    report = report_of(cold, shared)
    report.references = References(infinite_hit_rate=0.6, opt_hit_rate=0.5)
    compare(report)
    assert (shared.tenants["a"].rho, shared.tenants["a"].slowdown) == (pytest.approx(0.8), 1.5)
    assert shared.tenants["scan"].rho is None, "a cache does not serve it alone either"
    assert shared.min_rho == pytest.approx(0.8)
    assert (shared.share_of_infinite, shared.share_of_opt) == (pytest.approx(0.5), pytest.approx(0.6))
    assert cold.tenants["a"].rho is None
    assert report.costs == [], "nothing to compare with"


def test_a_part_of_a_column_has_no_share() -> None:
    report = report_of(ColumnResult(column=Column.SHARED, complete=False, hit_rate=0.3))
    report.references = References(infinite_hit_rate=0.6)
    compare(report)
    assert report.columns[0].share_of_infinite is None


def test_what_is_not_known_is_a_dash_and_an_empty_field() -> None:
    without = ColumnResult(column=Column.NO_CACHE, requests=3)
    shared = ColumnResult(
        column=Column.SHARED, requests=3, evictions_by_cause={"own-put": 4}, tenants={"a": tenant(0.5, 1.0)}
    )
    report = report_of(without, shared)
    rows = {row.key: row for row in all_rows(report)}
    assert cell(rows["hit_rate"].value(without), Unit.RATE) == "-"
    assert cell(rows["evictions_own-put"].value(shared), Unit.COUNT) == "4"
    lines = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert {line["engine"] for line in lines} == {"simulated"}
    figures = {(line["column"], line["tenant"], line["figure"]): line["value"] for line in lines}
    assert figures["no-cache", "", "hit_rate"] == ""
    assert figures["shared", "", "completions"] == "3"
    assert figures["shared", "a", "hit_rate"] == "0.5"


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(1234567, Unit.COUNT, "1,234,567"), (0.25, Unit.SECONDS, "0.250 s"), (2.5e12, Unit.BYTES, "2.5 TB")],
)
def test_figures_have_their_units(value: float, unit: Unit, said: str) -> None:
    assert cell(value, unit) == said


# ---- profiles and setups


def test_every_profile_has_a_source() -> None:
    for profile in [*PROFILES.models.values(), *PROFILES.hardware.values()]:
        assert profile.source


def test_profiles_of_ones_own_take_the_place_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "profiles.json"
    mine = {
        "hardware": {"8xa800": {"flopsPerS": 1e12, "linkBytesPerS": 1e9}, "toy": {"flopsPerS": 1, "linkBytesPerS": 1}}
    }
    path.write_text(json.dumps(mine))
    both = read_profiles(path).over(PROFILES)
    assert both.machine("8xa800").flops_per_s == 1e12
    assert both.machine("toy").name == "toy"
    assert both.model("llama-3-70b") == PROFILES.model("llama-3-70b")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"hardware": {"x": {}}}',
        '{"hardware": {"x": {"flopsPerS": 1, "linkBytesPerS": 0}}}',
        '{"hardware": {"x": {"flopsPerS": -1, "linkBytesPerS": 1}}}',
        '{"models": {"x": {"a": 1}}}',
    ],
)
def test_profiles_that_cannot_be_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError) as refused:
        read_profiles(path)
    assert refused.value.reason == "INVALID_PROFILE"
    with pytest.raises(InvalidArgumentError, match="llama-3-70b"):
        PROFILES.model("no such")


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"node_bytes": 0},
        {"engines": 0},
        {"loss_at": 2.0},
        {"slo": Slo(ttft_s=-1.0)},
        {"quotas": {"a": TenantQuota(reserved_bytes=2**40)}},
    ],
)
def test_setups_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        msgspec.structs.replace(SETUP, **change).checked()
    assert refused.value.reason == "INVALID_REPLAY"


def test_without_the_server_the_simulated_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ENTRY_POINT_GROUP", "saltern.nothing")
    with pytest.raises(FailedPreconditionError) as refused:
        find_engine(EngineKind.SIMULATED)
    assert refused.value.reason == "SERVER_NOT_INSTALLED"
    assert "saltern-server" in refused.value.hint
