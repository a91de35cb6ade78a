"""Every way in which a binding crashes, hangs or lets memory go, tried through the seam, each in a child process."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError
from saltern.rdma import (
    Access,
    Completions,
    Device,
    DeviceChoice,
    ProtectionDomain,
    QueuePair,
    Region,
    Write,
)
from saltern.rdma.bindings import load_binding
from saltern.rdma.splitting import Request, Verb
from tests.rdma.extent import by_extent
from tests.rdma.sides import Side, become_nobody, close_shared_devices, connected, in_child, shared_device

_IN_GUEST = os.environ.get("SALTERN_RDMA_VM") == "1"


def _refused(reason: str, action: Callable[[], object]) -> None:
    try:
        action()
    except SalternError as error:
        assert error.reason == reason, error
    else:
        raise AssertionError(f"was not refused with {reason}")


def test_nothing_closed_can_be_used_and_closing_twice_does_nothing(binding: str) -> None:
    def child() -> None:
        side = Side(binding)
        endpoint, keys = side.pair.endpoint, (side.region.local_key, side.region.remote_key)
        side.close()
        close_shared_devices()
        gc.collect()
        chain = (Request(Verb.WRITE, (), 0, 0),)
        for action in (
            lambda: side.region.local(0, 1),
            lambda: side.completions.collect(),
            lambda: side.completions.fileno(),
            lambda: side.completions.wait(0),
            lambda: side.pair.post(chain, "late"),
            lambda: side.pair.post_receives(["late"]),
            lambda: side.pair.connect(endpoint),
            lambda: Region(side.domain, bytearray(8)),
            lambda: QueuePair(side.domain, side.completions),
            lambda: Completions(side.device, capacity=8),
            lambda: ProtectionDomain(side.device),
        ):
            _refused("RDMA_CLOSED", action)
        assert (side.region.local_key, side.region.remote_key) == keys, "keys are integers, not reads of a region"
        assert side.pair.qpn == endpoint.qpn
        for each in (side.pair, side.completions, side.region, side.domain, side.device):
            each.close()
            assert each.is_closed
        side.pair.fail()

    in_child(child)


@pytest.mark.parametrize("closed_first", ["device", "domain", "completions", "region", "pair"])
def test_whatever_is_closed_first_takes_along_what_depends_on_it(binding: str, closed_first: str) -> None:
    def child() -> None:
        side = Side(binding)
        getattr(side, closed_first).close()
        if closed_first != "region":
            assert side.pair.is_closed
        assert side.region.is_closed == (closed_first in ("device", "domain", "region"))
        side.close()
        side.device.close()

    in_child(child)


def test_events_and_work_that_nobody_took_hold_up_no_close(binding: str) -> None:
    def child() -> None:
        with connected(binding, binding) as (node, client):
            for number in range(3):
                (chain,) = node.pair.plan([Write((node.region.local(0, 8),), client.region.remote(0, 8))])
                node.pair.post(chain, number)
                assert node.completions.wait(60)
            client.pair.post_receives(["unused"])
        close_shared_devices()

    in_child(child)


def test_two_completion_queues_of_a_device_do_not_take_each_others_events(binding: str) -> None:
    def child() -> None:
        with connected(binding, binding) as (node, client), connected(binding, binding) as (other, _):
            node.run(Write((node.region.local(0, 8),), client.region.remote(0, 8)))
            assert other.completions.collect() == []
        close_shared_devices()

    in_child(child)


def test_a_chain_survives_the_garbage_collector(binding: str) -> None:
    def child() -> None:
        with connected(binding, binding, send_requests=128) as (node, client):
            node.memory[:64] = bytes(range(64))
            gc.freeze()  # what was here before the chains is nothing to it
            for _ in range(20):
                ended = node.run(*(Write((node.region.local(at, 1),), client.region.remote(at, 1)) for at in range(64)))
                gc.collect()
                assert [each.ok for each in ended] == [True]
            assert client.memory[:64] == bytes(range(64))
        close_shared_devices()

    in_child(child)


@pytest.mark.skipif(by_extent(quick=True, usual=False), reason="an interpreter of its own takes long to start")
def test_a_process_may_end_without_closing_anything(binding: str) -> None:
    code = f"from tests.rdma.sides import Side; side = Side({binding!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], timeout=110, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_registered_buffer_cannot_go_or_move(binding: str) -> None:
    domain = ProtectionDomain(shared_device(binding))
    memory, array = mmap.mmap(-1, 4096), bytearray(4096)
    with closing(domain), Region(domain, memory), Region(domain, array) as second:
        with pytest.raises(BufferError):
            memory.close()
        with pytest.raises(BufferError):
            array.extend(b"more")
        second.close()
        array.extend(b"more")
    memory.close()


def test_what_a_region_can_be_of(binding: str) -> None:
    with closing(ProtectionDomain(shared_device(binding))) as domain:
        unaligned = memoryview(bytearray(10_000))[3:7777]
        with Region(domain, unaligned, Access.REMOTE) as region:
            assert region.length_bytes == 7774
            assert region.local(7774, 0).length_bytes == 0
            for offset_bytes, length_bytes in ((0, 7775), (7775, 0), (-1, 1), (1, -1)):
                with pytest.raises(InvalidArgumentError) as caught:
                    region.remote(offset_bytes, length_bytes)
                assert caught.value.reason == "RDMA_OUT_OF_REGION"
        with Region(domain, b"read-only bytes", Access.REMOTE_READ) as region:
            assert region.remote().length_bytes == 15
        for buffer in (b"", b"read-only", memoryview(bytearray(16))[::2]):
            with pytest.raises(InvalidArgumentError) as caught:
                Region(domain, buffer, Access.LOCAL_WRITE)
            assert caught.value.reason == "RDMA_BUFFER_INVALID"
        with pytest.raises(InvalidArgumentError) as caught:
            Region(domain, bytearray(8), Access.REMOTE_WRITE)
        assert caught.value.reason == "RDMA_ACCESS_INVALID"


def test_dmabuf_is_refused_clearly_where_the_device_does_not_offer_it(binding: str) -> None:
    with closing(ProtectionDomain(shared_device(binding))) as domain, Path("/dev/zero").open("rb") as file:
        with pytest.raises(FailedPreconditionError) as caught:
            Region.from_dmabuf(domain, file.fileno(), 4096)
        assert caught.value.reason == "RDMA_DMABUF_NOT_OFFERED"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_too_little_lockable_memory_is_said(binding: str) -> None:
    def child() -> None:
        load_binding(binding)
        become_nobody(memlock_bytes=1 << 20)
        with Device(binding=binding) as device, ProtectionDomain(device) as domain:
            Region(domain, bytearray(1 << 18)).close()
            try:
                Region(domain, bytearray(8 << 20))
            except SalternError as error:
                assert error.reason == "RDMA_MEMLOCK"
                assert "1 MiB" in error.message
                assert "LimitMEMLOCK" in error.hint
            else:
                raise AssertionError("8 MiB were registered")

    in_child(child)


@pytest.mark.skipif(not _IN_GUEST, reason="takes the device from everybody for a moment")
def test_a_device_that_this_user_may_not_open_is_said(binding: str) -> None:
    nodes = list(Path("/dev/infiniband").glob("uverbs*"))
    modes = [node.stat().st_mode for node in nodes]
    try:
        for node in nodes:
            node.chmod(0o600)

        def child() -> None:
            load_binding(binding)
            become_nobody(memlock_bytes=1 << 20)
            _refused("RDMA_NOT_PERMITTED", lambda: Device(binding=binding))

        in_child(child)
    finally:
        for node, mode in zip(nodes, modes, strict=True):
            node.chmod(mode)


def test_what_cannot_be_chosen_or_reached_is_refused(binding: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        Device(mtu_bytes=8192, binding=binding)
    assert caught.value.reason == "RDMA_MTU"
    with pytest.raises(FailedPreconditionError) as caught:
        Device(DeviceChoice("mlx5_99"), binding=binding)
    assert caught.value.reason == "RDMA_DEVICE_UNKNOWN"

    if not _IN_GUEST:
        return  # which GIDs there are is another matter elsewhere
    ipv4, link_local = Side(binding), Side(binding, choice=DeviceChoice(gid_index=0))
    with closing(ipv4), closing(link_local):
        assert ipv4.pair.endpoint.gid.is_ipv4
        assert link_local.pair.endpoint.gid.is_link_local
        with pytest.raises(FailedPreconditionError) as caught:
            ipv4.pair.connect(link_local.pair.endpoint)
        assert caught.value.reason == "RDMA_GID_MISMATCH"
