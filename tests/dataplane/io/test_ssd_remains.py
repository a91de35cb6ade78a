"""Records that no index has and that are still on disk: charged, removed in the end, and never back once outdated."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dataplane.io.ssd import SsdState
from dataplane.io.ssd_health import RETRY_S
from saltern.names import TenantId
from tests.support.cache_node import key_of
from tests.support.ssd_lives import Start, fill, status, value_of
from tests.support.ssd_node import MIB, FaultyFiles, policy_of

LIMIT_BYTES = MIB // 2


class Unremovable(FaultyFiles):
    """Files that cannot be removed while ``is_stuck``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = True

    def unlink(self, path: Path) -> None:
        if self.is_stuck:
            raise OSError(errno.EIO, "Input/output error")
        super().unlink(path)


def test_i8_a_file_that_cannot_be_removed_is_charged_and_tried_until_it_is_gone(start: Start) -> None:
    files = Unremovable()
    node = start(limit=LIMIT_BYTES, files=files)
    fill(node, "a", range(40))
    assert status(node) is SsdState.DEGRADED and "removal failed" in node.store.status.reason
    assert node.tier.is_writable, "a device that takes writes is written"
    stuck_bytes = node.tier.tenants[TenantId("a")].leaving_bytes
    assert stuck_bytes > 0 and node.used_bytes("a") <= LIMIT_BYTES
    node.pass_time(int(RETRY_S))
    node.workers.drain()
    assert status(node) is SsdState.DEGRADED and node.tier.tenants[TenantId("a")].leaving_bytes == stuck_bytes
    files.is_stuck = False
    node.pass_time(int(RETRY_S))
    node.workers.drain()
    assert status(node) is SsdState.OK and node.tier.tenants[TenantId("a")].leaving_bytes == 0
    node.pass_time(int(RETRY_S))
    assert not node.workers.timers, "nobody tries any more"
    node.check_files()


def test_i8_files_of_a_deleted_tenant_that_could_not_be_removed_go_later(start: Start) -> None:
    files = Unremovable()
    node = start(files=files)
    fill(node, "a", range(20))
    node.apply(policy_of(9, {}))
    node.workers.drain()
    assert node.used_bytes("a") > 0 and status(node) is SsdState.DEGRADED
    files.is_stuck = False
    node.pass_time(int(RETRY_S))
    node.workers.drain()
    assert node.used_bytes("a") == 0 and status(node) is SsdState.OK
    assert not list(node.root.rglob("*.seg"))


@pytest.mark.parametrize("ends", ["by a kill", "by a clean stop"])
@pytest.mark.parametrize("act", ["delete", "put"])
def test_i12_what_could_not_be_read_does_not_come_back_once_it_was_deleted_or_replaced(
    start: Start, act: str, ends: str
) -> None:
    node = start()
    partition = fill(node, "a", range(20))
    node.tier.seal_all()
    node.workers.drain()
    for number in (3, 4):
        assert isinstance(node.files, FaultyFiles)
        node.files.read_faults.append(errno.EIO)
        assert node.get(partition, key_of(number)) == [None]
    if act == "delete":
        assert node.core.delete(partition, [key_of(3)]) == 0, "it was not there for anybody"
    else:
        assert node.put(partition, key_of(3), value_of(903)) == ""
    node.workers.drain()
    node.check()
    if ends == "by a clean stop":
        node.store.close(lambda: None)
        node.workers.drain()
    node = start()
    assert node.get(partition, key_of(3)) in ([None], [value_of(903)])
    assert node.get(partition, key_of(4)) == [value_of(4)], "what was unreadable for a moment may come back"


def test_i12_a_deleted_record_in_a_file_that_cannot_be_removed_does_not_come_back(start: Start) -> None:
    node = start(limit=LIMIT_BYTES, files=Unremovable())
    partition = fill(node, "a", range(40))
    stuck = [segment for segment in node.tier.tenants[TenantId("a")].segments.values() if segment.is_leaving]
    keys = [entry.key for segment in stuck for entry in segment.entries]
    assert keys and node.core.delete(partition, keys[:1]) == 0
    node.workers.drain()
    node = start(limit=LIMIT_BYTES)
    assert node.get(partition, *keys[:2])[0] is None
    assert node.get(partition, keys[1]) != [None], "nobody deleted it: it may be there again"
