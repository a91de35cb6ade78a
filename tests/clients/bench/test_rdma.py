"""The bench of the RDMA transport without a device: what it refuses, what it reads, what it expects of hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saltern.bench import perftest, rdma
from saltern.bench.case import OURS, Case, Contender, Role
from saltern.bench.cpu import CpuUse
from saltern.bench.perftest import Link, find_tools, measure_gb_per_s, parse_gbits
from saltern.bench.rdma import RdmaCase, RdmaReport
from saltern.bench.rdma_model import Costs
from saltern.cli import main
from saltern.errors import SalternError

MIB = 1 << 20


def test_without_a_device_it_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saltern.rdma.sysfs.read_ports", lambda **_: ())
    monkeypatch.setattr(rdma, "running_stack", None)
    assert main(["bench", "--transport", "rdma"]) == 5
    assert "this machine has no RDMA device" in capsys.readouterr().err
    monkeypatch.setenv("SALTERN_RDMA_DEVICE", "off")
    assert main(["bench", "--transport", "rdma"]) == 5
    assert "SALTERN_RDMA_DEVICE is off" in capsys.readouterr().err


def test_it_is_not_the_bench_of_scale() -> None:
    assert main(["bench", "--scale", "--transport", "rdma"]) == 2


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SalternError) as caught:
        find_tools()
    assert (caught.value.reason, caught.value.hint) == ("PERFTEST_MISSING", "apt install perftest")


@pytest.mark.parametrize(("said", "figure"), [("91.25\n", 91.25), ("WARNING: BW peak won't be measured\n0.53\n", 0.53)])
def test_the_one_figure_is_read(said: str, figure: float) -> None:
    assert parse_gbits("ib_write_bw", said) == figure


def test_what_a_tool_says_when_it_fails_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perftest, "_RUN_TIMEOUT_S", 20.0)
    with pytest.raises(SalternError) as caught:
        measure_gb_per_s("/bin/false", Link("mlx5_0", 1, 3, 4096), 4096, 8192)
    assert caught.value.reason == "PERFTEST_FAILED"
    with pytest.raises(SalternError, match="no device called mlx5_0"):
        parse_gbits("ib_write_bw", "there is\n no device called mlx5_0\n")


def test_a_run_that_could_not_measure_its_clock_is_made_again(tmp_path: Path) -> None:
    tool, runs = tmp_path / "tool", tmp_path / "runs"
    tool.write_text(
        f"#!/bin/sh\ncase $* in *127.0.0.1) echo >>{runs};; *) exit;; esac\n"
        f"if [ $(wc -l <{runs}) = 1 ]; then echo 'Correlation coefficient r^2: 0.6 < 0.9'; echo 0.0; else echo 80; fi\n"
    )
    tool.chmod(0o755)
    assert measure_gb_per_s(str(tool), Link("mlx5_0", 1, 3, 4096), 4096, 8192) == 10.0


def test_infiniband_is_measured_without_a_gid() -> None:
    assert Link("mlx5_0", 1, None, 4096).arguments == ["-d", "mlx5_0", "-i", "1", "-m", "4096"]
    assert Link("rxe0", 1, 1, 1024).arguments[-2:] == ["-x", "1"]


def test_what_is_expected_is_the_share_of_the_wire_in_the_slower_sides_time() -> None:
    costs = Costs(sum_gb_per_s=10.0, block_s={("get", MIB): 0.0, ("put", MIB): 0.0})
    assert costs.expected_ratio("get", 5.0, MIB) == pytest.approx(1.0)
    assert costs.expected_ratio("get", 20.0, MIB) == pytest.approx(0.5), "the client sums at 10 GB/s"
    assert costs.expected_ratio("put", 10.0, MIB) == pytest.approx(0.5), "the node sums after each chain"
    slow_blocks = Costs(10.0, {("get", MIB): MIB / 10e9})
    assert slow_blocks.expected_ratio("get", 10.0, MIB) == pytest.approx(0.5)


def test_the_report_has_the_ratio_beside_the_expected_one(tmp_path: Path) -> None:
    ours = Contender(OURS, Role.OURS, lambda: 6.0, CpuUse(1.0, 2.0, 10**9), [6.0])
    tool = Contender("ib_write_bw", Role.LIMIT, lambda: 12.0, None, [12.0])
    case = RdmaCase("get", MIB, Case("RDMA get 1 MiB", "GB/s", [ours, tool]))
    costs = Costs(12.0, {("get", MIB): MIB / 12e9})
    report = RdmaReport(1, MIB, "rxe0:1:1 (RoCE v2, ::1)", True, [case], costs)
    written = json.loads(report.write(tmp_path).read_text())
    assert written["is_emulated"] and "no speed" in written["note"]
    (row,) = written["cases"]
    assert (row["ratio"], row["expected_ratio"]) == (0.5, pytest.approx(0.5))
    assert row["cpu_s_per_gb"] == {"client": 1.0, "node": 2.0}
    told = (tmp_path / "rdma.md").read_text()
    assert told.startswith("device rxe0 is a driver without hardware")
    assert "| RDMA get 1 MiB | 6.000 | 12.000 ib_write_bw | 0.50 | 0.50 | 3.00 |" in told
