"""Deltas beside a kept snapshot: what a killed process leaves is what it had acknowledged, or newer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import time

import pytest

from dataplane.policy_file import PolicyFile
from dataplane.policy_log import merge
from saltern.errors import FailedPreconditionError
from saltern.node.v1 import node_pb2
from tests.support.snapshots import delta, snapshot

HOUR_S = 3600.0


def kept(folder: Path) -> node_pb2.PolicySnapshot:
    return PolicyFile(folder, "node-1", HOUR_S).read(time()).snapshot


def names(policy: node_pb2.PolicySnapshot) -> set[str]:
    return {tenant.tenant_id for tenant in policy.tenants}


@pytest.fixture
def file(tmp_path: Path) -> PolicyFile:
    file = PolicyFile(tmp_path, "node-1", HOUR_S)
    file.write(snapshot(version=5))
    return file


def test_i9_what_changed_since_is_read_back_with_the_snapshot(file: PolicyFile, tmp_path: Path) -> None:
    whole = file.path.read_bytes()
    file.append(delta(5, 6, changed=("blue",)))
    file.append(delta(6, 9, changed=("cyan",), removed=("acme",)))
    assert file.path.read_bytes() == whole, "the snapshot is not written again"
    assert file.deltas_path.stat().st_mode & 0o777 == 0o600
    policy = kept(tmp_path)
    assert (policy.version, names(policy)) == (9, {"blue", "cyan"})
    assert policy.key_set == snapshot().key_set


def test_a_delta_that_came_before_or_does_not_follow_changes_nothing(file: PolicyFile, tmp_path: Path) -> None:
    file.append(delta(4, 5, removed=("acme",)))
    with pytest.raises(OSError, match="not kept"):
        file.append(delta(7, 8, removed=("acme",)))
    assert kept(tmp_path) == snapshot(version=5)


def test_i4_cut_at_every_byte_it_is_the_policy_before_or_after_each_append(file: PolicyFile, tmp_path: Path) -> None:
    ends = []
    for version in (6, 7, 8):
        file.append(delta(version - 1, version, changed=(f"t-{version}",)))
        ends.append(file.deltas_path.stat().st_size)
    log = file.deltas_path.read_bytes()
    begin = ends[0] - (ends[1] - ends[0])  # records are of one length here
    for length in range(begin, len(log) + 1):
        file.deltas_path.write_bytes(log[:length])
        assert kept(tmp_path).version == 5 + sum(end <= length for end in ends)


def test_i4_every_flipped_byte_is_found_and_never_an_older_policy(file: PolicyFile, tmp_path: Path) -> None:
    file.append(delta(5, 6, changed=("blue",)))
    file.append(delta(6, 7, changed=("cyan",)))
    log = file.deltas_path.read_bytes()
    for position in range(len(log)):
        file.deltas_path.write_bytes(log[:position] + bytes([log[position] ^ 1]) + log[position + 1 :])
        with pytest.raises(FailedPreconditionError) as caught:
            kept(tmp_path)
        assert caught.value.reason == "KEPT_POLICY_DAMAGED"


def test_records_cannot_be_doubled_or_left_out(file: PolicyFile, tmp_path: Path) -> None:
    sizes = [0]
    for version in (6, 7):
        file.append(delta(version - 1, version, changed=(f"t-{version}",)))
        sizes.append(file.deltas_path.stat().st_size)
    log = file.deltas_path.read_bytes()
    first, second = log[: sizes[1]], log[sizes[1] :]
    head = first[: len(first) - len(second)]
    for forged in (first + second + second, head + second):
        file.deltas_path.write_bytes(forged)
        with pytest.raises(FailedPreconditionError):
            kept(tmp_path)


def test_deltas_of_a_snapshot_that_was_replaced_are_not_read(file: PolicyFile, tmp_path: Path) -> None:
    """A process that is killed between the two steps of a new snapshot leaves both."""
    file.append(delta(5, 6, removed=("acme",)))
    stale = file.deltas_path.read_bytes()
    file.write(snapshot(version=7))
    assert not file.deltas_path.exists()
    file.deltas_path.write_bytes(stale)
    file.deltas_path.chmod(0o600)
    assert kept(tmp_path) == snapshot(version=7)


def test_many_deltas_become_a_snapshot_again(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path, "node-1", HOUR_S, deltas_min_bytes=4096)
    file.write(snapshot(version=5))
    largest_bytes = 0
    for version in range(6, 106):
        file.append(delta(version - 1, version, changed=(f"t-{version % 7}",)))
        assert kept(tmp_path).version == version
        if file.deltas_path.exists():
            largest_bytes = max(largest_bytes, file.deltas_path.stat().st_size)
    assert 0 < largest_bytes <= 4096
    assert names(kept(tmp_path)) == {"acme", *(f"t-{number}" for number in range(7))}


def test_i4_after_a_failed_write_everything_is_written_again(file: PolicyFile, tmp_path: Path) -> None:
    file.append(delta(5, 6, changed=("blue",)))
    file.deltas_path.unlink()
    file.deltas_path.mkdir()  # nothing can be appended now
    with pytest.raises(OSError):
        file.append(delta(6, 7, changed=("cyan",)))
    file.deltas_path.rmdir()
    file.append(delta(7, 8, changed=("dark",)))
    assert (kept(tmp_path).version, names(kept(tmp_path))) == (8, {"acme", "blue", "cyan", "dark"})


def test_i9_the_age_counts_from_the_last_touch_not_from_the_append(file: PolicyFile, tmp_path: Path) -> None:
    now_s = time()
    file.append(delta(5, 6), now_s - 100)
    assert 99 < PolicyFile(tmp_path, "node-1", HOUR_S).read(now_s).age_s < 101


def test_what_must_not_be_found_again_is_discarded_with_its_deltas(file: PolicyFile, tmp_path: Path) -> None:
    file.append(delta(5, 6))
    assert file.discard()
    assert list(tmp_path.iterdir()) == []
    file.append(delta(6, 7, changed=("blue",)))
    assert (kept(tmp_path).version, names(kept(tmp_path))) == (7, {"acme", "blue"})


def test_a_killed_writer_leaves_what_it_had_told_of_or_one_more(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from dataplane.policy_file import PolicyFile
from tests.support.snapshots import delta, snapshot
file = PolicyFile(Path(sys.argv[1]), "node-1", 3600.0, deltas_min_bytes=4096)
file.write(snapshot(version=5))
version = 5
while True:
    version += 1
    file.append(delta(version - 1, version, changed=(f"t-{version % 5}",)))
    print(version, flush=True)
"""
    for kills_after in (1, 7, 23, 40):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as writer:
            assert writer.stdout is not None
            told = [int(writer.stdout.readline()) for _ in range(kills_after)][-1]
            writer.kill()
            told = max([told, *map(int, writer.stdout.read().split())])
        assert kept(tmp_path).version in (told, told + 1)


def test_merging_refuses_a_gap() -> None:
    with pytest.raises(ValueError, match="does not follow"):
        merge(snapshot(version=5), [delta(6, 7)])
