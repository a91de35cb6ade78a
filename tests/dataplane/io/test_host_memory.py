"""Huge pages and NUMA binding with what this machine has; where it may not be changed, the test is skipped."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataplane.io.arena import Arena
from dataplane.io.host_memory import HugePages, placement_of
from dataplane.io.warm_files import ArenaFolder
from dataplane.settings import ArenaSettings
from saltern.errors import FailedPreconditionError, ResourceExhaustedError
from saltern.names import NodeId
from tests.support.memory_folder import memory_folder
from tests.support.static_node import MIB, static_node
from tests.support.wire_client import block, connect_tcp, key

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
NODES = Path("/sys/devices/system/node")
PAGES = 16
needs_numa = pytest.mark.skipif(not (NODES / "has_memory").exists(), reason="the kernel tells of no NUMA nodes")


@contextmanager
def reserved_pages(count: int) -> Iterator[None]:
    """So many huge pages of 2 MiB in the pool, and as many as before afterwards."""
    try:
        before = POOL.read_text()
        POOL.write_text(str(int(before) + count))
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    try:
        if int(POOL.read_text()) < int(before) + count:
            pytest.skip("the system has no room for huge pages")
        yield
    finally:
        POOL.write_text(before)


@contextmanager
def arena(capacity_bytes: int, **options: object) -> Iterator[Arena]:
    made = Arena(capacity_bytes, prefault=True, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def test_an_arena_of_explicit_huge_pages_is_made_of_them() -> None:
    with reserved_pages(PAGES), arena(7 * MIB + 4096, huge_pages=HugePages.MIB_2) as made:
        assert made.placement().huge_bytes == 8 * MIB
        made.view(7 * MIB, 4096)[:] = bytes(range(256)) * 16
        assert bytes(made.view(7 * MIB, 256)) == bytes(range(256))


@pytest.mark.parametrize("pages", [HugePages.MIB_2, HugePages.GIB_1])
def test_too_few_huge_pages_are_refused_with_what_to_do(pages: HugePages) -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        Arena(8 << 40, huge_pages=pages)
    assert caught.value.reason == "HUGE_PAGES_UNAVAILABLE"
    assert "nr_hugepages" in caught.value.hint
    assert str((8 << 40) // pages.page_bytes) in caught.value.message


def test_a_transparent_arena_says_what_it_got_and_off_means_none() -> None:
    with arena(16 * MIB, huge_pages=HugePages.OFF) as made:
        assert made.placement().huge_bytes == 0
    with arena(16 * MIB) as made:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if enabled.exists() and "[never]" not in enabled.read_text():
            assert made.placement().huge_bytes % (2 * MIB) == 0
        assert made.placement().huge_bytes <= 16 * MIB


@needs_numa
def test_an_arena_is_bound_to_its_numa_node() -> None:
    with arena(4 * MIB, numa_node=0) as made:
        assert made.placement().nodes == {0: 100}


@needs_numa
def test_a_file_in_memory_is_bound_as_well() -> None:
    with memory_folder() as folder:
        files = ArenaFolder(folder / "a", node_id=NodeId("n"), capacity_bytes=4 * MIB, index_folder=folder)
        with arena(4 * MIB, numa_node=0, descriptor=files.descriptor) as made:
            assert made.placement().nodes == {0: 100}
        files.close()


@pytest.mark.parametrize("node", [63, 64, 1_000_000])
def test_a_numa_node_that_is_not_there_is_refused_with_those_that_are(node: int) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        Arena(4 * MIB, numa_node=node)
    assert caught.value.reason == "NUMA_NODE_UNKNOWN"
    assert "--numa-node" in caught.value.hint


@needs_numa
def test_an_arena_larger_than_its_numa_node_is_refused_before_the_kernel_kills_somebody() -> None:
    with pytest.raises(ResourceExhaustedError) as caught:
        Arena(1 << 50, numa_node=0)
    assert caught.value.reason == "NUMA_NODE_TOO_SMALL"


def test_looking_at_memory_leaves_it_closable() -> None:
    memory = mmap.mmap(-1, MIB)
    memory[:] = bytes(MIB)
    placement_of(memory)
    memory.close()
    assert memory.closed


def test_explicit_pages_and_a_tmpfs_do_not_go_together() -> None:
    with memory_folder() as folder, pytest.raises(FailedPreconditionError) as caught:
        ArenaFolder(
            folder / "a",
            node_id=NodeId("n"),
            capacity_bytes=4 * MIB,
            index_folder=folder,
            huge_pages=HugePages.MIB_2,
        )
    assert caught.value.reason == "HUGE_PAGES_MISMATCH"
    assert "pagesize=2M," in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_restart_on_hugetlbfs_serves_the_same_entries(tmp_path: Path) -> None:
    """The index lies elsewhere: no file can be written there."""
    mount = tmp_path / "huge"
    mount.mkdir(mode=0o700)
    entries = {key(n): block(n, 100_000) for n in range(20)}
    with reserved_pages(PAGES):
        command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M,mode=0700", "none", str(mount)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("hugetlbfs cannot be mounted here")
        try:
            index_folder = tmp_path / "state"
            index_folder.mkdir()
            settings = ArenaSettings(mount / "a", index_folder, HugePages.MIB_2)
            for life in range(3):
                with static_node(dram_bytes=9 * MIB, arena=settings) as node, connect_tcp(node) as client:
                    client.hello(node.token("acme", "chat"))
                    if life == 0:
                        assert client.put(entries).codes == bytes(20)
                    assert client.get(*entries) == entries
                    assert node.call(lambda: node._node._arena.placement().huge_bytes) == 10 * MIB
                    warmth = node.call(lambda: str(node._node.dram_start))
                    assert warmth == ("warm with 20 entries, 1.9 MiB" if life else "cold")
            assert (index_folder / "dram-index").exists()
        finally:
            subprocess.run(["umount", str(mount)], check=True)
