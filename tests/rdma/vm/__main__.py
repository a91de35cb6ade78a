"""``make test-rdma``: boot a Linux with Soft-RoCE under QEMU and run ``tests/rdma`` inside it.

What is downloaded and built stays under ``build/rdma``. Where the machine lacks something the run is skipped, with a
clear word and status 0; with ``--required`` that is a failure. Arguments after ``--`` go to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.rdma.vm import image
from tests.rdma.vm.machine import Machine
from tests.rdma.vm.packages import (
    BUSYBOX,
    PYVERBS,
    MissingError,
    download,
    install_host_packages,
    kernel_package,
    missing_tools,
    unpack_pyverbs,
)

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parents[2]
BUILD: Final = REPOSITORY / "build" / "rdma"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.vm", description=__doc__)
    parser.add_argument("--install", action="store_true", help="apt-get install what this machine lacks (root)")
    parser.add_argument("--required", action="store_true", help="fail instead of skipping")
    parser.add_argument("--limit-s", type=float, default=600, help="time for the guest (default: %(default)s)")
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
    command = options.command or _pytest(options.pytest or ["tests/rdma"])
    machine = Machine(prepared, memory_mib=options.memory_mib, accelerator=options.accelerator)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="job-", dir=BUILD) as job:  # of its own: two runs may overlap
            status = machine.run(_in_repository(command), Path(job), options.limit_s)
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
    init, bindings = HERE / "init.sh", BUILD / "python"
    recipe = hashlib.sha256(init.read_bytes() + (HERE / "image.py").read_bytes()).hexdigest()[:12]
    for folder in BUILD.glob(f"image-*-{recipe}"):
        if bindings.exists():
            return folder  # the kernel of then: remove build/rdma for the one of today

    packages = BUILD / "packages"
    kernel, busybox = download(kernel_package(), packages), download(BUSYBOX, packages)
    if not bindings.exists():
        unpacked = BUILD / "fresh-python"
        unpack_pyverbs(download(PYVERBS, packages), unpacked)
        unpacked.rename(bindings)
    downloaded_s = time.monotonic()
    for outdated in BUILD.glob("image-*"):
        shutil.rmtree(outdated)
    fresh, folder = BUILD / "fresh-image", BUILD / f"image-{kernel.stem}-{recipe}"
    image.build(kernel, busybox, init, fresh)
    fresh.rename(folder)
    now_s = time.monotonic()
    print(f"test-rdma: packages {downloaded_s - started_s:.1f} s, image {now_s - downloaded_s:.1f} s", flush=True)
    return folder


def _pytest(arguments: list[str]) -> str:
    # The guest's disk is slow and its Python starts slowly: nothing is loaded that these tests do not use.
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--confcutdir=tests/rdma", "--durations=8"]
    return shlex.join([sys.executable, "-m", "pytest", *options, *arguments])


def _in_repository(command: str) -> str:
    return f"cd {shlex.quote(str(REPOSITORY))}\nexport PYTHONPATH={shlex.quote(str(BUILD / 'python'))}\n{command}\n"


if __name__ == "__main__":
    sys.exit(main())
