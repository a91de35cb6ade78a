"""A short run in the suite: each part fails once. ``make faults`` runs all, and docs/faults.md has its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.__main__ import table
from tests.faults.drivers import Journal
from tests.faults.run import SHORT
from tests.support.network import can_make_namespaces

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_i9_i10_i11_a_part_that_fails_is_felt_where_it_must_be_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    report = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults", "--short", "--json", str(report)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-8192:]}"
    figures = json.loads(report.read_text())
    assert len(figures["faults"]) == len(SHORT)
    for fault in figures["faults"]:
        assert bool(fault["skipped"]) == (fault["way"] == "cut" and not can_make_namespaces())
    assert table(figures) in result.stdout


def test_a_journal_tells_from_the_first_failure_to_the_last_and_the_longest_gap() -> None:
    journal = Journal(deadline_s=1.0)
    journal.outcomes = [
        (10.0, 0.1, ""),
        (11.0, 0.1, ""),
        (12.0, 0.5, "DOWN"),
        (14.5, 1.0, "DOWN"),
        (15.0, 0.1, ""),
        (15.5, 0.1, ""),
    ]
    felt = journal.felt(since_s=10.5)
    assert felt == {
        "calls": 5,
        "failed": 2,
        "first_to_last_failure_s": 2.5,
        "longest_gap_s": 4.0,
        "slowest_s": 1.0,
        "why": {"DOWN": 2},
    }
