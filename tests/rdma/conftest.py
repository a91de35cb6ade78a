"""Fixtures for tests over real verbs: they run where there is an RDMA device, which is what ``make test-rdma`` makes.

Without a device nothing here is collected, so that ``make test`` neither fails nor fills its report with skips.
"""

from __future__ import annotations

import os

import pytest

from saltern.rdma import Device

_HAS_DEVICE = any(port.is_active for port in Device.discover())
#: In the guest a missing device is a fault of the recipe, not a reason to pass.
_IN_GUEST = os.environ.get("SALTERN_RDMA_VM") == "1"

collect_ignore_glob = [] if _HAS_DEVICE or _IN_GUEST else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if _HAS_DEVICE or _IN_GUEST else ["no RDMA device: tests/rdma is left out (make test-rdma makes one)"]


@pytest.fixture(scope="session", autouse=True)
def _device_there() -> None:
    assert _HAS_DEVICE, "the guest has no active RDMA device"
