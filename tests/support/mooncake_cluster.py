"""A Mooncake master and storage processes of a test, in a network of their own: their data ports bind every interface.

Nothing here is Saltern's: it is what an operator's cluster is, and what anybody on its network can do to it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dataplane.io.engines import MooncakeSettings
from saltern.endpoints import Endpoint
from tests.support.waiting import wait_until

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_STORAGE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2]), flush=True)
sys.stdin.read()
store.close()
"""
#: Anybody on the network, with Mooncake's own client: one request a line.
_STRANGER = """
import base64, ctypes, json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", sys.argv[1]), flush=True)
for line in sys.stdin:
    act, name, data = json.loads(line)
    if act == "read":
        answer = base64.b64encode(store.get(name)).decode()
    elif act == "remove":
        answer = store.remove(name, True)
    elif act == "overwrite":
        answer = store.upsert(name, base64.b64decode(data))
    print(json.dumps(answer), flush=True)
"""
_ONE_SIDED = """
import ctypes, json, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
endpoint, spots = json.loads(sys.stdin.read())
buffer = ctypes.create_string_buffer(bytes([99]) * 4096, 4096)
engine.register_memory(ctypes.addressof(buffer), 4096)
engine.get_first_buffer_address(endpoint)
print(json.dumps([engine.transfer_sync_write(endpoint, ctypes.addressof(buffer), spot, 64) for spot in spots]))
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed: make test-engines installs it"
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "Mooncake's data port binds every interface: make test-engines gives it a network of its own"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    return ""


class Cluster:
    """One master and its storage processes. Objects are what the master lists, whoever made them."""

    def __init__(self, folder: Path, storage_bytes: int) -> None:
        self._folder = folder
        self._storage_bytes = storage_bytes
        self._port, self._http_port = _free_port(), _free_port()
        self.master = self._start_master()
        self.storage = self._start_storage()
        self._stranger: subprocess.Popen[str] | None = None

    @property
    def settings(self) -> MooncakeSettings:
        return MooncakeSettings(Endpoint("127.0.0.1", self._port))

    # ---- what happens to it

    def kill_master(self) -> None:
        _kill(self.master)

    def return_master(self) -> None:
        self.master = self._start_master()

    def kill_storage(self) -> None:
        _kill(self.storage)

    def return_storage(self) -> None:
        assert self.storage.poll() is not None
        self.storage = self._start_storage()

    # ---- what anybody can do

    def names(self) -> list[str]:
        """What the master tells whoever asks over HTTP."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/get_all_keys", timeout=10) as reply:
            text = reply.read().decode()
        return [line for line in text.splitlines() if line]

    def ask(self, act: str, name: str, data: str = "") -> Any:
        if self._stranger is None:
            self._stranger = self._run(_STRANGER, str(self.settings.master))
        return _ask(self._stranger, [act, name, data])

    def one_sided(self, endpoint: str, spots: list[int]) -> list[int]:
        """Write over bytes of another process by address, past every name and every master."""
        done = subprocess.run(
            [sys.executable, "-c", _ONE_SIDED],
            input=json.dumps([endpoint, spots]),
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answers: list[int] = json.loads(done.stdout.splitlines()[-1])
        return answers

    def places(self, names: list[str]) -> Mapping[str, tuple[str, int, int]]:
        """Endpoint, address and length of objects, as the master tells every client."""
        script = (
            "import json, sys\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', sys.argv[1]) == 0\n"
            "found = {}\n"
            "for name in json.loads(sys.stdin.read()):\n"
            "    for replica in store.get_replica_desc(name):\n"
            "        at = replica.get_memory_descriptor().buffer_descriptor\n"
            "        found[name] = (at.transport_endpoint, at.buffer_address, at.size)\n"
            "print(json.dumps(found))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.settings.master)],
            input=json.dumps(names),
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return {name: tuple(place) for name, place in json.loads(done.stdout.splitlines()[-1]).items()}

    # ---- inside

    def close(self) -> None:
        for process in (self._stranger, self.storage, self.master):
            if process is not None:
                _kill(process)

    def _start_master(self) -> subprocess.Popen[str]:
        with (self._folder / "master.log").open("a") as log:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("mooncake_master")),
                    f"--rpc_port={self._port}",
                    "--rpc_address=127.0.0.1",
                    f"--metrics_port={self._http_port}",
                    "--metrics_host=127.0.0.1",
                    "--enable_metric_reporting=false",
                    "--logtostderr=1",
                ],
                stdout=log,
                stderr=log,
                text=True,
            )
        for port in (self._port, self._http_port):
            wait_until(lambda port=port: _listens(port) or process.poll() is not None, 60)  # type: ignore[misc]
        assert process.poll() is None, "the master did not come up"
        return process

    def _start_storage(self) -> subprocess.Popen[str]:
        return self._run(_STORAGE, str(self._storage_bytes), str(self.settings.master))

    def _run(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        with (self._folder / "processes.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                text=True,
            )
        code = _stdout(process).readline().strip()
        assert code == "0", f"Mooncake's setup answers {code!r}"
        return process


@contextmanager
def running_cluster(folder: Path, storage_bytes: int = 256 * 1024 * 1024) -> Iterator[Cluster]:
    """Start a cluster and end all of it at the end of the block."""
    cluster = Cluster(folder, storage_bytes)
    try:
        yield cluster
    finally:
        cluster.close()


def _ask(process: subprocess.Popen[str], request: object) -> Any:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(_stdout(process).readline())


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(30)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "GLOG_minloglevel": "2"}


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    """Below those that outgoing connections begin at: a master that is down for a while must find its own again."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
