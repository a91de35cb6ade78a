"""What the SSD store makes of a folder that it finds: whole, torn, foreign, of another version (I7, I8)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane.core.segments import BLOCK_BYTES
from dataplane.io.ssd import SsdState
from dataplane.io.ssd_files import Files
from saltern.errors import FailedPreconditionError
from tests.support.cache_node import key_of
from tests.support.ssd_lives import RECORD, SIZE, Start, fill, on_ssd, status, value_of
from tests.support.ssd_node import KIB, MIB, SsdNode


def test_a_segment_of_another_version_is_left_alone_and_told(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    path = sorted((node.root / "a").rglob("*.seg"))[0]
    raw = bytearray(path.read_bytes())
    raw[8:10] = (9).to_bytes(2, "little")
    path.write_bytes(raw)
    node = start()
    assert status(node) is SsdState.DEGRADED and "version 9" in node.store.status.reason
    assert node.tier.unusable_bytes == len(raw)
    assert path.read_bytes() == raw
    left = on_ssd(node, partition, range(30))
    assert 0 < len(left) < 25 and all(node.get(partition, key_of(n)) == [value_of(n)] for n in left)


def test_foreign_and_missing_files_are_told_and_harm_nobody(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(30))
    fill(node, "b", range(30))
    paths = sorted((node.root / "a").rglob("*.seg"))
    paths[0].unlink()
    (node.root / "lost+found").mkdir()
    (node.root / "a" / "notes.txt").write_text("mine")
    (paths[1].parent / "core.1234").write_bytes(b"x" * 5000)
    paths[1].with_name("ffffffffffffffff.seg").symlink_to("/etc/passwd")
    node = start()
    assert status(node) is SsdState.DEGRADED
    assert (node.root / "a" / "notes.txt").read_text() == "mine"
    left = on_ssd(node, partition, range(30))
    assert left and all(node.get(partition, key_of(n)) == [value_of(n)] for n in left)
    assert node.get(node.partition("b"), key_of(0)) == [value_of(0)]
    node.workers.drain()
    fill(node, "a", range(100, 130))
    assert status(node) is SsdState.DEGRADED


def test_a_segment_in_another_tenants_folder_is_not_read(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    fill(node, "b", range(100, 120))
    mine, theirs = (sorted((node.root / name).rglob("*.seg"))[0] for name in "ab")
    shutil.copy(mine, theirs.with_name(mine.name))
    node = start()
    assert not any(node.found(node.partition("b"), [key_of(n) for n in range(20)]))
    assert node.get(node.partition("b"), key_of(100)) == [value_of(100)]


def test_another_nodes_key_opens_nothing(start: Start, tmp_path: Path) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    (tmp_path / "ssd-node-key").write_bytes(os.urandom(32))
    node = start()
    assert status(node) is SsdState.DEGRADED and "key" in node.store.status.reason
    assert on_ssd(node, partition, range(20)) == []
    assert node.tier.unusable_bytes >= node.file_bytes("a") > 0
    assert fill(node, "a", range(20)) and on_ssd(node, partition, range(20)), "new ones are taken"


def test_a_folder_in_use_or_unusable_is_refused_at_start(start: Start, tmp_path: Path) -> None:
    start()
    with pytest.raises(FailedPreconditionError) as refused:
        SsdNode(tmp_path, dram_bytes=64 * KIB, ssd_bytes=MIB)
    assert refused.value.reason == "SSD_DIR_IN_USE"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ssd").write_text("a file")
    with pytest.raises(FailedPreconditionError) as refused:
        SsdNode(tmp_path / "other", dram_bytes=64 * KIB, ssd_bytes=MIB)
    assert refused.value.reason == "SSD_DIR_UNUSABLE"


def test_i8_a_clean_stop_leaves_footers_and_the_same_books(start: Start) -> None:
    node = start(files=Files())
    partition = fill(node, "a", range(40))
    before = on_ssd(node, partition, range(40))
    node.store.close(lambda: None)
    node.workers.drain()
    used_bytes = node.used_bytes("a")
    node = start(files=Files())
    assert on_ssd(node, partition, range(40)) == before
    assert node.used_bytes("a") == used_bytes == node.file_bytes("a")
    assert not node.workers.jobs and status(node) is SsdState.OK
    assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in before)


def test_i7_a_torn_record_is_a_miss_and_its_bytes_are_given_back(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(9))
    path = sorted((node.root / "a").rglob("*.seg"))[-1]
    whole = path.read_bytes()
    on_path = [n for n in on_ssd(node, partition, range(9)) if n >= 3]
    assert on_path == [3], "the open segment has one record; a second one is cut off below"
    for cut in (1, 4095, 4096, SIZE, RECORD - 1, RECORD):
        path.write_bytes(whole[: len(whole) - cut])
        node = start()
        assert on_ssd(node, partition, range(9)) == [0, 1, 2]
        node.workers.drain()
        assert node.file_bytes("a") == node.used_bytes("a")
        assert not path.exists()


def test_a_rotten_footer_costs_nothing_but_time(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(40))
    node.store.close(lambda: None)
    node.workers.drain()
    before = on_ssd(node, partition, range(40))
    for path in (node.root / "a").rglob("*.seg"):
        with path.open("r+b") as file:
            file.seek(-3000, os.SEEK_END)
            file.write(b"?")
            file.seek(-4096, os.SEEK_END)
            file.write(b"?")
    node = start()
    assert on_ssd(node, partition, range(40)) == before


def test_i7_a_torn_footer_is_read_record_by_record(start: Start) -> None:
    node = start()
    partition = fill(node, "a", range(40))
    node.store.close(lambda: None)
    node.workers.drain()
    before = on_ssd(node, partition, range(40))
    paths = sorted((node.root / "a").rglob("*.seg"))
    whole = {path: path.read_bytes() for path in paths}
    tears: list[Callable[[bytes], bytes]] = [
        lambda raw: raw[:-1],  # the last byte never arrived
        lambda raw: raw[:-BLOCK_BYTES],  # nor the footer's only block
        lambda raw: raw[:-BLOCK_BYTES] + bytes(BLOCK_BYTES),  # its place was taken and not written
        lambda raw: raw[:-BLOCK_BYTES] + bytes(512) + raw[-BLOCK_BYTES + 512 :],  # its first sector was not
        lambda raw: raw[:-10] + (9).to_bytes(2, "little") + raw[-8:],  # a footer of another version
        lambda raw: raw + bytes(3 * BLOCK_BYTES),  # something lies behind it
    ]
    for tear in tears:
        for path, raw in whole.items():
            path.write_bytes(tear(raw))
        node = start()
        assert on_ssd(node, partition, range(40)) == before
        node.workers.drain()
        node.check_files()
        assert node.file_bytes("a") == node.used_bytes("a"), "sealed anew, exactly"
        assert all(node.get(partition, key_of(n)) == [value_of(n)] for n in before[:3])
