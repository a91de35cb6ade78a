"""Fixtures for tests over real verbs: they run where there is an RDMA device, which is what ``make test-rdma`` makes.

Without a device nothing here is collected, so that ``make test`` neither fails nor fills its report with skips.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from saltern.rdma import BINDING_NAMES, Device
from tests.rdma.extent import by_extent
from tests.rdma.sides import close_shared_devices, pinned_kib, resources

_PORTS = Device.discover()
_HAS_DEVICE = any(port.is_active for port in _PORTS)
#: In the guest a missing device is a fault of the recipe, not a reason to pass.
_IN_GUEST = os.environ.get("SALTERN_RDMA_VM") == "1"

collect_ignore_glob = [] if _HAS_DEVICE or _IN_GUEST else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if _HAS_DEVICE or _IN_GUEST else ["no RDMA device: tests/rdma is left out (make test-rdma makes one)"]


@pytest.fixture(scope="session", autouse=True)
def _device_there() -> None:
    assert _HAS_DEVICE, "the guest has no active RDMA device"


@pytest.fixture(params=by_extent(quick=BINDING_NAMES[:1], usual=BINDING_NAMES))
def binding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    """No file of tests leaves a queue pair, queue, region, domain or descriptor behind."""
    if not _HAS_DEVICE:
        yield
        return
    device = _PORTS[0].device
    before = resources(device), _open_files(), pinned_kib()
    yield
    close_shared_devices()
    gc.collect()
    assert (resources(device), _open_files(), pinned_kib()) == before
