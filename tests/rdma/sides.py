"""Two ends of a connection in one process, each with a device, domain and memory of its own, over real verbs."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from saltern.rdma import (
    Access,
    Completion,
    Completions,
    Device,
    DeviceChoice,
    Operation,
    ProtectionDomain,
    QueuePair,
    Region,
)

_CHILD_S = 60
_COMPLETION_S = 60


_shared: dict[str, Device] = {}


def shared_device(binding: str = "") -> Device:
    """One open device for all tests of a file: opening one reads a thousand rows of a GID table.

    Args:
        binding: its name; empty for the one that the product takes.
    """
    if binding not in _shared:
        _shared[binding] = Device(binding=binding)
    return _shared[binding]


def close_shared_devices() -> None:
    while _shared:
        _shared.popitem()[1].close()


class Side:
    """One end: ``region`` over ``memory``, and a queue pair with the same access."""

    def __init__(
        self,
        binding: str,
        *,
        access: Access = Access.LOCAL_WRITE,
        size_bytes: int = 1 << 20,
        send_requests: int = 32,
        receive_requests: int = 8,
        mtu_bytes: int | None = None,
        choice: DeviceChoice | None = None,
    ) -> None:
        self._is_own = bool(choice or mtu_bytes)
        if self._is_own:
            self.device = Device(choice, mtu_bytes=mtu_bytes, binding=binding)
        else:
            self.device = shared_device(binding)
        self.domain = ProtectionDomain(self.device)
        self.memory = mmap.mmap(-1, size_bytes)
        self.region = Region(self.domain, self.memory, access)
        self.completions = Completions(self.device, capacity=4 * (send_requests + receive_requests))
        self.pair = QueuePair(
            self.domain,
            self.completions,
            access=access & ~Access.LOCAL_WRITE,
            send_requests=send_requests,
            receive_requests=receive_requests,
        )

    def run(self, *operations: Operation) -> list[Completion]:
        """Post all of them, as room allows, and collect a completion for each chain."""
        found: list[Completion] = []
        chains = self.pair.plan(operations)
        for number, chain in enumerate(chains):
            while self.pair.free_requests < len(chain):
                found += self.collect(1)
            self.pair.post(chain, number)
        return found + self.collect(len(chains) - len(found))

    def collect(self, count: int) -> list[Completion]:
        """Exactly ``count`` completions."""
        found: list[Completion] = []
        while len(found) < count:
            batch = self.completions.collect(count - len(found))
            if not batch:
                assert self.completions.wait(_COMPLETION_S), f"{len(found)} of {count} completions"
            found += batch
        return found

    def close(self) -> None:
        self.pair.close()
        self.completions.close()
        self.domain.close()
        self.memory.close()  # which a region that is still there would refuse
        if self._is_own:
            self.device.close()


@contextmanager
def connected(node: str, client: str, **options: object) -> Iterator[tuple[Side, Side]]:
    """A node's side (nothing remote, I3) and a client's (its memory open to the peer), by the names of bindings."""
    sizes = {key: value for key, value in options.items() if key in ("size_bytes", "send_requests", "receive_requests")}
    near = Side(node, **sizes)  # type: ignore[arg-type]
    try:
        far = Side(client, access=Access.REMOTE, **sizes)  # type: ignore[arg-type]
        try:
            near.pair.connect(far.pair.endpoint, ack_timeout=12, retries=3)
            far.pair.connect(near.pair.endpoint, ack_timeout=12, retries=3)
            yield near, far
        finally:
            far.close()
    finally:
        near.close()


def resources(device: str) -> dict[str, int]:
    """How many queue pairs, regions, ... the kernel holds for a device, of every process."""
    listing = subprocess.run(
        ["rdma", "-j", "resource", "show", device], capture_output=True, text=True, check=True
    ).stdout
    (row,) = json.loads(listing)
    return {kind: row[kind] for kind in ("pd", "cq", "qp", "mr")}


def pinned_kib() -> int:
    """Memory of this process that is registered with devices."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmPin:"))


def become_nobody(memlock_bytes: int) -> None:
    """What has not been imported by now may be out of reach: this interpreter can be in root's own folder."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
    os.setgid(65534)
    os.setuid(65534)


def in_child(action: Callable[[], object]) -> None:
    """Run ``action`` in a forked child: a crash ends the child and fails the test with the name of its signal."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            try:
                action()
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
        os._exit(status)
    ended_by_s = time.monotonic() + _CHILD_S
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > ended_by_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child hung for {_CHILD_S} s")
        time.sleep(0.01)
    assert not os.WIFSIGNALED(status), f"the child died of {signal.Signals(os.WTERMSIG(status)).name}"
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed: see its output"
