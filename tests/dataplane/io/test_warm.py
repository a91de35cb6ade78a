"""A node whose DRAM outlives it: the same entries after a clean stop, and nothing at all after anything else."""

from __future__ import annotations

import fcntl
import os
import random
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog.testing

from dataplane.io.arena import Arena
from dataplane.io.warm_files import ArenaFolder
from dataplane.settings import ArenaSettings, SsdSettings
from saltern.errors import FailedPreconditionError, PermissionDeniedError, ResourceExhaustedError
from saltern.names import NodeId, TenantId
from tenants.policy import TenantPolicy, TenantState
from tests.support.memory_folder import memory_folder
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy
from tests.support.waiting import wait_until
from tests.support.wire_client import WireClient, block, connect_tcp, connect_unix, key

ENTRIES = {key(n): block(n, 10_000 * n + 1) for n in range(20)}
TENANTS = {"acme": tenant_policy(limit_bytes=8 * MIB), "blue": tenant_policy(limit_bytes=8 * MIB)}


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made / "arena"


def warm_node(folder: Path, tenants: dict[str, TenantPolicy] | None = None, **options: object):  # type: ignore[no-untyped-def]
    options.setdefault("dram_bytes", 16 * MIB)
    return static_node(TENANTS if tenants is None else tenants, arena=ArenaSettings(folder, folder), **options)  # type: ignore[arg-type]


def connected(
    node: StaticNode, connect: Callable[[StaticNode], WireClient] = connect_tcp, epoch: int = 1
) -> WireClient:
    client = connect(node)
    client.hello(node.token("acme", "chat"), epoch=epoch)
    return client


def fill(folder: Path, **options: object) -> None:
    """One life of a node that stores ENTRIES and stops cleanly."""
    with warm_node(folder, **options) as node, connected(node) as client:
        assert client.put(ENTRIES).codes == bytes(len(ENTRIES))


def started(node: StaticNode) -> str:
    return node.call(lambda: str(node._node.dram_start))


@pytest.mark.parametrize("connect", [connect_tcp, connect_unix])
def test_a_clean_restart_serves_the_same_entries_again_and_again(
    folder: Path, connect: Callable[[StaticNode], WireClient]
) -> None:
    fill(folder)
    for _ in range(3):
        with warm_node(folder) as node, connected(node, connect) as client:
            assert started(node) == "warm with 20 entries, 1.8 MiB"
            assert client.get(*ENTRIES) == ENTRIES
            assert client.put({key(0): block(0, 1)}).codes == b"\x06", "ALREADY_EXISTS"
            node.check_invariants()


def test_i2_a_put_into_an_adopted_arena_takes_nobodys_memory(folder: Path) -> None:
    fill(folder)
    more = {key(n): block(n, 70_000) for n in range(100, 150)}
    with warm_node(folder) as node, connected(node) as client:
        assert client.delete(*list(ENTRIES)[::2]) == 10
        assert client.put(more).codes == bytes(50)
        left = dict(list(ENTRIES.items())[1::2])
        assert client.get(*ENTRIES, *more) == {**left, **more}
        node.check_invariants()
    with warm_node(folder) as node, connected(node) as client:
        assert client.get(*ENTRIES, *more) == {**left, **more}


def test_the_files_are_for_the_nodes_user_alone_and_the_index_is_gone_while_it_runs(folder: Path) -> None:
    fill(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {path.name.partition("-")[0]: path for path in folder.iterdir()}
    assert names.keys() == {"arena", "index", "lock"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in names.values())
    assert names["arena"].stat().st_blocks * 512 >= 16 * MIB, "all of it is allocated"
    with warm_node(folder):
        assert not names["index"].exists()
    assert names["index"].exists()


def test_a_node_that_never_got_a_policy_leaves_everything_as_it_found_it(folder: Path) -> None:
    fill(folder)
    with warm_node(folder, apply_policy=False):
        pass
    with warm_node(folder, apply_policy=False) as node:
        with pytest.raises(FailedPreconditionError):
            node.apply({"acme": tenant_policy(limit_bytes=64 * MIB, reserved_bytes=64 * MIB)})
    with warm_node(folder) as node, connected(node) as client:
        assert client.get(*ENTRIES) == ENTRIES


# ---- what changed in between


def test_i12_what_was_deleted_meanwhile_is_not_there(folder: Path) -> None:
    fill(folder)
    with warm_node(folder, {"blue": TENANTS["blue"]}) as node:
        node.apply(TENANTS)
        with connected(node) as client:
            assert client.get(*ENTRIES) == {}


@pytest.mark.parametrize("change", [{"uid": "uid-2"}, {"epochs": (2, 3)}])
def test_i12_a_namespace_made_anew_and_a_retired_epoch_are_not_there(folder: Path, change: dict[str, object]) -> None:
    fill(folder)
    with warm_node(folder, {"acme": tenant_policy(limit_bytes=8 * MIB, **change)}) as node:  # type: ignore[arg-type]
        with connected(node, epoch=3 if "epochs" in change else 1) as client:
            assert client.get(*ENTRIES) == {}
        assert node.usage().free_bytes == 16 * MIB


def test_a_suspended_tenant_finds_its_entries_when_it_is_resumed(folder: Path) -> None:
    fill(folder)
    with warm_node(folder, {"acme": tenant_policy(limit_bytes=8 * MIB, state=TenantState.SUSPENDED)}) as node:
        with connect_tcp(node) as early, pytest.raises(PermissionDeniedError):
            early.hello(node.token("acme", "chat"))
        node.apply(TENANTS)
        with connected(node) as client:
            assert client.get(*ENTRIES) == ENTRIES


def test_i4_a_limit_lowered_meanwhile_holds_before_anything_is_served(folder: Path) -> None:
    fill(folder)
    with warm_node(folder, {"acme": tenant_policy(limit_bytes=MIB)}) as node, connected(node) as client:
        assert 0 < node.usage().tenants[TenantId("acme")].used_bytes <= MIB
        found = client.get(*ENTRIES)
        assert found and all(ENTRIES[name] == value for name, value in found.items())


def test_i7_bytes_that_changed_while_no_node_ran_are_a_miss_and_can_be_put_again(folder: Path) -> None:
    fill(folder)
    arena = next(folder.glob("arena-*"))
    data = arena.read_bytes()
    with arena.open("r+b") as file:
        file.seek(data.index(ENTRIES[key(7)]) + 5000)
        file.write(b"?")
    with warm_node(folder) as node, connected(node) as client:
        intact = {name: value for name, value in ENTRIES.items() if name != key(7)}
        assert client.get(*ENTRIES) == intact
        assert client.put({key(7): ENTRIES[key(7)]}).codes == b"\0"
        assert client.get(*ENTRIES) == ENTRIES
        node.check_invariants()


def test_the_same_key_on_both_tiers_and_damage_in_one(folder: Path, tmp_path: Path) -> None:
    ssd = SsdSettings(tmp_path / "ssd", 64 * MIB, tmp_path)
    tenants = {"acme": tenant_policy(limit_bytes=MIB, ssd_limit_bytes=32 * MIB)}
    values = {key(n): block(n, 60_000) for n in range(1, 61)}
    with warm_node(folder, tenants, ssd=ssd) as node, connected(node) as client:
        for name, value in values.items():
            assert client.put({name: value}).codes == b"\0"
        wait_until(lambda: client.lookup(*values).prefix == 60)
        assert client.get(key(1)) == {key(1): values[key(1)]}, "promoted: it is on both now"
    arena = next(folder.glob("arena-*"))
    with arena.open("r+b") as file:
        file.seek(arena.read_bytes().index(values[key(1)]))
        file.write(b"??")
    with warm_node(folder, tenants, ssd=ssd) as node, connected(node) as client:
        assert started(node).startswith("warm with ")
        for name, value in values.items():
            wait_until(lambda: client.get(name) == {name: value})  # noqa: B023 - it may be on its way to SSD
        node.check_invariants()


# ---- what is thrown away


def reason_of_start(folder: Path, **options: object) -> str:
    """Start on what is in ``folder``; it must be cold and serve as ever. Returns what the log says."""
    with structlog.testing.capture_logs() as logged, warm_node(folder, **options) as node, connected(node) as client:
        assert client.get(*ENTRIES) == {}
        assert client.put({key(1): block(1)}).codes == b"\0"
        assert client.get(key(1)) == {key(1): block(1)}
        assert len(list(folder.glob("arena-*"))) == 1
        if not started(node).startswith("cold, snapshot thrown away: "):
            assert started(node) == "cold"
    return "".join(one["reason"] for one in logged if one["event"].startswith("snapshot thrown away"))


def test_another_size_starts_cold_and_says_so(folder: Path) -> None:
    fill(folder)
    assert "16 MiB" in reason_of_start(folder, dram_bytes=24 * MIB)


def test_an_arena_that_is_not_the_one_starts_cold(folder: Path) -> None:
    fill(folder)
    arena = next(folder.glob("arena-*"))
    data = arena.read_bytes()
    arena.unlink()
    arena.write_bytes(data)
    assert "not the file" in reason_of_start(folder)


def test_a_missing_arena_starts_cold(folder: Path) -> None:
    fill(folder)
    next(folder.glob("arena-*")).unlink()
    assert "cannot be opened" in reason_of_start(folder)


def test_i7_kill_9_while_stopping_or_while_adopting_starts_cold_without_a_word(folder: Path) -> None:
    """An index that has no name yet, or no name any more."""
    for left in (lambda index: index[: len(index) // 2], lambda index: index):
        fill(folder)
        (folder / "index.partial").write_bytes(left((folder / "index").read_bytes()))
        (folder / "index").unlink()
        assert reason_of_start(folder) == ""
        (folder / "index").unlink()


def test_damaged_indexes_start_cold(folder: Path) -> None:
    fill(folder)
    data = (folder / "index").read_bytes()
    generator = random.Random(3)
    for damage in (b"", data[:-1], data + b"\0", bytes(len(data)), generator.randbytes(len(data))):
        (folder / "index").write_bytes(damage)
        assert reason_of_start(folder)


def test_an_index_of_another_boot_or_node_starts_cold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(folder)
    options = {"capacity_bytes": 16 * MIB, "index_folder": folder}
    other = ArenaFolder(folder, node_id=NodeId("node-2"), **options)  # type: ignore[arg-type]
    assert other.reason == "it is of node 'node-1'"
    other.close()
    fill(folder)
    monkeypatch.setattr("dataplane.io.warm_files._boot_id", lambda: "another boot")
    assert "booted since" in reason_of_start(folder)


def test_two_folders_for_the_index_never_mix(folder: Path, tmp_path: Path) -> None:
    """On hugetlbfs the index is elsewhere: one that was left behind there does not match what others wrote since."""
    fill(folder)
    stale = (folder / "index").read_bytes()
    (folder / "index").unlink()
    fill(folder)
    (folder / "index").write_bytes(stale)
    assert "cannot be opened" in reason_of_start(folder)


# ---- what is refused


def refused(folder: Path) -> FailedPreconditionError:
    with pytest.raises(FailedPreconditionError) as caught, warm_node(folder):
        pass
    return caught.value


def test_two_nodes_do_not_share_a_folder(folder: Path) -> None:
    with warm_node(folder):
        assert refused(folder).reason == "ARENA_DIR_IN_USE"
    with warm_node(folder) as node, connected(node) as client:
        client.ping()


def test_a_folder_on_a_disk_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "arena").reason == "ARENA_DIR_NOT_MEMORY"


def test_a_folder_that_others_can_change_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o770)
    assert "others can write to it" in str(refused(folder))
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    assert "others can replace it" in str(refused(folder))
    folder.parent.chmod(0o700)
    (folder.parent / "link").symlink_to(folder)
    assert "a link" in str(refused(folder.parent / "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    assert refused(folder).reason == "ARENA_DIR_UNSAFE"


def test_a_tmpfs_without_room_is_an_error_at_start_and_leaves_nothing_open(folder: Path) -> None:
    free_bytes = os.statvfs(folder.parent).f_bavail * os.statvfs(folder.parent).f_frsize
    with pytest.raises(ResourceExhaustedError) as caught, warm_node(folder, dram_bytes=free_bytes + 4096 * MIB):
        pass
    assert caught.value.reason == "ARENA_DIR_FULL"
    with (folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert reason_of_start(folder) == ""


def test_the_arena_of_a_file_is_in_no_core_file_and_no_child(folder: Path) -> None:
    made = ArenaFolder(folder, node_id=NodeId("n"), capacity_bytes=4 * MIB, index_folder=folder)
    arena = Arena(4 * MIB, prefault=True, descriptor=made.descriptor)
    try:
        areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        ours = [area for area in areas if made.identity.generation in area.partition("\n")[0]]
        flags = [area.partition("VmFlags:")[2].split() for area in ours]
        assert flags and all({"dd", "dc"} <= set(one) for one in flags)
    finally:
        arena.close()
        made.close()
