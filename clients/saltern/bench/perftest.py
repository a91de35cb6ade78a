"""What the RDMA device itself carries: ``ib_write_bw`` and ``ib_read_bw`` of the package perftest, one run each time.

A get is WRITEs of the node into the client's memory and a put is READs from it, so those are what ours is held against:
the same device, port, GID and MTU, one reliable connection, messages as long as our blocks.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from saltern.errors import FailedPreconditionError, UnavailableError
from saltern.rdma import Device, LinkLayer

#: Which tool does what the node does for an operation of ours.
TOOL_OF: Final = {"put": "ib_read_bw", "get": "ib_write_bw"}
#: It refuses to do less.
_COUNT_MIN: Final = 5
#: It compares two clocks first. On a busy or emulated machine it may find that they differ, says so, and then 0 Gbit/s.
_CLOCK_UNSURE: Final = "Correlation coefficient"
_CLOCK_TRIES: Final = 5
_RUN_TIMEOUT_S: Final = 120.0
_SERVER_TIMEOUT_S: Final = 30.0
_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Link:
    """What both ends of a run use.

    Attributes:
        gid_index: None on InfiniBand, where ends are found by LID.
    """

    device: str
    port: int
    gid_index: int | None
    mtu_bytes: int

    @classmethod
    def of(cls, device: Device) -> Link:
        is_ethernet = device.chosen.port.link_layer is LinkLayer.ETHERNET
        return cls(device.name, device.port, device.gid_index if is_ethernet else None, device.mtu_bytes)

    @property
    def arguments(self) -> list[str]:
        named = [] if self.gid_index is None else ["-x", str(self.gid_index)]
        return ["-d", self.device, "-i", str(self.port), "-m", str(self.mtu_bytes), *named]


def find_tools() -> dict[str, str]:
    """Where the tools are, by name.

    Raises:
        FailedPreconditionError: PERFTEST_MISSING.
    """
    found = {tool: shutil.which(tool) for tool in TOOL_OF.values()}
    missing = [tool for tool, path in found.items() if path is None]
    if missing:
        raise FailedPreconditionError(
            f"{' and '.join(missing)} are not installed: there is nothing to hold the RDMA transport against",
            reason="PERFTEST_MISSING",
            hint="apt install perftest",
        )
    return {tool: path for tool, path in found.items() if path is not None}


def measure_gb_per_s(tool_path: str, link: Link, size_bytes: int, batch_bytes: int) -> float:
    """Bandwidth of ``batch_bytes`` in messages of ``size_bytes``, between two processes of this host, in GB/s.

    While it runs, its server waits for its client on a free TCP port of every address: perftest knows no other way.

    Raises:
        UnavailableError: PERFTEST_FAILED, with what it said.
    """
    for _ in range(_CLOCK_TRIES):
        said = _run_pair(tool_path, link, size_bytes, batch_bytes)
        if _CLOCK_UNSURE not in said:
            break
    return parse_gbits(tool_path, said) / 8


def _run_pair(tool_path: str, link: Link, size_bytes: int, batch_bytes: int) -> str:
    """One run of a server and of a client of it; returns what the client said."""
    count = max(_COUNT_MIN, batch_bytes // size_bytes)
    sizes = ["-F", "-s", str(size_bytes), "-n", str(count), "-t", str(min(128, count))]
    command = [tool_path, *link.arguments, *sizes, "-p", str(_free_port()), "--report_gbits", "--output=bandwidth"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    try:
        said = _run_client([*command, "127.0.0.1"], server)
        server.wait(_RUN_TIMEOUT_S)
        return said
    except subprocess.TimeoutExpired as error:
        raise _failed(tool_path, f"it was not done after {_RUN_TIMEOUT_S:g} s") from error
    finally:
        server.kill()
        server.communicate()


def parse_gbits(tool_path: str, said: str) -> float:
    """The one number that it prints, in Gbit/s; raises PERFTEST_FAILED where there is none."""
    for line in reversed(said.splitlines()):
        try:
            figure = float(line)
        except ValueError:
            continue
        if figure > 0:
            return figure
    raise _failed(tool_path, said)


def _run_client(command: Sequence[str], server: subprocess.Popen[str]) -> str:
    """Run it again until the server listens, which it does not say; returns what it printed."""
    ended_by_s = time.monotonic() + _SERVER_TIMEOUT_S
    while True:
        done = subprocess.run(  # noqa: S603 - found on the path by find_tools
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            return done.stdout
        if server.poll() is not None or "connect" not in done.stdout.lower() or time.monotonic() > ended_by_s:
            raise _failed(command[0], done.stdout)
        time.sleep(_RETRY_S)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _failed(tool_path: str, said: str) -> UnavailableError:
    text = " ".join(said.split())[-300:] or "it said nothing"
    return UnavailableError(
        f"{tool_path} failed: {text}", reason="PERFTEST_FAILED", hint="run it by hand: a server, and a client beside it"
    )
