"""The policy that survives a restart: whole, this node's, this user's, recent; or refused with why."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import time

import pytest

from dataplane.policy_file import PolicyFile
from saltern.errors import FailedPreconditionError
from tests.support.snapshots import snapshot

HOUR_S = 3600.0


@pytest.fixture
def file(tmp_path: Path) -> PolicyFile:
    return PolicyFile(tmp_path, "node-1", HOUR_S)


def refusal(file: PolicyFile, now_s: float | None = None) -> str:
    with pytest.raises(FailedPreconditionError) as caught:
        file.read(time() if now_s is None else now_s)
    assert caught.value.hint
    return caught.value.reason


def test_i9_what_was_written_is_read_back_with_its_age(file: PolicyFile) -> None:
    assert refusal(file) == "KEPT_POLICY_ABSENT"
    file.write(snapshot(version=7))
    assert file.path.stat().st_mode & 0o777 == 0o600
    os.utime(file.path, (1000, 1000))
    kept = PolicyFile(file.path.parent, "node-1", HOUR_S).read(1000 + 60)
    assert kept.snapshot == snapshot(version=7)
    assert kept.age_s == 60
    assert list(file.path.parent.iterdir()) == [file.path], "nothing half-written is left"


def test_an_umask_does_not_open_it(file: PolicyFile) -> None:
    before = os.umask(0)
    try:
        file.write(snapshot())
    finally:
        os.umask(before)
    assert file.read(time()).snapshot == snapshot()


def test_i9_it_is_good_for_the_stated_window_from_the_last_touch(file: PolicyFile) -> None:
    file.write(snapshot())
    os.utime(file.path, (1000, 1000))
    assert file.read(1000 + HOUR_S).age_s == HOUR_S
    assert refusal(file, 1000 + HOUR_S + 1) == "KEPT_POLICY_TOO_OLD"
    assert file.read(1000 - 60).age_s == 0  # clocks differ a little
    assert refusal(file, 0) == "KEPT_POLICY_TOO_OLD"
    file.confirm()
    assert file.read(time()).age_s < 60


def test_an_older_policy_does_not_replace_a_newer_one(file: PolicyFile) -> None:
    versions = list(range(1, 33))
    threads = [threading.Thread(target=file.write, args=(snapshot(version=version),)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read(time()).snapshot.version == versions[-1]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o620, 0o777])
def test_i10_a_file_that_others_could_read_or_write_is_refused(file: PolicyFile, mode: int) -> None:
    file.write(snapshot())
    file.path.chmod(mode)
    assert refusal(file) == "KEPT_POLICY_EXPOSED"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_i10_another_users_file_is_refused(file: PolicyFile) -> None:
    file.write(snapshot())
    os.chown(file.path, 12345, -1)
    assert refusal(file) == "KEPT_POLICY_EXPOSED"


IMPOSTORS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, true: path.symlink_to(true),
    "a pipe": lambda path, true: os.mkfifo(path, 0o600),
    "a folder": lambda path, true: path.mkdir(0o700),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_i10_what_is_no_plain_file_is_refused(file: PolicyFile, kind: str) -> None:
    file.write(snapshot())
    true = file.path.rename(file.path.with_name("true"))
    IMPOSTORS[kind](file.path, true)
    assert refusal(file) == "KEPT_POLICY_EXPOSED"


def test_i7_every_truncation_and_every_flipped_byte_is_found(file: PolicyFile) -> None:
    file.write(snapshot())
    whole = file.path.read_bytes()
    for length in range(len(whole)):
        file.path.write_bytes(whole[:length])
        assert refusal(file) == "KEPT_POLICY_DAMAGED"
    for position in range(len(whole)):
        file.path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert refusal(file) == "KEPT_POLICY_DAMAGED"
    file.path.write_bytes(whole + b"\0")
    assert refusal(file) == "KEPT_POLICY_DAMAGED"


def test_another_nodes_shares_are_refused(file: PolicyFile) -> None:
    file.write(snapshot())
    assert refusal(PolicyFile(file.path.parent, "node-2", HOUR_S)) == "KEPT_POLICY_OF_ANOTHER_NODE"


def test_i9_the_file_is_of_when_the_node_was_in_touch_not_of_when_it_was_written(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path, "node-1", 3600.0)
    now_s = time()
    file.write(snapshot(version=7), now_s - 100)
    assert 99 < file.read(now_s).age_s < 101
    file.confirm(now_s - 50)
    kept = file.read(now_s)
    assert 49 < kept.age_s < 51
    assert not kept.is_ahead
    assert file.read(now_s - 60).is_ahead, "a clock was set back: nobody can say how old it is"


def test_i4_a_policy_that_must_not_be_found_again_is_discarded(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path, "node-1", 3600.0)
    file.write(snapshot(version=7))
    assert file.discard()
    assert not file.path.exists()
    assert file.discard()
