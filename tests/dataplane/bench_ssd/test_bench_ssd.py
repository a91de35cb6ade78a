"""The measurement of the SSD tier runs on real files, at a size that measures nothing, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from structlog.testing import capture_logs

from dataplane.bench_ssd.__main__ import main
from dataplane.bench_ssd.recovery import measure_recovery

ARGUMENTS = ["--block-bytes", "64KiB", "--total-bytes", "4MiB", "--dram-bytes", "1MiB", "--rounds", "2"]


def test_the_report_holds_the_tier_beside_its_limits(tmp_path: Path) -> None:
    with capture_logs():
        result = CliRunner().invoke(main, ["--folder", str(tmp_path), *ARGUMENTS, "--output", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["block_bytes"], report["total_bytes"]) == (65536, 4 << 20)
    for name in ("raw_write", "put", "raw_read", "get", "seal"):
        assert report[name]["gb_per_s"] > 0 and len(report[name]["rounds_gb_per_s"]) == 2
    assert report["put_to_raw"] > 0 and report["get_to_raw"] > 0
    assert not list(tmp_path.iterdir())


def test_the_table_names_every_measurement(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--folder", str(tmp_path), *ARGUMENTS, "--recovery-entries", "300"])
    assert result.exit_code == 0, result.output
    assert "put / device" in result.output and "recovery of 300 entries" in result.output


def test_recovery_finds_what_the_nodes_own_writer_left(tmp_path: Path) -> None:
    report = measure_recovery(tmp_path, 9000)
    assert (report.entries, report.segments) == (9000, 2)
    assert report.file_bytes > 9000 * 8192
    assert not list(tmp_path.rglob("*.seg"))
