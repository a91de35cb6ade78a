"""``saltern bench --transport rdma`` over a device that is there: that it measures, never what."""

from __future__ import annotations

import os
import shutil

import pytest

from saltern.bench.perftest import TOOL_OF, find_tools
from saltern.bench.rdma import measure_rdma
from saltern.rdma import Device
from saltern.rdma.sysfs import is_software
from tests.rdma.attacker import rdma_node, sdk_client
from tests.support.static_node import MIB, tenant_policy

_SIZES_BYTES = (MIB,)
_BATCH_BYTES = 2 * MIB
TENANTS = {"acme": tenant_policy(limit_bytes=16 * MIB, block_bytes=max(_SIZES_BYTES))}
_HAS_TOOLS = all(map(shutil.which, TOOL_OF.values()))


@pytest.mark.skipif(
    not _HAS_TOOLS and os.environ.get("SALTERN_RDMA_VM") != "1",
    reason="perftest is not installed",
)
def test_puts_and_gets_are_held_against_the_tools_that_do_the_same() -> None:
    with rdma_node(tenants=TENANTS) as node, sdk_client(node) as client, Device() as device:
        report = measure_rdma(
            client,
            os.getpid(),
            device,
            find_tools(),
            turns=1,
            say=lambda _: None,
            sizes_bytes=_SIZES_BYTES,
            batch_bytes=_BATCH_BYTES,
            calls=2,
        )
        assert client.transport == "rdma"
        assert report.is_emulated == is_software(device.name) == bool(report.note)
        assert [case.case.name for case in report.cases] == ["RDMA put 1 MiB", "RDMA get 1 MiB"]
        for case in report.cases:
            assert case.ratio > 0 and 0 < case.expected_ratio(report.costs) <= 1
