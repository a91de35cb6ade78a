"""Which device, port and GID to speak from: rules over what the kernel lists, without I/O.

1. Only ports that are active, and only GIDs whose network device this process can see (or InfiniBand's own).
2. RoCE v2 with an IPv4 address, then RoCE v2 with a routable IPv6 address, then with a link-local one, then
   InfiniBand. RoCE v1 is not routable and never chosen unless its index is named.
3. Among equals the first device by name, the lowest port, the lowest index: a restart chooses the same again.

A :class:`DeviceChoice` overrides any part; what it names must be there, else the error says what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.rdma.values import GidEntry, GidType, PortFacts

_SHAPE: Final = re.compile(r"([A-Za-z0-9_.-]{1,63})(?::([0-9]{1,3}))?(?::([0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What an operator fixed; None leaves it to the rules."""

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """``DEVICE``, ``DEVICE:PORT`` or ``DEVICE:PORT:GID_INDEX``; empty or ``auto`` leaves all to the rules.

        Raises:
            InvalidArgumentError: RDMA_DEVICE_CHOICE.
        """
        if text in ("", "auto"):
            return cls()
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise InvalidArgumentError(
                f"RDMA device {text[:80]!r} is not DEVICE[:PORT[:GID_INDEX]]",
                reason="RDMA_DEVICE_CHOICE",
                hint="for example mlx5_0:1:3, or auto; `saltern doctor` lists what there is",
            )
        device, port, gid_index = match.groups()
        return cls(device, int(port) if port else None, int(gid_index) if gid_index else None)

    def __str__(self) -> str:
        parts = [self.device or "*", "*" if self.port is None else self.port]
        return ":".join(map(str, [*parts, "*" if self.gid_index is None else self.gid_index]))


@dataclass(frozen=True, slots=True)
class Chosen:
    """One port and one GID of it."""

    port: PortFacts
    entry: GidEntry

    def __str__(self) -> str:
        return f"{self.port.device}:{self.port.port}:{self.entry.index} ({self.entry.gid_type}, {self.entry.gid})"


def rank(entry: GidEntry) -> int:
    """Smaller is better; see the rules above."""
    if entry.gid_type is GidType.INFINIBAND:
        return 3
    if entry.gid_type is GidType.ROCE_V1:
        return 4
    return 0 if entry.gid.is_ipv4 else 2 if entry.gid.is_link_local else 1


def choose(ports: Sequence[PortFacts], choice: DeviceChoice | None = None) -> Chosen:
    """The port and GID that the rules give, within what ``choice`` fixes.

    Raises:
        FailedPreconditionError: RDMA_NO_DEVICE, RDMA_DEVICE_UNKNOWN, RDMA_PORT_DOWN, RDMA_NO_GID, RDMA_GID_UNKNOWN.
    """
    choice = choice or DeviceChoice()
    if not ports:
        raise FailedPreconditionError(
            "this machine has no RDMA device",
            reason="RDMA_NO_DEVICE",
            hint="load the card's driver; without one: `rdma link add rxe0 type rxe netdev eth0` (Soft-RoCE)",
        )
    named = [port for port in ports if _is_named(port, choice)]
    if not named:
        raise FailedPreconditionError(
            f"there is no RDMA port {choice}",
            reason="RDMA_DEVICE_UNKNOWN",
            hint=f"there is: {_listed(f'{port.device}:{port.port}' for port in ports)}",
        )
    active = [port for port in named if port.is_active]
    if not active:
        raise FailedPreconditionError(
            f"no RDMA port is active: {_listed(f'{port.device}:{port.port}' for port in named)}",
            reason="RDMA_PORT_DOWN",
            hint="bring its network device up (`ip link set DEV up`); on InfiniBand a subnet manager must run",
        )
    usable = [Chosen(port, entry) for port in active for entry in port.gids if _is_usable(entry, choice)]
    if usable:
        return min(usable, key=lambda each: (rank(each.entry), each.port.device, each.port.port, each.entry.index))
    listed = _listed(
        f"{port.device}:{port.port}:{entry.index} {entry.gid_type}" for port in active for entry in port.gids
    )
    if choice.gid_index is not None:
        raise FailedPreconditionError(
            f"RDMA port {choice} has no GID of that index", reason="RDMA_GID_UNKNOWN", hint=f"there is: {listed}"
        )
    raise FailedPreconditionError(
        "no active RDMA port has a RoCE v2 or InfiniBand GID",
        reason="RDMA_NO_GID",
        hint=f"give its network device an IP address; there is: {listed}",
    )


def _is_named(port: PortFacts, choice: DeviceChoice) -> bool:
    return choice.device in (None, port.device) and choice.port in (None, port.port)


def _is_usable(entry: GidEntry, choice: DeviceChoice) -> bool:
    if choice.gid_index is not None:
        return entry.index == choice.gid_index
    if entry.gid_type is GidType.INFINIBAND:
        return True
    return entry.gid_type is GidType.ROCE_V2 and bool(entry.network_device)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:16]) or "none"
