"""A device that is open, and the protection domains in it."""

from __future__ import annotations

import errno
import os
import warnings
from typing import ClassVar

from saltern.errors import FailedPreconditionError, SalternError
from saltern.rdma import sysfs
from saltern.rdma.bindings import load_binding
from saltern.rdma.bindings.interface import Binding, Handle, VerbsError
from saltern.rdma.choice import Chosen, DeviceChoice, choose
from saltern.rdma.faults import verbs
from saltern.rdma.resource_tree import Resource
from saltern.rdma.values import MTUS_BYTES, DeviceLimits, Gid, PortFacts


class Device(Resource):
    """One port of an RDMA device, and the GID that is spoken from: chosen by rule or as ``choice`` says.

    Args:
        choice: what is fixed of device, port and GID index; see :mod:`saltern.rdma.choice` for the rest.
        mtu_bytes: use no larger packets than this; None for what the port does now.
        binding: ``"pyverbs"``, ``"ibverbs"`` or empty for the first that loads.

    Attributes:
        chosen: port and GID; ``str(device.chosen)`` is a line for the log.
        limits: what the device and the port can carry.
        mtu_bytes: what endpoints of this side say.

    Raises:
        FailedPreconditionError: RDMA_NO_DEVICE, RDMA_NO_LIBRARY, RDMA_DEVICE_UNKNOWN, RDMA_PORT_DOWN, RDMA_NO_GID,
            RDMA_GID_UNKNOWN, RDMA_MTU.
        PermissionDeniedError: RDMA_NOT_PERMITTED.
    """

    kind: ClassVar[str] = "device"

    def __init__(self, choice: DeviceChoice | None = None, *, mtu_bytes: int | None = None, binding: str = "") -> None:
        # Devices first: "no device" is the truth on most machines, and no library would mend that.
        self.chosen: Chosen = _choose(choice)
        super().__init__(load_binding(binding))
        name, port = self.chosen.port.device, self.chosen.port.port
        with verbs(f"opening RDMA device {name}"):
            self._open(_open_device(self._binding, name))
        try:
            with verbs(f"looking at RDMA device {name}"):
                self.limits: DeviceLimits = self._binding.query_limits(self.handle, port)
            self.mtu_bytes = _checked_mtu(mtu_bytes, self.limits)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def discover() -> tuple[PortFacts, ...]:
        """Every RDMA port of this machine, whether or not a binding is installed."""
        return sysfs.read_ports()

    @property
    def name(self) -> str:
        return self.chosen.port.device

    @property
    def port(self) -> int:
        return self.chosen.port.port

    @property
    def gid(self) -> Gid:
        return self.chosen.entry.gid

    @property
    def gid_index(self) -> int:
        return self.chosen.entry.index

    @property
    def binding(self) -> Binding:
        return self._binding

    def _destroy(self, handle: Handle) -> None:
        self._binding.close_device(handle)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"RDMA device {self.name} was never closed", ResourceWarning, stacklevel=1, source=self)


class ProtectionDomain(Resource):
    """Regions and queue pairs of one domain reach each other; nothing of another domain does.

    The node has one: its region gives nobody remote access, so there is nothing to keep apart (I3). A client has one
    for each session, so that a key leaked from one is of no use on another.
    """

    kind: ClassVar[str] = "protection domain"
    close_rank: ClassVar[int] = 3

    def __init__(self, device: Device) -> None:
        super().__init__(device.binding, device)
        self.device = device
        with verbs(f"allocating a protection domain of {device.name}"):
            self._open(self._binding.allocate_domain(device.handle))

    def _destroy(self, handle: Handle) -> None:
        self._binding.free_domain(handle)


def _choose(choice: DeviceChoice | None) -> Chosen:
    """By the rows of GID tables that are in use, as a rule; by all of them before anything is said to be missing."""
    try:
        return choose(sysfs.read_ports(whole=False), choice)
    except SalternError:
        return choose(sysfs.read_ports(), choice)


def _open_device(binding: Binding, name: str) -> Handle:
    """libibverbs leaves out devices whose node it cannot open, so that "none of that name" may mean "not allowed"."""
    try:
        return binding.open_device(name)
    except VerbsError as fault:
        node = sysfs.device_node(name)
        if node is not None and not os.access(node, os.R_OK | os.W_OK):
            raise VerbsError(f"open {node}", errno.EACCES) from fault
        raise


def _checked_mtu(mtu_bytes: int | None, limits: DeviceLimits) -> int:
    if mtu_bytes is None:
        return limits.active_mtu_bytes
    if mtu_bytes not in MTUS_BYTES or mtu_bytes > limits.active_mtu_bytes:
        raise FailedPreconditionError(
            f"an RDMA MTU of {mtu_bytes} bytes cannot be used: the port's is {limits.active_mtu_bytes}",
            reason="RDMA_MTU",
            hint=f"use one of {', '.join(map(str, MTUS_BYTES))} up to that, or raise the MTU of the network device: "
            "RoCE has 1024 over Ethernet's 1500, and 4096 from 4200 on",
        )
    return mtu_bytes
