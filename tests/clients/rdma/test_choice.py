"""Which device, port and GID are chosen: rules over a table, no device needed."""

from __future__ import annotations

import pytest

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.rdma import DeviceChoice, Gid, GidEntry, GidType, LinkLayer, PortFacts, choose

V2_IPV4 = GidEntry(3, Gid.parse("::ffff:10.0.0.1"), GidType.ROCE_V2, "eth0")
V2_IPV6 = GidEntry(5, Gid.parse("2001:db8::1"), GidType.ROCE_V2, "eth0")
V2_LINK_LOCAL = GidEntry(1, Gid.parse("fe80::1"), GidType.ROCE_V2, "eth0")
V2_ELSEWHERE = GidEntry(2, Gid.parse("::ffff:10.0.0.9"), GidType.ROCE_V2, "")
V1_IPV4 = GidEntry(0, Gid.parse("::ffff:10.0.0.1"), GidType.ROCE_V1, "eth0")
INFINIBAND = GidEntry(0, Gid.parse("fe80::2:c903:0:1"), GidType.INFINIBAND)


def port(device: str, *gids: GidEntry, number: int = 1, is_active: bool = True) -> PortFacts:
    layer = LinkLayer.INFINIBAND if INFINIBAND in gids else LinkLayer.ETHERNET
    return PortFacts(device, number, is_active, layer, gids)


@pytest.mark.parametrize(
    ("gids", "expected"),
    [
        ((V1_IPV4, V2_LINK_LOCAL, V2_IPV6, V2_IPV4), V2_IPV4),
        ((V1_IPV4, V2_LINK_LOCAL, V2_IPV6), V2_IPV6),
        ((V1_IPV4, V2_LINK_LOCAL), V2_LINK_LOCAL),
        ((V2_ELSEWHERE, V2_LINK_LOCAL), V2_LINK_LOCAL),
        ((INFINIBAND,), INFINIBAND),
    ],
)
def test_the_best_gid_of_a_port_wins(gids: tuple[GidEntry, ...], expected: GidEntry) -> None:
    assert choose([port("mlx5_0", *gids)]).entry is expected


def test_rank_comes_before_name_and_name_before_port() -> None:
    ports = [
        port("mlx5_0", V2_LINK_LOCAL),
        port("mlx5_2", V2_IPV4, number=1),
        port("mlx5_1", V2_IPV4, number=2),
        port("mlx5_1", V2_IPV4, number=1),
    ]
    chosen = choose(ports)
    assert (chosen.port.device, chosen.port.port) == ("mlx5_1", 1)
    assert choose(list(reversed(ports))) == chosen, "the order of the listing does not matter"
    assert str(chosen) == "mlx5_1:1:3 (RoCE v2, ::ffff:10.0.0.1)"


def test_a_port_that_is_down_is_passed_over() -> None:
    assert choose([port("a", V2_IPV4, is_active=False), port("b", V2_LINK_LOCAL)]).port.device == "b"


def test_what_the_operator_names_is_taken_even_roce_v1() -> None:
    ports = [port("a", V1_IPV4, V2_IPV4), port("b", V1_IPV4, V2_LINK_LOCAL)]
    assert choose(ports, DeviceChoice.parse("b")).entry is V2_LINK_LOCAL
    chosen = choose(ports, DeviceChoice.parse("b:1:0"))
    assert (chosen.port.device, chosen.entry) == ("b", V1_IPV4)
    assert choose(ports, DeviceChoice(gid_index=0)).port.device == "a"


@pytest.mark.parametrize(
    ("ports", "choice", "reason", "hint"),
    [
        ([], "auto", "RDMA_NO_DEVICE", "rxe"),
        ([port("a", V2_IPV4)], "b", "RDMA_DEVICE_UNKNOWN", "a:1"),
        ([port("a", V2_IPV4)], "a:2", "RDMA_DEVICE_UNKNOWN", "a:1"),
        ([port("a", V2_IPV4, is_active=False)], "auto", "RDMA_PORT_DOWN", "ip link set"),
        ([port("a", V1_IPV4, V2_ELSEWHERE)], "auto", "RDMA_NO_GID", "a:1:0 RoCE v1"),
        ([port("a", V2_IPV4)], "a:1:7", "RDMA_GID_UNKNOWN", "a:1:3 RoCE v2"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(ports: list[PortFacts], choice: str, reason: str, hint: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        choose(ports, DeviceChoice.parse(choice))
    assert caught.value.reason == reason
    assert hint in caught.value.hint


@pytest.mark.parametrize("text", ["mlx5_0:", "mlx5_0:1:2:3", "a b", ":1", "mlx5_0:x", "a" * 64, "mlx5_0:1:-1"])
def test_a_choice_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        DeviceChoice.parse(text)
    assert caught.value.reason == "RDMA_DEVICE_CHOICE"


def test_choices_are_read_and_written_alike() -> None:
    assert DeviceChoice.parse("") == DeviceChoice.parse("auto") == DeviceChoice()
    assert DeviceChoice.parse("mlx5_0:1:3") == DeviceChoice("mlx5_0", 1, 3)
    assert str(DeviceChoice("mlx5_0", 1, 3)) == "mlx5_0:1:3"
    assert str(DeviceChoice()) == "*:*:*"
