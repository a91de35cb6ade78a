"""One run of the guest: boots, does one command, ends."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Beyond its time limit the emulator is asked to end, then killed.
_GRACE_S: Final = 5


@dataclass(frozen=True)
class Machine:
    """What the guest is made of.

    Attributes:
        image: folder of ``vmlinux`` and ``initramfs``.
        accelerator: ``tcg`` emulates and works everywhere; ``kvm`` where the machine lets it.
    """

    image: Path
    memory_mib: int = 2048
    processors: int = 2
    accelerator: str = "tcg"

    def run(self, command: str, job: Path, limit_s: float, *, preloaded: bytes = b"") -> int:
        """Run ``command`` (bash) in the guest and return its status. Its output goes to this process's.

        The guest sees this machine's root read-only, and ``job`` as ``/job``, writable.

        Args:
            preloaded: an archive that is unpacked after the initramfs.

        Raises:
            TimeoutError: it was not done after ``limit_s``.
            RuntimeError: the guest ended without a result.
        """
        job.mkdir(parents=True, exist_ok=True)
        (job / "command").write_text(command)
        packed = (self.image / "initramfs").read_bytes()
        (job / "initramfs").write_bytes(packed + bytes(-len(packed) % 4) + preloaded)
        status = job / "status"
        status.unlink(missing_ok=True)
        process = subprocess.Popen(self._arguments(job), stdin=subprocess.DEVNULL)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the guest was not done after {limit_s:g} s") from error
        finally:
            _end(process)
        if not status.exists():
            raise RuntimeError(f"the guest ended without a result (QEMU's status is {process.returncode})")
        return int(status.read_text())

    def _arguments(self, job: Path) -> list[str]:
        accelerator = "tcg,thread=multi,tb-size=512" if self.accelerator == "tcg" else self.accelerator
        # mitigations and random addresses cost time under emulation and protect nothing here. A busy machine emulates
        # too slowly for the kernel's test of its timer, which would end the boot.
        append = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check random.trust_cpu=on"
        return [
            "qemu-system-x86_64",
            *("-machine", "q35", "-accel", accelerator, "-cpu", "max"),
            *("-smp", str(self.processors), "-m", f"{self.memory_mib}M"),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
            *("-kernel", str(self.image / "vmlinux"), "-initrd", str(job / "initramfs"), "-append", append),
            *("-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={job},mount_tag=job,security_model=none"),
        ]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
