"""Memory of a GPU: a device that takes no dma-buf refuses it in so many words, and the client goes on without."""

from __future__ import annotations

import os

import pytest

from saltern.errors import FailedPreconditionError
from saltern.rdma import Device, ProtectionDomain, Region
from saltern.rdma.sysfs import is_software
from tests.rdma.attacker import rdma_node, sdk_client
from tests.support.clients import block

_IS_SOFTWARE = any(is_software(port.device) for port in Device.discover())


@pytest.mark.skipif(not _IS_SOFTWARE, reason="this device may take it")
def test_a_device_that_takes_no_dmabuf_says_so_and_nothing_stays_registered() -> None:
    entry = block(1, 4096)
    descriptor = os.memfd_create("not of a GPU")
    try:
        os.ftruncate(descriptor, 8192)
        with rdma_node() as node, sdk_client(node) as client:
            assert client.put_many([entry])
            with pytest.raises(FailedPreconditionError) as caught:
                client.register_dmabuf(descriptor, 8192)
            assert caught.value.reason == "RDMA_DMABUF_NOT_OFFERED"
            assert "copy through it" in caught.value.hint
            assert client.transport == "rdma" and client.exists([entry[0]]) == [True]
        with Device() as device, ProtectionDomain(device) as domain, pytest.raises(FailedPreconditionError):
            Region.from_dmabuf(domain, descriptor, 8192)
    finally:
        os.close(descriptor)
