"""Debian packages, downloaded once and unpacked here; nothing of the machine is changed unless asked for."""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Final

#: What the machine itself must have: the emulator, and what the guest uses of the machine's own root.
HOST_PACKAGES: Final = ("qemu-system-x86", "libibverbs1", "ibverbs-providers", "iproute2")
KERNEL: Final = "linux-image-amd64"
BUSYBOX: Final = "busybox-static"
PYVERBS: Final = "python3-pyverbs"
_APT_TIMEOUT_S: Final = 300
#: What the bench of the RDMA transport is held against, and the libraries that it needs.
PERFTEST: Final = ("perftest", "libibumad3", "libpci3", "librdmacm1")


class MissingError(Exception):
    """This machine cannot run the suite; the text says what it lacks."""


def missing_tools() -> list[str]:
    """What this machine lacks, in words."""
    found = [
        f"{tool} ({package})"
        for tool, package in (
            ("apt-get", "a Debian or Ubuntu system"),
            ("dpkg-deb", "a Debian or Ubuntu system"),
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("rdma", "iproute2"),
        )
        if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    if not list(Path("/etc/libibverbs.d").glob("rxe.driver")):
        found.append("libibverbs with its rxe provider (libibverbs1, ibverbs-providers)")
    if os.geteuid() != 0:
        found.append("root: the guest reads this machine's root through QEMU, as this user")
    return found


def install_host_packages(log: Path) -> None:
    """apt-get install what is missing. Needs root."""
    with log.open("ab") as output:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-q", "-y", "--no-install-recommends", *HOST_PACKAGES],
        ):
            _apt_get(command, f"see {log}", stdout=output, stderr=output, env=environment)


def download(package: str, folder: Path) -> Path:
    """The package's file in ``folder``, downloaded if it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
        _apt_get(command, "try apt-get update", cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        found = sorted(folder.glob(f"{package}_*.deb"))
    if not found:
        raise MissingError(f"apt-get download {package} brought nothing")
    return found[-1]


def _apt_get(command: list[str], hint: str, **options: Any) -> None:
    """Run it; whatever comes of a network that is slow or not there is said, and holds nobody up for long."""
    try:
        subprocess.run(command, check=True, timeout=_APT_TIMEOUT_S, **options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise MissingError(f"{' '.join(command)} failed ({hint}): {error}") from error


def kernel_package() -> str:
    """Name of the package that the kernel's own stands for: with its version, ``linux-image-6.1.0-57-amd64``."""
    listing = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        if "Depends: linux-image-" in line:
            return line.split()[-1]
    raise MissingError(f"apt-cache knows no {KERNEL}: run apt-get update")


def read_files(package: Path, wanted: Callable[[PurePosixPath], bool]) -> dict[PurePosixPath, bytes]:
    """Contents of those regular files of a package that ``wanted`` says yes to; ``.xz`` is taken off."""
    contents = {}
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if member.isfile() and wanted(path):
                    file = archive.extractfile(member)
                    data = file.read() if file else b""
                    packed = path.suffix == ".xz"
                    contents[path.with_suffix("") if packed else path] = lzma.decompress(data) if packed else data
    return contents


def unpack_pyverbs(package: Path, folder: Path) -> None:
    """``folder/pyverbs``: the Python package alone, for PYTHONPATH."""
    root = PurePosixPath("usr/lib/python3/dist-packages")
    for path, data in read_files(package, lambda path: path.is_relative_to(root / "pyverbs")).items():
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def unpack_whole(packages: Iterable[Path], folder: Path) -> None:
    """The files of packages below ``folder``, as they would lie below ``/``."""
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
