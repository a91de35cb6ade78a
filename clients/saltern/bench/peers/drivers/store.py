"""The interface of a peer, and what its servers need: a free port, a folder, an end with their parent."""

from __future__ import annotations

import ctypes
import hashlib
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_CLEARED_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal blocks under keys of their own.

    Attributes:
        views: the memory of each block.
        addresses: where those views begin, for clients that want pointers.
    """

    keys: list[str]
    views: list[memoryview]
    addresses: list[int]

    @property
    def block_bytes(self) -> int:
        return self.views[0].nbytes

    def split(self, count: int) -> list[Batch]:
        """Cut into batches of at most ``count`` blocks."""
        starts = range(0, len(self.keys), count)
        return [
            Batch(self.keys[at : at + count], self.views[at : at + count], self.addresses[at : at + count])
            for at in starts
        ]


#: Stores the blocks under the keys; raises if one was refused.
Put: TypeAlias = Callable[[Batch], None]
#: Reads the values of the keys, into the batch's memory or into memory of its own; raises if one is not there.
Get: TypeAlias = Callable[[Batch], Sequence["bytes | bytearray | memoryview"]]


class Store(ABC):
    """One peer: its servers, started by ``start``, and a client of them in this process.

    Attributes:
        folder: an empty folder for logs and sockets.
        servers: the running server processes.
        version: the store's and the client's name and version; known after ``start``.
    """

    #: The only sizes of a block that this peer can be measured with, in bytes; empty for any.
    block_sizes_bytes: tuple[int, ...] = ()
    #: Whether its client moves or asks for many keys in one call.
    has_batches = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[subprocess.Popen[bytes]] = []
        self.version = ""

    @abstractmethod
    def start(self) -> None:
        """Start the servers and connect; raises RuntimeError or OSError if that fails."""

    @abstractmethod
    def put_ways(self) -> Mapping[str, Put]:
        """The ways that the client offers to store a batch, by name: the fastest is what gets reported."""

    @abstractmethod
    def get_ways(self) -> Mapping[str, Get]:
        """The ways that the client offers to read a batch."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> int:
        """How many of the keys are there, asked in the client's fastest way that says which."""

    @abstractmethod
    def exists_one(self, key: str) -> bool:
        """Whether one key is there."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Make room for the keys to be stored anew; not measured."""

    def before_get(self, batch: Batch) -> None:  # noqa: B027 - most need nothing
        """What must come before each get of a batch; not measured."""

    def check(self, batch: Batch) -> None:
        """Raise RuntimeError if another value comes back than the one that was put."""
        expected = hashlib.sha256(batch.views[-1]).digest()
        for name, get in self.get_ways().items():
            batch.views[-1][:_CLEARED_BYTES] = bytes(_CLEARED_BYTES)  # a get that moves nothing must not pass
            value = get(batch)[-1]
            if hashlib.sha256(value).digest() != expected:
                raise RuntimeError(f"{name} gave other bytes than were put")
            batch.views[-1][:] = value

    def register(self, area: memoryview) -> None:  # noqa: B027 - most clients move any memory
        """Announce memory that blocks are read from and written to."""

    def close(self) -> None:
        """Stop every server, the last one first."""
        for server in reversed(self.servers):
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if server.stdin is not None:
                server.stdin.close()

    def run_server(self, command: Sequence[str], ready: Callable[[], bool]) -> None:
        """Start a server that ends with this process; returns when ``ready`` says so.

        Raises:
            RuntimeError: it ended, or was not ready in time; says what it wrote last.
        """
        log_path = self.folder / f"server-{len(self.servers)}.log"
        with log_path.open("wb") as log:
            server = subprocess.Popen(  # noqa: S603 - a program of the peer's own environment
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads yet
            )
        self.servers.append(server)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if server.poll() is not None or time.monotonic() > deadline_s:
                said = log_path.read_text("utf-8", "replace").strip().splitlines()[-3:]
                raise RuntimeError(f"{Path(command[0]).name} did not start: {' | '.join(said)[-400:]}")
            time.sleep(0.05)


def listening(port: int) -> Callable[[], bool]:
    """Whether ``port`` of loopback takes connections, as a question to ask again and again."""

    def ask() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return ask


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Between fork and exec: have the kernel end the child when its parent is gone (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
