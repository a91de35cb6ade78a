"""What this machine offers to the RDMA transport: device, library, GID, MTU and memory that may be locked."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Final

from saltern.cli.finding import Finding, failed, ok, warn
from saltern.errors import SalternError
from saltern.rdma import Chosen, Device, DeviceChoice, PortFacts, choose
from saltern.rdma.bindings import load_binding
from saltern.rdma.sysfs import read_network_mtu_bytes
from saltern.sizes import format_size

#: What clients on this machine go by: device, port and GID index, or ``off``.
DEVICE_ENVIRONMENT: Final = "SALTERN_RDMA_DEVICE"
#: What a node registers at the least is its arena; below this not even a small one fits.
_MEMLOCK_MIN_BYTES: Final = 1 << 30
#: MTU of a network device from which RoCE has packets of 4096 bytes: those and their headers.
_NETWORK_MTU_BYTES: Final = 4200
_SOFT_ROCE: Final = "rxe"


def examine() -> Iterator[Finding]:
    """One line where there is no device, for most machines have none and need none; else each thing in turn."""
    ports = Device.discover()
    if not ports:
        yield ok("RDMA", "no device here; shared memory and TCP need none")
        return
    named = os.environ.get(DEVICE_ENVIRONMENT, "")
    if named == "off":
        yield ok("RDMA", f"not used: {DEVICE_ENVIRONMENT} is off")
        return
    yield _library()
    try:
        chosen = choose(ports, DeviceChoice.parse(named))
    except SalternError as error:
        yield failed("RDMA device", error)
        return
    yield _gid(ports, chosen)
    yield _locked_memory()
    yield _device(chosen)


def _library() -> Finding:
    try:
        return ok("RDMA library", f"{load_binding().name} loads")
    except SalternError as error:
        return warn("RDMA library", f"{error.message}: RDMA is not offered", error.hint)


def _gid(ports: tuple[PortFacts, ...], chosen: Chosen) -> Finding:
    entries = sum(len(port.gids) for port in ports)
    text = f"{chosen}, of {entries} on {len(ports)} port{'s' * (len(ports) != 1)}"
    if chosen.entry.gid.is_link_local and chosen.port.link_layer == "Ethernet":
        return warn(
            "RDMA GID",
            f"{text}: link-local, it reaches one network segment only",
            f"give {chosen.entry.network_device or 'its network device'} an IP address, or name another GID: "
            f"{DEVICE_ENVIRONMENT}=DEVICE:PORT:GID_INDEX",
        )
    if chosen.port.device.startswith(_SOFT_ROCE):
        return warn(
            "RDMA GID", f"{text}: Soft-RoCE is for tests, TCP is faster", "use a NIC that speaks RoCE or InfiniBand"
        )
    return ok("RDMA GID", text)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("RDMA locked memory", "unlimited")
    if soft >= _MEMLOCK_MIN_BYTES or os.geteuid() == 0:
        # Root passes the limit through CAP_IPC_LOCK, which a container may lack; registering tells.
        return ok("RDMA locked memory", f"{format_size(soft)}: a node's arena must fit")
    return warn(
        "RDMA locked memory",
        f"{format_size(soft)} is too low: registering memory will fail (RDMA_MEMLOCK)",
        "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit memlock=-1 for a container",
    )


def _device(chosen: Chosen) -> Finding:
    """Open it: permissions, driver and MTU show only then."""
    choice = DeviceChoice(chosen.port.device, chosen.port.port, chosen.entry.index)
    try:
        with Device(choice) as device:
            limits = device.limits
    except SalternError as error:
        return warn("RDMA device", f"{error.message}: RDMA is not offered", error.hint)
    text = f"{chosen.port.device} opens; MTU {limits.active_mtu_bytes} bytes"
    if limits.active_mtu_bytes < limits.max_mtu_bytes:
        network = chosen.entry.network_device
        network_mtu_bytes = read_network_mtu_bytes(network)
        if network_mtu_bytes is not None and network_mtu_bytes < _NETWORK_MTU_BYTES:
            return warn(
                "RDMA device",
                f"{text} of {limits.max_mtu_bytes}, for {network} has {network_mtu_bytes}",
                f"ip link set {network} mtu {_NETWORK_MTU_BYTES} (and on every switch between)",
            )
    return ok("RDMA device", text)
