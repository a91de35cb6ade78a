"""What ``saltern doctor`` says of RDMA, from tables of ports; a device that opens is looked at in tests/rdma."""

from __future__ import annotations

import resource

import pytest

from saltern.cli import rdma_facts
from saltern.cli.finding import Finding, State
from saltern.rdma import Device, Gid, GidEntry, GidType, LinkLayer, PortFacts

IPV4 = GidEntry(3, Gid.parse("::ffff:10.0.0.1"), GidType.ROCE_V2, "eth0")
LINK_LOCAL = GidEntry(1, Gid.parse("fe80::1"), GidType.ROCE_V2, "eth0")
RDMA_V1 = GidEntry(0, Gid.parse("fe80::1"), GidType.ROCE_V1, "eth0")


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def examine(*ports: PortFacts, named: str = "") -> dict[str, Finding]:
        monkeypatch.setattr(Device, "discover", staticmethod(lambda: ports))
        monkeypatch.setenv(rdma_facts.DEVICE_ENVIRONMENT, named)
        return {found.check: found for found in rdma_facts.examine()}

    return examine


def _port(*gids: GidEntry, is_active: bool = True) -> PortFacts:
    return PortFacts("mlx5_0", 1, is_active, LinkLayer.ETHERNET, gids)


def test_a_machine_without_a_device_is_well(findings) -> None:  # type: ignore[no-untyped-def]
    (found,) = findings().values()
    assert (found.state, found.check) == (State.OK, "RDMA")


def test_off_is_off(findings) -> None:  # type: ignore[no-untyped-def]
    (found,) = findings(_port(IPV4), named="off").values()
    assert (found.state, found.detail) == (State.OK, "not used: SALTERN_RDMA_DEVICE is off")


def test_a_port_that_is_down_and_a_wrong_gid_are_named(findings) -> None:  # type: ignore[no-untyped-def]
    assert "ip link set" in findings(_port(IPV4, is_active=False))["RDMA device"].hint
    assert "no active RDMA port" in findings(_port(RDMA_V1))["RDMA device"].detail
    unknown = findings(_port(IPV4), named="mlx5_0:1:9")["RDMA device"]
    assert (unknown.state, unknown.hint) == (State.FAIL, "there is: mlx5_0:1:3 RoCE v2")


def test_a_link_local_gid_and_a_device_that_does_not_open_are_warned_of(findings) -> None:  # type: ignore[no-untyped-def]
    found = findings(_port(LINK_LOCAL))
    assert found["RDMA GID"].state is State.WARN
    assert "IP address" in found["RDMA GID"].hint
    assert found["RDMA device"].state is State.WARN
    assert "RDMA is not offered" in found["RDMA device"].detail


def test_too_little_lockable_memory_is_warned_of(findings, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    monkeypatch.setattr(rdma_facts.os, "geteuid", lambda: 1000)
    found = findings(_port(IPV4))["RDMA locked memory"]
    assert found.state is State.WARN
    assert "64 KiB" in found.detail
    assert "LimitMEMLOCK" in found.hint
