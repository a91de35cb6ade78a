"""The measured replay on real nodes: what the simulated one says, to the token; and nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from dataplane.replay.engine import SimulatedEngine
from saltern.cli import main
from saltern.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from saltern.replay.assemble import run_replay
from saltern.replay.measured.calls import Payloads
from saltern.replay.measured.engine import MeasuredEngine
from saltern.replay.measured.options import MeasuredOptions, Scale
from saltern.replay.measures import Limit, Measures
from saltern.replay.profiles import HardwareProfile, ModelProfile
from saltern.replay.results import Column, ColumnResult, decode_report
from saltern.replay.room import Room
from saltern.replay.setup import ReplaySetup, Restart, Use
from saltern.traces.load import load_trace
from saltern.traces.request import Trace

BLOCK_TOKENS = 16
#: Blocks of 4 KiB, a prefill that takes next to no time, and links that take none: requests follow one another.
MODEL = ModelProfile(linear_flops_per_token=1.0, attention_flops_per_pair=0.0, kv_bytes_per_token=256)
MACHINE = HardwareProfile(flops_per_s=1e15, link_bytes_per_s=math.inf, latency_s=0.0)
NODE_BLOCKS = 256
READY_FILE = "saltern-replay-*/nodes/node-0.json"
#: Only so that a test ends at all.
PATIENCE_S = 300.0


def write_trace(path: Path, requests: int, *, tenants: int = 1, seed: int = 7) -> Path:
    """Sessions that grow by a few blocks with each turn, some of them under a prompt that all share, and scans."""
    choose = random.Random(seed)
    sessions: dict[tuple[int, int], list[int]] = {}
    rows, fresh = [], 10_000
    for number in range(requests):
        tenant, session = choose.randrange(tenants), choose.randrange(6)
        grown = sessions.setdefault((tenant, session), [1, 2, 3] if session < 3 else [])
        if choose.random() < 0.15 or len(grown) > 60:
            ids = list(range(fresh, fresh + 12))
        else:
            grown += range(fresh, fresh + choose.randrange(1, 9))
            ids = list(grown)
        fresh += 20
        row = {
            "timestamp": 50 * number,
            "input_length": len(ids) * BLOCK_TOKENS - 5,
            "output_length": 3,
            "hash_ids": ids,
        }
        rows.append(row | ({"tenant": f"tenant-{tenant}"} if tenants > 1 else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def setup_of(**more: object) -> ReplaySetup:
    fields: dict[str, object] = {"nodes": 2, "node_bytes": NODE_BLOCKS * 4096, "eviction": "lru", "restart_s": 1.0}
    return ReplaySetup(model=MODEL, hardware=MACHINE, **(fields | more))  # type: ignore[arg-type]


def both(
    trace: Trace, setup: ReplaySetup, columns: list[Column], options: MeasuredOptions
) -> list[tuple[ColumnResult, ColumnResult]]:
    """(simulated, measured) of each column."""
    simulated = SimulatedEngine().replay(trace, setup, columns, lambda *_: None)
    measured = MeasuredEngine(options).replay(trace, setup, columns, lambda *_: None)
    return list(zip(simulated, measured, strict=True))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the replay keeps its data; the test sees whether anything is left. Postgres must be able to pass through,
    which it cannot below pytest's own folder."""
    with tempfile.TemporaryDirectory(prefix="saltern-test-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_simulated_hits_equal_measured_ones_in_every_column(tmp_path: Path, temporary: Path) -> None:
    """One engine and one call at a time: order is all that decides, and both have the same."""
    trace = load_trace(write_trace(tmp_path / "t.jsonl", 200))
    pairs = both(trace, setup_of(restart=Restart.KEPT), list(Column), MeasuredOptions(in_flight=1))
    for simulated, measured in pairs:
        name = str(simulated.column)
        assert measured.complete, name
        assert (measured.requests, measured.prompt_tokens) == (simulated.requests, simulated.prompt_tokens)
        assert measured.hit_tokens == simulated.hit_tokens, name
        assert measured.evictions_by_cause == simulated.evictions_by_cause, name
        assert measured.block_accesses == simulated.block_accesses, name
        if measured.column is Column.NO_CACHE:
            continue
        assert (measured.read_bytes, measured.written_bytes) == (simulated.read_bytes, simulated.written_bytes), name
        assert measured.hit_tokens > 0 and sum(measured.evictions_by_cause.values()) > 0, name
        found = measured.measures
        assert found is not None and found.wrong_blocks == 0
        assert found.node_cpu_s > 0 and measured.driver_cpu_s > 0 and found.wall_s > 0
        assert (found.restart_s is not None) == (measured.column is Column.AFTER_RESTART)
        assert (found.detection_s is not None) == (measured.column is Column.NODE_LOST)
        assert (found.failed_blocks > 0) == (measured.column is Column.AFTER_RESTART), "nodes were away, and only there"
        # What went over the wire, as the nodes themselves counted it, those that are gone included.
        assert sum(node.read_bytes for node in measured.nodes.values()) == measured.read_bytes, name
        assert sum(node.written_bytes for node in measured.nodes.values()) == measured.written_bytes, name
    by_column = {measured.column: measured for _, measured in pairs}
    lost = by_column[Column.NODE_LOST].nodes
    assert sorted(node.resident_bytes == 0 for node in lost.values()) == [False, True], "one node is gone"
    assert list(temporary.iterdir()) == []


def test_with_several_calls_in_flight_what_fits_is_hit_alike(tmp_path: Path, temporary: Path) -> None:
    """Nothing is evicted, so that order does not decide; what is being stored is waited for."""
    trace = load_trace(write_trace(tmp_path / "t.jsonl", 150, tenants=2))
    setup = setup_of(engines=4, node_bytes=8192 * 4096, nodes=1)
    ((simulated, measured),) = both(trace, setup, [Column.SHARED], MeasuredOptions(in_flight=4))
    assert measured.measures is not None
    assert (measured.measures.failed_blocks, measured.measures.wrong_blocks) == (0, 0)
    assert measured.measures.nodes == 1 and measured.measures.limit(measured.driver_cpu_s) is not None
    assert {name: tenant.hit_tokens for name, tenant in measured.tenants.items()} == {
        name: tenant.hit_tokens for name, tenant in simulated.tenants.items()
    }
    assert measured.hit_tokens > 0
    assert list(temporary.iterdir()) == []


# ---- cut short


def write_pause(path: Path) -> Path:
    """A request, and the next one an hour later."""
    rows = [
        {"timestamp": at_s * 1000, "input_length": 3 * BLOCK_TOKENS, "output_length": 1, "hash_ids": [1, 2, 3]}
        for at_s in (0, 3600)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextlib.contextmanager
def replaying(trace: Path, temporary: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``saltern replay --engine measured`` on one node, as a process, while it serves column ``shared``."""
    profile = trace.parent / "profile.json"
    small = {"linearFlopsPerToken": 1.0, "attentionFlopsPerPair": 0, "kvBytesPerToken": 256}
    profile.write_text(json.dumps({"models": {"small": small}}))
    options = ("--engine", "measured", "--column", "no-cache", "--column", "shared", "--nodes", "1", *options)
    options = ("--node-memory", "4MiB", "--engines", "8", "--profile", str(profile), "--model", "small", *options)
    with subprocess.Popen(
        [sys.executable, "-m", "saltern", "replay", str(trace), *options],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until_stored(temporary, process)
            yield process
        except BaseException:
            process.kill()
            raise


def check_adds_up(part: ColumnResult) -> None:
    """Every request that is counted is in the books with its bytes, and nothing else is."""
    assert part.measures is not None
    assert (part.measures.unfinished_calls, part.measures.failed_blocks, part.measures.wrong_blocks) == (0, 0, 0)
    assert part.measures.read_calls == part.requests == sum(tenant.requests for tenant in part.tenants.values())
    assert sum(node.read_bytes for node in part.nodes.values()) == part.read_bytes
    assert sum(node.written_bytes for node in part.nodes.values()) == part.written_bytes
    held_bytes = sum(node.resident_bytes for node in part.nodes.values())
    assert part.written_bytes == held_bytes + 4096 * sum(part.evictions_by_cause.values())


@pytest.mark.parametrize("is_paced", [False, True], ids=["calls in flight", "an hour until the next request"])
def test_interrupted_it_prints_what_is_known_and_leaves_nothing_running(
    tmp_path: Path, temporary: Path, is_paced: bool
) -> None:
    path = tmp_path / "t.jsonl"
    trace = write_pause(path) if is_paced else write_trace(path, 5000)
    pace = ["--speed", "1"] if is_paced else []
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    with replaying(trace, temporary, *pace, "--json", str(report), "--html", str(page)) as process:
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "NOT COMPLETE" in shown and "SHARED (PART)" in shown and "MEASURED" in shown
    assert "CPU of the driver" in shown and "CPU of the nodes" in shown and "limit, shared" in shown
    assert "SIMULATED" not in shown
    found = decode_report(report.read_bytes())
    assert not found.complete and found.ended == "interrupted"
    assert [result.complete for result in found.columns] == [True, False]
    part = found.columns[1]
    assert (part.requests, part.block_accesses) == (1, 3) if is_paced else 0 < part.requests < 5000
    check_adds_up(part)
    assert "MEASURED" in page.read_text() and "SIMULATED" not in page.read_text()
    assert list(temporary.iterdir()) == []
    assert not processes_of(temporary)


def test_interrupted_twice_it_ends_at_once_and_what_it_started_ends_by_itself(tmp_path: Path, temporary: Path) -> None:
    """The node stands still, so that the first one has calls to wait for."""
    with replaying(write_trace(tmp_path / "t.jsonl", 5000), temporary) as process:
        (node,) = (json.loads(ready.read_text())["pid"] for ready in temporary.glob(READY_FILE))
        os.kill(node, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        while catches(process.pid, signal.SIGINT):  # until the first one was noted: two at a time would be one
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGINT, "which a shell tells as 130"
        assert "SHARED" not in shown
    os.kill(node, signal.SIGCONT)  # one that stands still cannot end
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := [*temporary.iterdir(), *processes_of(temporary)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


def test_calls_that_do_not_end_after_ctrl_c_are_told_and_not_counted(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saltern.replay.measured.driver._TAKING_S", 0.5)
    monkeypatch.setattr("saltern.replay.measured.node_books._TIMEOUT_S", 0.5)
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def freeze(*_: object) -> None:
        if not interrupt.ident:
            signal_node(temporary, signal.SIGSTOP)
            interrupt.start()

    trace = load_trace(write_trace(tmp_path / "t.jsonl", 400))
    report, ended = run_replay(trace, setup_of(nodes=1, engines=4), [Column.SHARED], MeasuredEngine(), freeze)
    interrupt.join()
    (part,) = report.columns
    assert isinstance(ended, KeyboardInterrupt)
    assert report.ended.startswith("interrupted; node-0 does not answer"), "its books are those that it last told"
    assert part.measures is not None and not part.complete
    assert part.measures.unfinished_calls > 0
    assert 64 <= part.requests == part.measures.read_calls < 400
    assert sum(node.read_bytes for node in part.nodes.values()) <= part.read_bytes
    assert list(temporary.iterdir()) == []


def test_a_node_that_dies_ends_the_column_with_what_is_known(tmp_path: Path, temporary: Path) -> None:
    killed = False

    def kill(*_: object) -> None:
        nonlocal killed
        if not killed:
            signal_node(temporary, signal.SIGKILL)
            killed = True

    trace = load_trace(write_trace(tmp_path / "t.jsonl", 400))
    columns = [Column.NO_CACHE, Column.SHARED, Column.COLD]
    engine = MeasuredEngine()
    report, ended = run_replay(
        trace, setup_of(engines=4), columns, engine, lambda column, _: None if column is Column.NO_CACHE else kill()
    )
    assert isinstance(ended, UnavailableError) and ended.reason == "NODE_ENDED" and "it said: " in ended.hint
    assert report.ended.startswith("node-0 has ended by itself")
    without, part = report.columns
    assert without.complete and not part.complete
    assert part.measures is not None and part.measures.failed_blocks > 0 and part.measures.node_cpu_s > 0
    assert (part.measures.unfinished_calls, part.measures.wrong_blocks) == (0, 0)
    assert 64 <= part.requests == part.measures.read_calls < 400
    told, other = part.nodes["node-0"], part.nodes["node-1"]
    assert told.written_bytes + other.written_bytes <= part.written_bytes
    assert other.written_bytes > 0 and other.resident_bytes > 0
    assert list(temporary.iterdir()) == []


def signal_node(temporary: Path, number: signal.Signals) -> None:
    """Send a signal to the first node of the replay that has its data there."""
    (ready,) = temporary.glob(READY_FILE)
    os.kill(json.loads(ready.read_text())["pid"], number)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt)."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def until_stored(temporary: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the node has stored something: traffic is on its way."""
    while process.poll() is None:
        for ready in temporary.glob(READY_FILE):
            with contextlib.suppress(OSError, ValueError):
                endpoint = json.loads(ready.read_text())["metrics_endpoint"]
                connection = HTTPConnection(endpoint, timeout=5)
                try:
                    connection.request("GET", "/metrics")
                    text = connection.getresponse().read().decode()
                finally:
                    connection.close()
                if re.search(r"saltern_node_puts_stored_total\{[^}]*\} [1-9]", text):
                    return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def processes_of(temporary: Path) -> list[bytes]:
    """Command lines of processes that have something to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes())
    return [line for line in found if os.fsencode(temporary) in line]


# ---- without a node


def test_blocks_are_scaled_and_as_many_as_the_setup_has() -> None:
    room = Room(block_bytes=320 * 1024 * 512, node_blocks=100, nodes=4)
    scale = Scale.of(room, 64 * 1024)
    assert (scale.block_bytes, scale.dram_bytes, scale.bytes_scale) == (65_536, 100 * 65_536, 2560.0)
    odd = Scale.of(room, 20_000)
    assert (odd.block_bytes, odd.charged_bytes) == (20_000, 20_480), "a node takes whole granules"
    whole = Scale.of(Room(4096, 1000, 1), 64 * 1024)
    assert (whole.block_bytes, whole.bytes_scale) == (4096, 1.0), "never above the model's own"
    with pytest.raises(InvalidArgumentError, match="none can be started with less"):
        Scale.of(Room(4096, 10, 1), 64 * 1024)
    with pytest.raises(ResourceExhaustedError, match="may be taken here") as caught:
        Scale.of(Room(2**30, 10_000_000, 1024), 2**30)
    assert "--block-bytes" in caught.value.hint


def test_it_says_whose_cpu_is_the_limit() -> None:
    def limit(*, nodes: int, node_cpu_s: float, driver_cpu_s: float) -> Limit | None:
        return Measures(nodes=nodes, node_cpu_s=node_cpu_s).limit(driver_cpu_s)

    assert limit(nodes=1, node_cpu_s=2.0, driver_cpu_s=1.0) is Limit.NODES
    assert limit(nodes=2, node_cpu_s=3.0, driver_cpu_s=1.0) is Limit.NODES, "1.5 s each"
    assert limit(nodes=4, node_cpu_s=2.0, driver_cpu_s=1.0) is Limit.TOGETHER, "0.5 s each"
    assert limit(nodes=1, node_cpu_s=1.0, driver_cpu_s=1.0) is Limit.DRIVER
    assert limit(nodes=0, node_cpu_s=0.0, driver_cpu_s=1.0) is None


def test_every_block_has_bytes_that_no_other_is_taken_for() -> None:
    payloads = Payloads(4096, is_shared=False)
    first = payloads.of(0, 1)
    assert payloads.is_right(0, 1, first) and payloads.is_right(0, 1, memoryview(bytes(first)))
    assert not payloads.is_right(1, 1, first), "of another tenant"
    assert not payloads.is_right(0, 2, first)
    assert not payloads.is_right(0, 1, first[:-1]), "cut"
    changed = bytearray(first)
    changed[-1] ^= 1
    assert not payloads.is_right(0, 1, memoryview(changed))
    payloads.region.close()


def test_what_is_only_simulated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = load_trace(write_trace(tmp_path / "t.jsonl", 3))
    for setup, told in ((setup_of(use=Use.CHAIN), "order of use"), (setup_of(node_ssd_bytes=2**30), "an SSD tier")):
        with pytest.raises(InvalidArgumentError, match=told):
            next(MeasuredEngine().replay(trace, setup, [Column.SHARED], lambda *_: None))
    assert main(["replay", str(tmp_path / "t.jsonl"), "--speed", "2"]) == 2
    assert "--speed is of measured replays" in capsys.readouterr().err


def test_a_trace_without_prefixes_needs_no_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n")
    assert main(["replay", str(path), "--engine", "measured", "--engines", "1", "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["engine"] == "measured"
    assert [column["hitTokens"] for column in said["columns"]] == [0] * 6
