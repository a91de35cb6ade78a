"""``make test-rdma``: boot a Linux with Soft-RoCE under QEMU and run ``tests/rdma`` inside it.

What is downloaded and built stays under ``build/rdma``. Where the machine lacks something the run is skipped, with a
clear word and status 0; with ``--required`` that is a failure. ``--quick`` leaves out repetitions (the second binding,
large sizes), ``--full`` counts leaks over 10,000 operations. Arguments after ``--`` go to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.rdma.vm import image, preload
from tests.rdma.vm.machine import Machine
from tests.rdma.vm.packages import (
    BUSYBOX,
    PERFTEST,
    PYVERBS,
    MissingError,
    download,
    install_host_packages,
    kernel_package,
    missing_tools,
    unpack_pyverbs,
    unpack_whole,
)

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parents[2]
BUILD: Final = REPOSITORY / "build" / "rdma"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.vm", description=__doc__)
    parser.add_argument("--install", action="store_true", help="apt-get install what this machine lacks (root)")
    parser.add_argument("--required", action="store_true", help="fail instead of skipping")
    extent = parser.add_mutually_exclusive_group()
    for name in ("quick", "full"):
        extent.add_argument(f"--{name}", dest="extent", action="store_const", const=name, default="usual")
    parser.add_argument("--limit-s", type=float, default=1800, help="time for the guest (default: %(default)s)")
    parser.add_argument("--memory-mib", type=int, default=2048)
    parser.add_argument("--accelerator", choices=("tcg", "kvm"), default="tcg")
    parser.add_argument("--command", help="run this bash command in the repository instead of the tests")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest (default: tests/rdma)")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        prepared = _prepare(install=options.install)
    except MissingError as error:
        print(f"test-rdma: SKIPPED: {error}", file=sys.stderr)
        return 1 if options.required else 0
    environment = _environment(options.extent)
    command = _pytest(options.pytest or ["tests/rdma"], timeout_s=options.limit_s if options.extent == "full" else 300)
    began_s = time.monotonic()
    preloaded = preload.pack(command, REPOSITORY, {**os.environ, **environment})
    print(f"test-rdma: {len(preloaded) >> 20} MiB preloaded, {time.monotonic() - began_s:.1f} s", flush=True)
    machine = Machine(prepared, memory_mib=options.memory_mib, accelerator=options.accelerator)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="job-", dir=BUILD) as job:  # of its own: two runs may overlap
            line = options.command or shlex.join(command)
            status = machine.run(_in_repository(line, environment), Path(job), options.limit_s, preloaded=preloaded)
    except (TimeoutError, RuntimeError) as error:
        print(f"test-rdma: FAILED: {error}", file=sys.stderr)
        return 1
    took_s, used = time.monotonic() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = f"{took_s:.0f} s in the guest, {used.ru_utime + used.ru_stime:.0f} s of processor"
    print(f"test-rdma: {'FAILED' if status else 'passed'} in {cost}")
    return status


def _prepare(*, install: bool) -> Path:
    """Folder of the guest's image; downloads and builds what is not there yet."""
    started_s = time.monotonic()
    if missing_tools() and install:
        install_host_packages(BUILD / "apt.log")
    if lacks := missing_tools():
        raise MissingError(f"this machine lacks {'; '.join(lacks)} (--install installs what apt-get has)")
    init, bindings, perftest = HERE / "init.sh", BUILD / "python", BUILD / "perftest"
    recipe = hashlib.sha256(init.read_bytes() + (HERE / "image.py").read_bytes()).hexdigest()[:12]
    for folder in BUILD.glob(f"image-*-{recipe}"):
        if bindings.exists() and perftest.exists():
            return folder  # the kernel of then: remove build/rdma for the one of today

    packages = BUILD / "packages"
    kernel, busybox = download(kernel_package(), packages), download(BUSYBOX, packages)
    if not bindings.exists():
        unpacked = BUILD / "fresh-python"
        unpack_pyverbs(download(PYVERBS, packages), unpacked)
        unpacked.rename(bindings)
    if not perftest.exists():
        unpacked = BUILD / "fresh-perftest"
        unpack_whole([download(package, packages) for package in PERFTEST], unpacked)
        unpacked.rename(perftest)
    downloaded_s = time.monotonic()
    for outdated in BUILD.glob("image-*"):
        shutil.rmtree(outdated)
    fresh, folder = BUILD / "fresh-image", BUILD / f"image-{kernel.stem}-{recipe}"
    image.build(kernel, busybox, init, fresh)
    fresh.rename(folder)
    now_s = time.monotonic()
    print(f"test-rdma: packages {downloaded_s - started_s:.1f} s, image {now_s - downloaded_s:.1f} s", flush=True)
    return folder


def _environment(extent: str) -> dict[str, str]:
    """What the tests need, here and in the guest."""
    libraries = ":".join(map(str, (BUILD / "perftest" / "usr" / "lib").glob("*-linux-gnu")))
    return {
        "LD_LIBRARY_PATH": libraries,
        "PATH": f"{BUILD}/perftest/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(BUILD / "python"),
        "SALTERN_RDMA_EXTENT": extent,
        "SALTERN_RDMA_VM": "1",
    }


def _pytest(arguments: list[str], timeout_s: float) -> list[str]:
    # The guest's Python starts slowly: nothing is loaded that these tests do not use.
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist", "--confcutdir=tests/rdma"]
    options += ["-o", "addopts=--import-mode=importlib --strict-markers --strict-config -ra -q"]  # one process alone
    return [sys.executable, "-m", "pytest", *options, f"--timeout={timeout_s:g}", "--durations=8", *arguments]


def _in_repository(command: str, environment: dict[str, str]) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    return f"cd {shlex.quote(str(REPOSITORY))}\n{exports}{command}\n"


if __name__ == "__main__":
    sys.exit(main())
