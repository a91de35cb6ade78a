"""The kernel's tables, from a folder that looks as Linux's does."""

from __future__ import annotations

from pathlib import Path

from saltern.rdma import Gid, GidEntry, GidType, LinkLayer
from saltern.rdma.sysfs import device_node, is_software, read_network_mtu_bytes, read_ports

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def add_port(root: Path, name: str, rows: list[tuple[str, str, str]], *, state: str, layer: str) -> None:
    folder = root / name / "ports" / "1"
    write(folder / "state", state)
    write(folder / "link_layer", layer)
    for index, (gid, kind, network_device) in enumerate(rows):
        write(folder / "gids" / str(index), gid)
        if gid != ZERO:
            write(folder / "gid_attrs" / "types" / str(index), kind)
            if network_device:
                write(folder / "gid_attrs" / "ndevs" / str(index), network_device)


def test_ports_are_read_with_types_and_network_devices(tmp_path: Path) -> None:
    rows = [(ZERO, "", "")] * 9 + [("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "eth0")]
    rows.insert(0, ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", ""))
    add_port(tmp_path, "mlx5_1", rows, state="4: ACTIVE", layer="Ethernet")
    add_port(tmp_path, "mlx5_0", [("fe80::1", "IB/RoCE v1", "")], state="1: DOWN", layer="InfiniBand")
    first, second = read_ports(tmp_path)
    assert (first.device, first.is_active, first.link_layer) == ("mlx5_0", False, LinkLayer.INFINIBAND)
    assert first.gids == (GidEntry(0, Gid.parse("fe80::1"), GidType.INFINIBAND),)
    assert (second.device, second.is_active, second.link_layer) == ("mlx5_1", True, LinkLayer.ETHERNET)
    assert second.gids == (
        GidEntry(0, Gid.parse("fe80::1"), GidType.ROCE_V1),
        GidEntry(10, Gid.parse("::ffff:10.0.0.1"), GidType.ROCE_V2, "eth0"),
    )


def test_a_row_behind_many_empty_ones_is_found_by_whoever_reads_all_of_them(tmp_path: Path) -> None:
    rows = [("fe80::1", "IB/RoCE v1", ""), *[(ZERO, "", "")] * 40, ("fe80::2", "IB/RoCE v1", "")]
    add_port(tmp_path, "mlx5_0", rows, state="4: ACTIVE", layer="InfiniBand")
    assert [entry.index for entry in read_ports(tmp_path)[0].gids] == [0, 41]
    assert [entry.index for entry in read_ports(tmp_path, whole=False)[0].gids] == [0]


def test_a_machine_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "class" / "infiniband") == ()
    assert read_network_mtu_bytes("eth0", tmp_path) is None
    write(tmp_path / "eth0" / "mtu", "1500")
    assert read_network_mtu_bytes("eth0", tmp_path) == 1500


def test_a_device_is_opened_through_its_own_node(tmp_path: Path) -> None:
    write(tmp_path / "uverbs0" / "ibdev", "mlx5_0")
    write(tmp_path / "uverbs1" / "ibdev", "mlx5_1")
    assert device_node("mlx5_1", tmp_path) == Path("/dev/infiniband/uverbs1")
    assert device_node("mlx5_2", tmp_path) is None


def test_a_device_without_hardware_is_told_from_one_with(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0" / "device").mkdir(parents=True)
    (tmp_path / "rxe0").mkdir()
    assert (is_software("mlx5_0", tmp_path), is_software("rxe0", tmp_path)) == (False, True)
