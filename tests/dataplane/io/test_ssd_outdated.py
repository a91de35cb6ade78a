"""Deletions while the SSD folder cannot be read: what cannot be reconciled with them is gone after the repair (I12)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dataplane.core.ssd_books import Outdate
from dataplane.io.ssd import SsdState
from dataplane.io.ssd_outdated import OUTDATED_FILE, OutdatedPartitions
from saltern.names import TenantId
from tests.support.cache_node import key_of
from tests.support.ssd_lives import Start, fill, on_ssd, status
from tests.support.ssd_node import FaultyFiles


class Unreadable(FaultyFiles):
    """A folder that cannot be read at the start."""

    def probe(self, folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_i12_what_was_deleted_while_the_tier_was_off_does_not_come_back_with_it(start: Start) -> None:
    node = start()
    fill(node, "a", range(20))
    fill(node, "b", range(20))
    node = start(files=Unreadable())
    assert status(node) is SsdState.OFF
    a, b = node.partition("a"), node.partition("b")
    for number in (1, 2):
        assert node.core.delete(a, [key_of(number)]) == 0
        node.workers.drain()
    node = start(files=Unreadable())
    assert (node.root.parent / OUTDATED_FILE).read_text().count("\n") == 1, "once for a partition, over restarts"
    node = start()
    assert on_ssd(node, a, range(20)) == [] and len(on_ssd(node, b, range(20))) == 15
    assert node.file_bytes("a") == 0 and "deleted while" in node.store.status.reason
    assert not (node.root.parent / OUTDATED_FILE).exists()
    fill(node, "a", range(20))
    node = start()
    assert len(on_ssd(node, a, range(20))) == 15, "what was written since is no business of that"


def test_i12_a_list_that_is_damaged_keeps_the_tier_off(start: Start) -> None:
    node = start()
    (node.root.parent / OUTDATED_FILE).write_text("[1]\n")
    node = start()
    assert status(node) is SsdState.OFF and OUTDATED_FILE in node.store.status.reason


def test_i12_what_could_not_be_remembered_is_tried_with_the_next_deletion(tmp_path: Path, start: Start) -> None:
    node = start(files=Unreadable())
    partition = node.partition("a")
    (node.root.parent / OUTDATED_FILE).mkdir()
    node.core.delete(partition, [key_of(1)])
    node.workers.drain()
    (node.root.parent / OUTDATED_FILE).rmdir()
    node.core.delete(partition, [key_of(1)])
    node.workers.drain()
    assert [outdate.tenant for outdate in OutdatedPartitions(node.root.parent).all()] == ["a"]


def test_a_list_holds_each_partition_once_until_it_is_cleared(tmp_path: Path) -> None:
    outdated = OutdatedPartitions(tmp_path)
    wanted = [Outdate(TenantId("a"), "uid-1", 1), Outdate(TenantId("a"), "uid-1", 2)]
    for one in (*wanted, *wanted):
        outdated.add(one)
    assert OutdatedPartitions(tmp_path).all() == wanted
    outdated.clear()
    assert outdated.all() == []


@pytest.mark.parametrize("content", ["[1]", "{}", "3", "x", "[1, 2, 3]"])
def test_a_damaged_list_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / OUTDATED_FILE).write_text(content)
    with pytest.raises(ValueError, match="damaged"):
        OutdatedPartitions(tmp_path).all()
