"""RDMA ports and GID tables as the kernel lists them in ``/sys/class/infiniband``: no library, no device opened.

Both bindings see the same table, but only here does every entry come with its type and its network device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from saltern.rdma.values import Gid, GidEntry, GidType, LinkLayer, PortFacts

SYSFS: Final = Path("/sys/class/infiniband")
#: In a row. Tables have 256 to 1024 rows, a few of them used; every session of a client looks for its GID.
_EMPTY_ROWS: Final = 32


def read_ports(root: Path = SYSFS, *, whole: bool = True) -> tuple[PortFacts, ...]:
    """Every port of every RDMA device, by name and number; empty where the kernel has no RDMA at all.

    Args:
        whole: look at every row of each GID table. Else what lies behind many empty rows is left out: the kernel puts a
            new GID into the first row that is free.
    """
    return tuple(_port(path, whole=whole) for path in sorted(root.glob("*/ports/*"), key=_order))


def read_network_mtu_bytes(network_device: str, root: Path = Path("/sys/class/net")) -> int | None:
    """MTU of a network device, None where it is not to be seen."""
    text = _text(root / network_device / "mtu") if network_device else ""
    return int(text) if text.isdecimal() else None


def device_node(device: str, root: Path = Path("/sys/class/infiniband_verbs")) -> Path | None:
    """The file in /dev that a device is opened through, whether or not it is there; None where the kernel has none."""
    for path in root.glob("uverbs*"):
        if _text(path / "ibdev") == device:
            return Path("/dev/infiniband") / path.name
    return None


def is_software(device: str, root: Path = SYSFS) -> bool:
    """Whether a device is a driver's alone (Soft-RoCE, siw): it has no hardware on any bus."""
    return not (root / device / "device").exists()


def _order(path: Path) -> tuple[str, int]:
    return path.parent.parent.name, int(path.name)


def _port(path: Path, *, whole: bool) -> PortFacts:
    ethernet = _text(path / "link_layer") == "Ethernet"
    return PortFacts(
        device=path.parent.parent.name,
        port=int(path.name),
        is_active=_text(path / "state").endswith("ACTIVE"),
        link_layer=LinkLayer.ETHERNET if ethernet else LinkLayer.INFINIBAND,
        gids=tuple(_gids(path, whole=whole)),
    )


def _gids(path: Path, *, whole: bool) -> Iterator[GidEntry]:
    root, link_layer = str(path), _text(path / "link_layer")
    empty_rows = 0
    for index in sorted(int(name) for name in _names(path / "gids")):
        text = _read(f"{root}/gids/{index}")
        if not text.strip("0:"):  # an empty row, or one that cannot be read
            empty_rows += 1
            if empty_rows == _EMPTY_ROWS and not whole:
                return
            continue
        empty_rows = 0
        yield GidEntry(
            index=index,
            gid=Gid.parse(text),
            gid_type=_gid_type(_read(f"{root}/gid_attrs/types/{index}"), link_layer),
            network_device=_read(f"{root}/gid_attrs/ndevs/{index}"),
        )


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - names are all that is wanted, of up to 1024 rows
    except OSError:
        return []


def _gid_type(kind: str, link_layer: str) -> GidType:
    if kind == "RoCE v2":
        return GidType.ROCE_V2
    return (
        GidType.ROCE_V1 if link_layer == "Ethernet" else GidType.INFINIBAND
    )  # the kernel writes "IB/RoCE v1" for both


def _text(path: Path) -> str:
    return _read(str(path))


def _read(path: str) -> str:
    """Contents without white space around; empty where it cannot be read: rows of another network namespace, say.

    System calls alone: a table has up to 1024 rows, nearly all of them empty, and each is a file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 256).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
