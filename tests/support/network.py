"""A network of hosts on one machine, to be cut and slowed: network namespaces where we may make them, else loopback.

Nothing of it has a name outside: the process that uses it lives in a network and mount namespace of its own
(:func:`enter_private_network`), and hosts are namespaces that are held by nothing but a file descriptor of it. So
whatever happens to that process, the kernel takes all of it away.

::

    this process's namespace:  br0 10.99.0.1 ── port-a ─┐       ┌─ port-b
    host a: eth0 10.99.0.10 ───────────────────────────-┘       └── eth0 10.99.0.11 :host b
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_ENTERED = "SALTERN_TEST_PRIVATE_NETWORK"
_FIRST_ADDRESS = 10
#: Where the kernel has no netem: a line of 48 KB/s with at most so much waiting in it.
_THIN_LINE = ("tbf", "rate", "384kbit", "burst", "8kb", "latency", "500ms")
_FAR_LINE = ("netem", "delay", "100ms", "20ms", "loss", "2%")


def can_make_namespaces() -> bool:
    """Whether this process may make namespaces, and has the tools."""
    probe = ["unshare", "--net", "--mount", "ip", "link", "add", "br0", "type", "bridge"]
    try:
        return os.geteuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def enter_private_network(module: str, arguments: Sequence[str]) -> None:
    """Run ``python -m MODULE ARGUMENTS`` anew in namespaces of its own, if that can be; returns in there, or if not."""
    if os.environ.get(_ENTERED) or not can_make_namespaces():
        return
    command = ["unshare", "--net", "--mount", "--", sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, _ENTERED: "1"})


class Host:
    """One host. On loopback it has the machine's address, and cannot be cut or slowed."""

    address = "127.0.0.1"
    can_be_cut = False

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` as it is run on this host."""
        return list(command)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that a process on this host needs for its start."""
        return ()


class NamespaceHost(Host):
    """A host with a network namespace of its own."""

    can_be_cut = True

    def __init__(self, number: int) -> None:
        self.address = f"10.99.0.{_FIRST_ADDRESS + number}"
        self._port = f"port-{number}"
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdin is not None and holder.stdout is not None
        try:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            holder.stdout.read(1)  # it has its namespace now
            self._namespace = os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY)
            _run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        finally:
            holder.communicate()
        self._on_host("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._on_host("ip", "link", "set", device, "up")
        _run("ip", "link", "set", self._port, "master", "br0", "up")

    def command(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/self/fd/{self._namespace}", "--", *command]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._namespace,)

    def cut(self) -> None:
        """From now on every packet from and to the host is lost without a word, as behind a switch that died."""
        _run("ip", "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """The line is as it was."""
        _run("ip", "link", "set", self._port, "master", "br0")
        for run, device in ((_run, self._port), (self._on_host, "eth0")):
            run("tc", "qdisc", "del", "dev", device, "root", check=False)

    def slow(self) -> str:
        """The line is a bad one from now on; returns how bad."""
        for line in (_FAR_LINE, _THIN_LINE):
            if _run("tc", "qdisc", "add", "dev", self._port, "root", *line, check=False):
                self._on_host("tc", "qdisc", "add", "dev", "eth0", "root", *line)
                return " ".join(line)
        raise AssertionError("the kernel has neither netem nor tbf")

    def close(self) -> None:
        os.close(self._namespace)

    def _on_host(self, *command: str, check: bool = True) -> bool:
        return _run(*self.command(command), descriptors=self.descriptors, check=check)


@contextmanager
def network(names: Mapping[str, Sequence[str]] | None = None, *, hosts: Sequence[str]) -> Iterator[dict[str, Host]]:
    """The hosts of these names, for the time of the block.

    Args:
        names: what is looked up by name (gRPC, libpq): the hosts that have it. On loopback nothing can be.
    """
    if not os.environ.get(_ENTERED):
        yield {name: Host() for name in hosts}
        return
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "addr", "add", "10.99.0.1/24", "dev", "br0")
    _run("ip", "link", "set", "br0", "up")
    made: dict[str, NamespaceHost] = {}
    try:
        for number, name in enumerate(hosts):
            made[name] = NamespaceHost(number)
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as file:
            lines = ["127.0.0.1 localhost"]
            lines += [f"{made[host].address} {name}" for name, of in (names or {}).items() for host in of]
            file.write("\n".join(lines) + "\n")
            file.flush()
            Path(file.name).chmod(0o644)
            _run("mount", "--bind", file.name, "/etc/hosts")
            yield dict(made)
    finally:
        for host in made.values():
            host.close()


def _run(*command: str, descriptors: tuple[int, ...] = (), check: bool = True) -> bool:
    result = subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0 or not check, f"{' '.join(command)}: {result.stderr.strip()}"
    return result.returncode == 0
