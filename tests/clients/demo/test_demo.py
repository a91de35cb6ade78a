"""The demo itself, small and real: its report, its exit code, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from saltern.demo.plan import load_trace, make_plan
from saltern.traces import BLOCK_TOKENS
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Finished:
    """A demo that has ended: the process, the folder of its report, and the folder for its temporary data."""

    process: subprocess.CompletedProcess[str]
    output_dir: Path
    temporary: Path


def demo_command(output_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "saltern", "demo", "--output-dir", str(output_dir), *arguments]


def demo_environment(temporary: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SALTERN_")}
    return {**kept, "TMPDIR": str(temporary)}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A folder that PostgreSQL's unprivileged user can pass through."""
    folder = Path(tempfile.mkdtemp(prefix="saltern-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Finished:
    """One demo of 40 generated requests."""
    output_dir = tmp_path_factory.mktemp("demo") / "made" / "by-it"
    process = subprocess.run(
        demo_command(output_dir, "--requests", "40", "--json"),
        env=demo_environment(temporary),
        capture_output=True,
        text=True,
        check=False,
    )
    return Finished(process, output_dir, temporary)


def test_the_report_has_the_documented_shape_and_everything_held(finished: Finished) -> None:
    assert finished.process.returncode == 0, finished.process.stderr + finished.process.stdout
    report = json.loads((finished.output_dir / "report.json").read_text())
    assert json.loads(finished.process.stdout) == report
    assert report["trace"].keys() == {"source", "sha256", "requests"}
    assert report["trace"]["requests"] == 40
    assert len(report["trace"]["sha256"]) == 64
    assert report["tenants"].keys() == {"alpha", "beta"}
    for tenant in report["tenants"].values():
        for field in ("requests", "put_bytes", "get_bytes", "evictions", "used_bytes_max", "limit_bytes"):
            assert isinstance(tenant[field], int), field
        for field in ("hit_rate_cold", "hit_rate_warm"):
            assert isinstance(tenant[field], float), field
        assert 0 < tenant["used_bytes_max"] <= tenant["limit_bytes"]
        assert tenant["put_bytes"] > 0
        assert tenant["get_bytes"] > 0
        assert tenant["faults"] == 0
    assert sum(tenant["requests"] for tenant in report["tenants"].values()) == 40
    assert report["cross_tenant_hits"] == 0
    assert report["refused"] == {"forged_token": True, "expired_token": True, "other_tenant_namespace": True}
    assert report["wrong_bytes"] == 0
    assert all(proof["holds"] for proof in report["proofs"])


def test_hit_rates_are_those_of_the_trace(finished: Finished) -> None:
    """alpha's quota holds all it asks for: cold it hits what any infinite cache would, warm everything."""
    report = json.loads((finished.output_dir / "report.json").read_text())
    plan = make_plan(load_trace(None, requests=40))
    seen: set[int] = set()
    hit_tokens = input_tokens = 0
    for request in plan.tenants[0].requests:
        hits = next((n for n, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids))
        hit_tokens += min(request.input_tokens, hits * BLOCK_TOKENS)
        input_tokens += request.input_tokens
        seen.update(request.block_ids)
    alpha = report["tenants"]["alpha"]
    assert alpha["hit_rate_cold"] == round(hit_tokens / input_tokens, 4)
    assert alpha["hit_rate_warm"] == 1.0
    assert alpha["evictions"] == 0
    assert report["tenants"]["beta"]["evictions"] > 0


def test_nothing_stays_behind(finished: Finished) -> None:
    assert list(finished.temporary.iterdir()) == []
    assert not [line for line in _command_lines() if os.fsencode(finished.temporary) in line]


def test_without_a_terminal_progress_is_plain_lines_on_stderr(finished: Finished) -> None:
    lines = finished.process.stderr.splitlines()
    assert "replaying 40 requests, cold" in lines
    assert not [line for line in lines if "\x1b" in line]


def test_a_bad_trace_or_folder_is_explained_before_anything_starts(tmp_path: Path, temporary: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1}')
    (tmp_path / "file").touch()
    for arguments, code in (
        (demo_command(tmp_path, "--trace", str(bad)), 2),
        (demo_command(tmp_path, "--trace", str(tmp_path / "absent")), 3),
        (demo_command(tmp_path / "file" / "below"), 2),
    ):
        done = subprocess.run(arguments, env=demo_environment(temporary), capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGINT, "starting a private stack"), (signal.SIGTERM, "making the tenants")]
)
def test_interrupted_it_stops_its_stack_and_removes_its_data(
    tmp_path: Path, temporary: Path, number: signal.Signals, step: str
) -> None:
    with subprocess.Popen(
        demo_command(tmp_path, "--requests", "40"),
        env=demo_environment(temporary),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any(step in line for line in process.stderr)
        wait_until(lambda: any(temporary.glob("saltern-demo-*/data")), limit_s=60)  # from here on there is what to stop
        process.send_signal(number)
        assert process.wait(60) == 130
    assert not [line for line in _command_lines() if os.fsencode(temporary) in line]
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "report.json").exists()


def test_killed_it_leaves_neither_a_stack_nor_its_data(tmp_path: Path, temporary: Path) -> None:
    with subprocess.Popen(
        demo_command(tmp_path, "--requests", "40"),
        env=demo_environment(temporary),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("making the tenants" in line for line in process.stderr)
        process.kill()
    # Nobody is left who could tell us when the orphans are done: look until they are.
    deadline_s = time.monotonic() + 60
    while list(temporary.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []
    assert not [line for line in _command_lines() if os.fsencode(temporary) + b"/data" in line]


def _command_lines() -> Iterator[bytes]:
    """The command lines of all processes of this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield path.read_bytes()
