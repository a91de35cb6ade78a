"""``saltern replay``: tables, JSON and CSV of one replay, several traces as tenants, and what is known when it ends."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from saltern.cli import main
from saltern.replay.results import read_report
from tests.clients.replay.pages import faults_of

SMALL = ["--engines", "1", "--nodes", "2", "--node-memory", "1GiB", "--model", "qwen2.5-7b", "--hardware", "1xh100"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text(rows(40))
    return path


def rows(count: int) -> str:
    made = [
        {"timestamp": 100 * n, "input_length": 192, "output_length": 10, "hash_ids": [1, 2, n // 2 + 3]}
        for n in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in made)


def test_all_six_columns_with_what_they_rest_on(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, figures = tmp_path / "r.json", tmp_path / "r.csv"
    assert main(["replay", str(trace), *SMALL, "--json", str(report), "--csv", str(figures)]) == 0
    shown = capsys.readouterr().out
    for told in ("SIMULATED", "NO-CACHE", "WARM", "AFTER-RESTART", "NODE-LOST", "TTFT p99", "beside no-cache"):
        assert told in shown
    found = read_report(report)
    assert found.complete
    assert len(found.columns) == 6
    assert found.trace.sha256 in shown
    assert found.columns[2].hit_rate == 1.0
    assert all(cost.verdict in shown.replace("\n", " ") for cost in found.costs)
    lines = list(csv.DictReader(figures.read_text().splitlines()))
    assert {line["column"] for line in lines} == {str(result.column) for result in found.columns}


def test_several_traces_are_several_tenants(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quota = ["--quota", "a,reserved=512MiB,weight=200", "--column", "cold", "--column", "shared", "--seed", "5"]
    assert main(["replay", f"a={trace}", f"b={trace},shift=1", *SMALL, *quota, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    shared = said["columns"][1]
    assert set(shared["tenants"]) == {"a", "b"}
    assert shared["tenants"]["a"]["rho"] == pytest.approx(1.0)
    assert (said["setup"]["seed"], len(said["parts"])) == (5, 2)


def test_damage_leaves_what_was_served_and_one_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(rows(4) + "{")
    assert main(["replay", str(trace), *SMALL, "--column", "shared"]) == 2
    shown = capsys.readouterr()
    assert "NOT COMPLETE" in shown.out
    assert "SHARED (PART)" in shown.out
    assert shown.err.count("error: ") == 1
    assert "line 5" in shown.err


def test_a_truncated_file_is_one_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress(rows(2000).encode())[:-2000])
    assert main(["replay", str(path), *SMALL, "--column", "shared", "-o", "json"]) == 2
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert not said["complete"]
    assert said["columns"][0]["requests"] > 0
    assert '"reason": "INVALID_TRACE"' in shown.err


def test_a_trace_without_prefixes_hits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04,110,27\n"
    )
    assert main(["replay", str(path), *SMALL, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [column["hitTokens"] for column in said["columns"]] == [0] * 6
    assert any("nothing can be hit" in assumed["value"] for assumed in said["assumptions"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-file.jsonl"],
        ["--model", "none"],
        ["--quota", "a,reserved"],
        ["--node-memory", "1KiB"],
        ["--profile", "no-such-file.json"],
        ["--json", "/no/such/folder/r.json"],
    ],
)
def test_what_makes_no_sense_is_one_error(
    trace: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [] if arguments[0].endswith(".jsonl") else [str(trace)]
    assert main(["replay", *files, *SMALL, "--column", "shared", *arguments]) in (2, 3)
    assert "hint: " in capsys.readouterr().err


# ---- pages and comparisons


def test_a_page_is_written_that_needs_no_network(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    hostile = f"<script>={trace}"
    arguments = ["replay", str(trace), *SMALL, "--html", str(page)]
    assert main(arguments) == 0
    content = page.read_text()
    assert faults_of(content) == []
    assert "SIMULATED" in content
    assert "config.json of Qwen2.5-7B" in content, "the source of the model profile"
    assert content.count('role="img"') == 16
    assert main(["replay", hostile, *SMALL, "--html", str(page)]) == 2, "no name of a tenant"


@pytest.fixture
def reports(trace: Path, tmp_path: Path) -> list[str]:
    """Of the same traffic on two nodes and on four."""
    made = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    for path, nodes in zip(made, ("2", "4"), strict=True):
        arguments = ["--column", "cold", "--column", "shared", "--nodes", nodes, "--json", path]
        assert main(["replay", str(trace), *SMALL, *arguments]) == 0
    return made


def test_two_reports_are_compared(reports: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    page = tmp_path / "d.html"
    assert main(["replay", "diff", *reports, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("setup.nodes") < shown.index("SIMULATED: ") < shown.index("figures are equal")
    assert faults_of(page.read_text()) == []
    assert main(["replay", "diff", *reports, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sameExperiment"]
    assert [one["name"] for one in said["differences"]] == ["setup.nodes"]
    assert {one["column"] for one in said["changes"]} == {"cold", "shared"}


def test_other_traffic_is_shown_and_refused(
    reports: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows(30))
    page, third = tmp_path / "d.html", str(tmp_path / "c.json")
    assert main(["replay", str(other), *SMALL, "--column", "shared", "--json", third]) == 0
    capsys.readouterr()
    assert main(["replay", "diff", reports[0], third, "--html", str(page)]) == 5
    shown = capsys.readouterr()
    assert "trace.sha256 (another experiment)" in shown.out
    assert "DIFFERENT_EXPERIMENTS" in shown.err or "different experiments" in shown.err
    assert not page.exists()
    assert main(["replay", "diff", reports[0], third, "--across-experiments", "--html", str(page)]) == 0
    assert "SIMULATED, DIFFERENT EXPERIMENTS: shared" in capsys.readouterr().out
    assert "Different experiments." in page.read_text()
    assert main(["replay", "diff", reports[0], third, "-o", "json"]) == 5
    shown = capsys.readouterr()
    assert shown.out == ""
    assert '"reason": "DIFFERENT_EXPERIMENTS"' in shown.err


def test_what_is_no_report_is_one_error(reports: list[str], trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for second in (str(trace), "no-such-file.json"):
        assert main(["replay", "diff", reports[0], second]) == 2
        assert "hint: " in capsys.readouterr().err


def test_the_requests_that_were_taken_make_another_experiment(reports: list[str], trace: Path, tmp_path: Path) -> None:
    fewer = str(tmp_path / "c.json")
    assert main(["replay", str(trace), *SMALL, "--requests", "20", "--column", "shared", "--json", fewer]) == 0
    assert main(["replay", "diff", reports[0], fewer]) == 5
