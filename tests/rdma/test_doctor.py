"""``saltern doctor`` beside a device that is there."""

from __future__ import annotations

from saltern.cli.finding import State
from saltern.cli.rdma_facts import examine


def test_doctor_looks_at_library_gid_memory_and_device() -> None:
    found = {finding.check: finding for finding in examine()}
    assert list(found) == ["RDMA library", "RDMA GID", "RDMA locked memory", "RDMA device"]
    assert found["RDMA library"].state is State.OK
    assert "RoCE v2" in found["RDMA GID"].detail or "InfiniBand" in found["RDMA GID"].detail
    assert "opens; MTU " in found["RDMA device"].detail
    assert State.FAIL not in {finding.state for finding in found.values()}
