"""The guest's kernel and its initramfs, made of two Debian packages.

The kernel is Debian's usual one: its cloud kernels lack Soft-RoCE (``rdma_rxe``) and 9p. It is booted unpacked, because
unpacking it under emulation takes longer than all the rest of the boot.
"""

from __future__ import annotations

import gzip
import lzma
import re
import struct
from pathlib import Path, PurePosixPath
from typing import Final

from tests.rdma.vm.packages import read_files

#: Loaded in this order, each after what it depends on; what is built into a kernel is not among its files.
MODULES: Final = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32c_generic",
    "crc32_generic",
    "dummy",
    "ib_uverbs",
    "rdma_rxe",
    "vgem",
)
#: Folders that these and their dependencies are in; reading every module would take seconds.
_FOLDERS: Final = (
    "infiniband",
    "9p",
    "crypto",
    "virtio",
    "fs",
    "lib",
    "netfs",
    "fscache",
    "ipv4",
    "ipv6",
    "net",
    "core",
)


#: Those whose own modules alone are looked at: below them are the drivers of every graphics card.
_FLAT_FOLDERS: Final = ("drm", "vgem")


def build(kernel: Path, busybox: Path, init: Path, folder: Path) -> None:
    """Write ``folder/vmlinux`` and ``folder/initramfs``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = read_files(kernel, _is_wanted)
    image = next(data for path, data in files.items() if path.name.startswith("vmlinuz-"))
    modules = {_name(path): data for path, data in files.items() if path.suffix == ".ko"}
    shell = next(iter(read_files(busybox, lambda path: path.name == "busybox").values()))

    archive = Cpio()
    for name in ("dev", "proc", "sys", "host", "preloaded", "changes", "machine", "modules"):
        archive.add_folder(name)
    archive.add_console()
    archive.add_file("bin/busybox", shell, executable=True)
    archive.add_file("init", init.read_bytes(), executable=True)
    for number, name in enumerate(load_order(modules, MODULES)):
        archive.add_file(f"modules/{number:02}-{name}.ko", modules[name])
    (folder / "initramfs").write_bytes(gzip.compress(archive.finish(), 1))
    (folder / "vmlinux").write_bytes(unpack_kernel(image))


def load_order(modules: dict[str, bytes], wanted: tuple[str, ...]) -> list[str]:
    """Names of ``wanted`` and of all that they depend on, dependencies first."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in modules and name not in order:
            for dependency in _dependencies(modules[name]):
                visit(dependency)
            order[name] = None

    for name in wanted:
        visit(name)
    return list(order)


def unpack_kernel(image: bytes) -> bytes:
    """The ELF file inside a bzImage (Documentation/arch/x86/boot.rst); the image itself if it is not xz inside."""
    setup_sectors = image[0x1F1] or 4
    payload_offset, payload_bytes = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + payload_offset
    payload = image[start : start + payload_bytes]
    return lzma.LZMADecompressor().decompress(payload) if payload.startswith(b"\xfd7zXZ\0") else image


class Cpio:
    """An archive in the ``newc`` format, as the kernel unpacks it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0
        self._folders: set[str] = set()

    def add_folder(self, name: str) -> None:
        if name not in self._folders:
            self._folders.add(name)
            self._add(name, 0o040755)

    def add_file(self, name: str, data: bytes, *, executable: bool = False, modified_s: int = 0) -> None:
        for folder in reversed(PurePosixPath(name).parents[:-1]):
            self.add_folder(str(folder))
        self._add(name, 0o100755 if executable else 0o100644, data, modified_s=modified_s)

    def add_copy(self, name: str, path: Path) -> None:
        """A file of this machine with its time, which Python compares with what it has compiled."""
        facts = path.stat()
        self.add_file(name, path.read_bytes(), executable=bool(facts.st_mode & 0o100), modified_s=int(facts.st_mtime))

    def add_console(self) -> None:
        """``/dev/console``: without it the first process has no output."""
        self._add("dev/console", 0o020600, device=(5, 1))

    def finish(self) -> bytes:
        self._add("TRAILER!!!", 0)
        return b"".join(self._parts)

    def _add(
        self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0), modified_s: int = 0
    ) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, modified_s, len(data), 0, 0, *device, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        self._parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]


def _is_wanted(path: PurePosixPath) -> bool:
    if path.name.startswith("vmlinuz-"):
        return True
    return ".ko" in path.suffixes and (
        path.parent.name in _FLAT_FOLDERS or any(part in _FOLDERS for part in path.parts)
    )


def _name(path: PurePosixPath) -> str:
    return path.stem.replace("-", "_")


def _dependencies(module: bytes) -> list[str]:
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []
