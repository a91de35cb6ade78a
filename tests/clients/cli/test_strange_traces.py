"""Names that somebody wrote into a trace: shown in every form of a report, and run by none."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from saltern.cli import main
from tests.clients.replay.pages import faults_of

NAMES = ("=HYPERLINK(A1)", "+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "＝1", "<script>alert(1)</script>", "\x1b[2J")  # noqa: RUF001
MACHINE = ("--model", "qwen2.5-7b", "--hardware", "1xh100", "--engines", "1")


@pytest.mark.parametrize("command", [("replay", "--nodes", "1", "--column", "cold"), ("plan", "--hit-rate", "0.3")])
def test_i10_no_name_in_a_trace_is_run_by_what_opens_a_report(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, table, page = tmp_path / "t.jsonl", tmp_path / "t.csv", tmp_path / "t.html"
    rows = [
        {"timestamp": 10 * number, "input_length": 64, "output_length": 1, "hash_ids": [number % 3], "tenant": name}
        for number in range(6)
        for name in NAMES
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, *options = command
    assert main([name, str(trace), *options, *MACHINE, "--csv", str(table), "--html", str(page)]) == 0
    with table.open(newline="") as file:
        tenants = {row["tenant"] for row in csv.DictReader(file)}
    assert tenants == {"", *(f"'{name}" for name in NAMES[:7]), *NAMES[7:]}
    assert faults_of(page.read_text()) == []
    assert "\x1b" not in capsys.readouterr().out
