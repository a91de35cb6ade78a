"""A real cache node in a process of its own, to be frozen, killed and started again.

Run as a script it serves until its standard input ends, after one line of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
START_S = 60.0
_SHOWN_BYTES = 8 * 1024


class NodeProcess:
    """A running node; ``token`` is a writer's, of the tenant acme and its namespace chat."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        ready = json.loads(line)
        self._process = process
        self.wire_endpoint: str = ready["wire_endpoint"]
        self.shm_path: str = ready["shm_path"]
        self.token: str = ready["token"]
        self.dram_start: str = ready["dram_start"]

    def freeze(self) -> None:
        """Stop every thread of the node; returns once it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


@contextmanager
def node_process(
    *,
    dram_bytes: int = 64 * MIB,
    limit_bytes: int | None = None,
    arena_dir: Path | None = None,
    node_id: str = "node-1",
    port: int = 0,
    signing_key: Ed25519PrivateKey | None = None,
) -> Iterator[NodeProcess]:
    """Run a node until the end of the block, which it leaves by a clean stop; ``arena_dir`` keeps DRAM over that.

    ``signing_key`` is that of other nodes too, where one token is to be good at several; ``port`` of the wire protocol.

    An exception that leaves the block tells in a note how the node fares and what it said last.
    """
    key = "" if signing_key is None else signing_key.private_bytes_raw().hex()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        *(sys.executable, __file__, str(dram_bytes), str(limit_bytes or dram_bytes), str(arena_dir or "")),
        *(node_id, str(port), key),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="saltern-test-") as folder,  # a node that is killed cleans up nothing
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            env=environment | {"TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None and process.stdin is not None
        try:
            yield NodeProcess(process, _first_line(process.stdout))
        except BaseException as error:
            error.add_note(f"the node's exit status: {process.poll()}; it said last:\n{_tail(log)}")
            raise
        finally:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _first_line(output: IO[str]) -> str:
    """What a node says once it serves; empty if it ends first. Fails if it says nothing in time: a start may hang."""
    readable, _, _ = select.select([output], [], [], START_S)
    assert readable, f"the node does not serve after {START_S:g} s"
    return output.readline()


def _tail(log: IO[bytes]) -> str:
    size_bytes = os.fstat(log.fileno()).st_size
    start = max(0, size_bytes - _SHOWN_BYTES)
    return os.pread(log.fileno(), size_bytes - start, start).decode(errors="replace")


def main() -> None:
    import structlog

    from dataplane.settings import ArenaSettings
    from tests.support.static_node import static_node, tenant_policy

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    dram_bytes, limit_bytes = int(sys.argv[1]), int(sys.argv[2])
    folder = Path(sys.argv[3]) if sys.argv[3] else None
    tenants = {"acme": tenant_policy(limit_bytes=limit_bytes)}
    node_id, port, key = sys.argv[4], int(sys.argv[5]), sys.argv[6]
    signing_key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key)) if key else None
    arena = ArenaSettings(folder, folder)
    with static_node(
        tenants, dram_bytes=dram_bytes, arena=arena, node_id=node_id, port=port, signing_key=signing_key
    ) as node:
        ready = {
            "dram_start": node.call(lambda: str(node._node.dram_start)),
            "wire_endpoint": node.wire_endpoint,
            "shm_path": str(node.shm_path),
            "token": node.token("acme", "chat"),
        }
        print(json.dumps(ready), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
