"""A peer's driver as a child process, asked one thing at a time over its pipes."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from saltern.bench.peers.catalogue import Peer, interpreter
from saltern.errors import UnavailableError

START_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0


class PeerError(UnavailableError):
    """A peer did not do what it was asked to, for the reason it gives."""

    default_reason = "PEER_FAILED"


class PeerProcess:
    """A running peer; a context manager, which stops it and its servers.

    Args:
        log_path: where everything goes that the peer prints.
        batch_bytes: of each batch that it will be asked to move.

    Attributes:
        version: the store's and its client's name and version.
        ways: by size of a block in bytes, the names of the fastest ``put`` and ``get``.

    Raises:
        PeerError: it did not start.
    """

    def __init__(self, peer: Peer, folder: Path, log_path: Path, batch_bytes: int) -> None:
        self.peer = peer
        self.ways: dict[int, dict[str, str]] = {}
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the driver that ships beside this module
                [str(interpreter(peer, folder)), "-P", "-m", "drivers", peer.name, str(batch_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Only the drivers' own package is on the path: Saltern is not installed there and is not to be.
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            )
        try:
            self.version: str = self._answer(START_TIMEOUT_S)["version"]
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Have the driver do something and return what it says; raises PeerError if it cannot."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise PeerError(f"the driver of {self.peer.name} is gone") from None
        return self._answer(ANSWER_TIMEOUT_S)

    def prepare(self, block_bytes: int) -> None:
        """Have the driver choose its fastest ways for blocks of this size, once; ``ways`` tells them."""
        if block_bytes not in self.ways:
            self.ways[block_bytes] = self.ask("prepare", block_bytes=block_bytes)

    def close(self) -> None:
        """Stop the driver, which stops its servers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends its servers with it
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # Answers are single short lines, one for each request: nothing of them waits in our buffer when we select.
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            self._process.kill()
            raise PeerError(f"{self.peer.name} did not answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the driver of {self.peer.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer
