"""Containers of built images by an OCI runtime (crun), set up as an engine does for a service of compose.yaml.

Files, user, environment, entry point and health check are the image's own; root folder read-only, no capability, no new
privileges, the system calls of an engine's default profile, masked paths of ``/proc``, a volume where the
image declares one, a network of its own. What an engine would add: limits of memory and CPU (no cgroup is made).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.docker.compose import Mount
from tests.docker.container import Container, Wishes
from tests.support.network import Host

#: The list of podman and its like, which Debian's buildah brings along.
SECCOMP = Path("/usr/share/containers/seccomp.json")
#: Docker's and containerd's lists let nobody without CAP_SYS_NICE choose where memory lies; that one does.
_REFUSED_BY_DOCKER = {"get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"}
_NAMESPACES = ("pid", "ipc", "uts", "mount")
_STARTED_S = 30.0
_MASKED = ("acpi", "asound", "kcore", "keys", "latency_stats", "timer_list", "timer_stats", "sched_debug", "scsi")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")


@dataclass(frozen=True)
class BuiltImage:
    """An image that was built, its files in a folder.

    Attributes:
        config: of the image, with the field names of Docker's format.
    """

    root: Path
    config: Mapping[str, Any]

    @property
    def healthcheck(self) -> list[str]:
        return list(self.config.get("Healthcheck", {}).get("Test", ())[1:])

    @property
    def environment(self) -> dict[str, str]:
        """What the image sets; and HOME, which engines take from the image's passwd for a user by number."""
        uid = self.config["User"].partition(":")[0]
        accounts = (line.split(":") for line in (self.root / "etc" / "passwd").read_text().splitlines())
        home = next((account[5] for account in accounts if account[2] == uid), "/")
        return {"HOME": home, **dict(pair.split("=", 1) for pair in self.config["Env"])}


def save_images(folder: Path, images: Mapping[str, BuiltImage]) -> None:
    """Write down which images there are, for :class:`Crun`."""
    content = {name: {"root": str(image.root), "config": image.config} for name, image in images.items()}
    (folder / "images.json").write_text(json.dumps(content))


class _CrunContainer(Container):
    """A container that crun looks after."""

    def __init__(self, bundle: Path, wishes: Wishes, process: subprocess.Popen[bytes], pid: int) -> None:
        super().__init__(wishes.name, process, pid, {})
        self._bundle = bundle
        self._own = json.loads((bundle / "config.json").read_text())["process"]

    def exec(self, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        # User, environment, folder, capabilities and system calls as its first process has them, as engines do it.
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self._bundle) as process:
            process.write(json.dumps({**self._own, "args": list(words)}))
            process.flush()
            command = [*crun(self._bundle), "exec", f"--process={process.name}", self._bundle.name]
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def kill(self) -> None:
        subprocess.run([*crun(self._bundle), "delete", "--force", self._bundle.name], capture_output=True, check=False)
        super().kill()


class Crun:
    """Starts containers of the images that :func:`save_images` wrote into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        saved = json.loads((folder / "images.json").read_text())
        self._images = {name: BuiltImage(Path(image["root"]), image["config"]) for name, image in saved.items()}

    def healthcheck(self, target: str) -> Sequence[str]:
        return self._images[target].healthcheck

    def start(self, target: str, wishes: Wishes, host: Host, log: IO[bytes]) -> Container:
        bundle = Path(tempfile.mkdtemp(prefix=f"{wishes.name}-", dir=self._folder))
        (bundle / "config.json").write_text(json.dumps(runtime_config(self._images[target], wishes)))
        pid_file = bundle / "pid"
        run = [*crun(bundle), "run", f"--bundle={bundle}", f"--pid-file={pid_file}", bundle.name]
        process = subprocess.Popen(
            host.command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=host.descriptors
        )
        deadline_s = time.monotonic() + _STARTED_S
        said = ""
        while not said and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.005)
            with contextlib.suppress(FileNotFoundError):
                said = pid_file.read_text()
        if not said:
            process.kill()
            process.wait()
            raise AssertionError(f"{wishes.name} did not start; see its log")
        return _CrunContainer(bundle, wishes, process, int(said))


def crun(bundle: Path) -> list[str]:
    """The runtime, with its state beside the bundles."""
    return ["crun", f"--root={bundle.parent / 'state'}", "--cgroup-manager=disabled"]


def runtime_config(image: BuiltImage, wishes: Wishes) -> dict[str, Any]:
    """``config.json`` of the OCI runtime specification 1.0 for a container of an image.

    There is no network namespace in it: the container has the one that crun is started in.
    """
    config = image.config
    uid, gid = (int(number) for number in config["User"].split(":"))
    environment = {**image.environment, "HOSTNAME": wishes.hostname or wishes.name, **wishes.environment}
    bound = {mount.target for _, mount in wishes.binds}
    volumes = [path for path in config.get("Volumes") or {} if path not in bound]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": gid},
            "args": wishes.words(config["Entrypoint"] or (), config["Cmd"] or ()),
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": config["WorkingDir"],
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "hostname": wishes.hostname or wishes.name,
        "mounts": [
            *_KERNEL_MOUNTS,
            *(_volume(image.root, path) for path in volumes),
            *(_tmpfs(text) for text in wishes.tmpfs),
            *(_bind(path, mount) for path, mount in wishes.binds),
            # Engines bring a container's names along; here they are those of the network of the test.
            _bind("/etc/hosts", Mount("", "/etc/hosts", is_read_only=True)),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "maskedPaths": [f"/proc/{name}" for name in _MASKED] + ["/sys/firmware"],
            "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
            "seccomp": seccomp(json.loads(SECCOMP.read_text())),
        },
    }


def seccomp(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A profile in the engines' format as a runtime takes it, for a container without a capability on this machine.

    Raises:
        LookupError: the profile does not know this machine's architecture.
    """
    kernel_name = os.uname().machine
    ours = {"x86_64": "amd64", "aarch64": "arm64"}[kernel_name]

    def applies(rule: Mapping[str, Any]) -> bool:
        includes, excludes = rule["includes"], rule["excludes"]
        if "caps" in includes or ours in excludes.get("arches", ()):
            return False
        return "arches" not in includes or ours in includes["arches"]

    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [
            name
            for entry in profile["archMap"]
            if entry["architecture"] == f"SCMP_ARCH_{kernel_name.upper()}"
            for name in (entry["architecture"], *entry["subArchitectures"])
        ],
        "syscalls": [
            {key: rule[key] for key in ("action", "args", "errnoRet") if rule.get(key) is not None}
            | {"names": [name for name in rule["names"] if name not in _REFUSED_BY_DOCKER]}
            for rule in profile["syscalls"]
            if applies(rule)
        ],
    }


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


_KERNEL_MOUNTS = (
    _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
    _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
    _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
    _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=65536k"),
    _mount("/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
    _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
)


def _volume(root: Path, path: str) -> dict[str, Any]:
    """A volume of its own that the service did not name: new, with the owner and mode that the image has there."""
    status = root.joinpath(path.strip("/")).stat()
    owner = (f"uid={status.st_uid}", f"gid={status.st_gid}", f"mode={status.st_mode & 0o7777:o}")
    return _mount(path, "tmpfs", "nosuid", "nodev", *owner)


def _tmpfs(text: str) -> dict[str, Any]:
    path, _, options = text.partition(":")
    return _mount(path, "tmpfs", "nosuid", "nodev", "noexec", *filter(None, options.split(",")))


def _bind(path: str, mount: Mount) -> dict[str, Any]:
    options = ["rbind", "ro" if mount.is_read_only else "rw"]
    return {"destination": mount.target, "type": "bind", "source": path, "options": options}
