"""Makes the peers' virtual environments: ``python -m saltern.bench.peers.install FOLDER [NAME ...]``.

One that cannot be installed is named with the reason, and the others go on.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from saltern.bench.peers.catalogue import PEERS, Peer, interpreter, missing

_MARK = ".installed"


def install(peer: Peer, folder: Path) -> str:
    """Make the environment of a peer, once; returns why that failed, or nothing."""
    mark = folder / peer.environment / _MARK
    if not mark.exists():
        venv.create(folder / peer.environment, with_pip=True, clear=False)
        for step in peer.packages:
            command = [str(interpreter(peer, folder)), "-m", "pip", "install", "--quiet", *step]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - packages of ours
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                return (errors or done.stderr.splitlines() or ["pip failed"])[-1]
        mark.touch()
    return missing(peer, folder)


def main(folder: Path, names: list[str]) -> int:
    """Install the named peers, or all; returns how many could not be."""
    failed = 0
    for name in names or PEERS:
        reason = install(PEERS[name], folder)
        failed += bool(reason)
        sys.stdout.write(f"{name}: {reason or 'installed'}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
