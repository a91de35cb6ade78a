"""The files that a run loads, packed for the guest's memory.

In the guest every open of a file of this machine is several messages to QEMU and back, and Python opens some thousand
files before the first test begins: that took longer than the tests. So what they load is found out here, by collecting
them, and goes along with the initramfs, as the topmost of the read-only layers that the guest's root is made of.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.rdma.vm.image import Cpio

#: Where it lies in the guest's first root.
FOLDER: Final = "preloaded"
#: Loaded when a test first needs them.
_LATER: Final = (
    "multiprocessing.popen_fork",
    "saltern.rdma.bindings.ibverbs_binding",
    "saltern.rdma.bindings.pyverbs_binding",
    "saltern.transport.rdma",
    "saltern.transport.shm",
)
#: Run by the tests.
_PROGRAMS: Final = ("rdma", "ib_read_bw", "ib_write_bw")
_TIMEOUT_S: Final = 120
_MARK: Final = "preload: "


def pack(pytest: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bytes:
    """An uncompressed archive of what ``pytest`` (its whole command line) loads; empty if that cannot be found out.

    Args:
        folder: to run it in.
        environment: to run it with.
    """
    command = [*pytest, "-p", __name__, "--collect-only", "-qq"]
    # Compiled here and kept beside the source, as ever: under emulation it takes ten times as long, at every run.
    compiling = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, cwd=folder, env=compiling, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    marked = [line[len(_MARK) :] for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        print(f"test-rdma: not preloaded: {done.stdout[-500:]}{done.stderr[-500:]}", file=sys.stderr)
        return b""
    archive = Cpio()
    programs = [found for name in _PROGRAMS if (found := shutil.which(name, path=environment["PATH"]))]
    for path in map(Path, marked + [str(Path(program).resolve()) for program in programs]):
        archive.add_copy(f"{FOLDER}{path}", path)
    return archive.finish()


def pytest_collection_finish(session: Any) -> None:
    """As a plugin of pytest: tell what was loaded."""
    for name in _LATER:
        with suppress(Exception):  # a library that this machine lacks will be told of by the tests
            importlib.import_module(name)
    for path in sorted(loaded_files()):
        print(f"{_MARK}{path}")


def loaded_files() -> set[Path]:
    """Real paths of the modules of this process, compiled and in source, and of what is mapped into it."""
    found: set[str] = set()
    for module in list(sys.modules.values()):
        found |= {str(path) for name in ("__file__", "__cached__") if (path := getattr(module, name, None))}
        if cached := getattr(module, "__cached__", None):
            plain = Path(cached)
            found |= set(map(str, plain.parent.glob(f"{plain.stem}-pytest-*.pyc")))  # a test, as pytest compiles it
    found |= set(_mapped(Path("/proc/self/maps").read_text().splitlines()))
    return {Path(path).resolve() for path in found if Path(path).is_file()}


def _mapped(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith("/"):
            yield parts[5]
