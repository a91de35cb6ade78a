"""``saltern doctor`` beside a device that is there."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from saltern.cli.finding import Finding, State
from saltern.cli.rdma_facts import examine
from tests.rdma.attacker import RdmaClient, rdma_node
from tests.rdma.sides import close_shared_devices
from tests.support.wire_client import block, key

#: The guest's network device, whose MTU is nobody else's business.
_NETWORK = "rdma0"
_IN_GUEST = os.environ.get("SALTERN_RDMA_VM") == "1"


def findings() -> dict[str, Finding]:
    return {finding.check: finding for finding in examine()}


def test_doctor_looks_at_library_gid_memory_and_device() -> None:
    found = findings()
    assert list(found) == ["RDMA library", "RDMA GID", "RDMA locked memory", "RDMA device"]
    assert found["RDMA library"].state is State.OK
    assert "RoCE v2" in found["RDMA GID"].detail or "InfiniBand" in found["RDMA GID"].detail
    assert "opens; MTU " in found["RDMA device"].detail
    assert State.FAIL not in {finding.state for finding in found.values()}


@pytest.mark.skipif(not _IN_GUEST, reason="changes the MTU of a network device")
def test_an_mtu_that_differs_is_named_by_doctor_and_the_node_serves_over_rdma_at_the_smaller() -> None:
    with rdma_node() as node:
        set_mtu(1500)
        close_shared_devices()  # which know the MTU of before
        try:
            found = findings()["RDMA device"]
            assert found.state is State.WARN
            assert found.detail == "rxe0 opens; MTU 1024 bytes of 4096, for rdma0 has 1500"
            assert "ip link set rdma0 mtu 4200" in found.hint
            with RdmaClient(node) as client:
                assert (client.pair.endpoint.mtu_bytes, client.node_endpoint.mtu_bytes) == (1024, 4096)
                assert client.put({key(1): block(1, 20_000)}).codes == b"\0"
                assert client.get(key(1), 20_000) == block(1, 20_000)
        finally:
            set_mtu(4200)
            close_shared_devices()


def set_mtu(mtu_bytes: int) -> None:
    ip = shutil.which("ip") or "/sbin/ip"
    subprocess.run([ip, "link", "set", _NETWORK, "mtu", str(mtu_bytes)], check=True)
