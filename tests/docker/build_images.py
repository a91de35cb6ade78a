"""``python -m tests.docker.build_images``: build the Dockerfile's targets, look into the images, run them in compose.

buildah builds from a base that is made here: Debian 12 (mmdebstrap) with Debian's Python 3.11 at the place where the
Dockerfile's ``python:3.11.14-slim-bookworm`` has its own, because no registry of images is asked. Everything else is
as an engine does it; the ``vllm`` target, whose base is vLLM's image, is left out. As root on Debian.

All of it happens in namespaces of its own for mounts and processes: whatever ends this program, the kernel ends what it
started and takes its mounts away. How pip gets to its index is what this machine's pip is told; no image has it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.docker.dockerfile import DOCKERFILE, ROOT, stages
from tests.docker.image_contents import look_at_processes, look_into
from tests.docker.runtime import BuiltImage, Crun, save_images
from tests.support.network import can_make_namespaces

TARGETS = ("node", "control", "cli", "node-rdma")
BASE = "localhost/python-of-debian"
PACKAGES = ("buildah", "crun", "mmdebstrap")
#: Where and how pip finds packages; what else this machine's configuration says is its own business.
_PIP = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout", "default-timeout")
_BASE_FILE = """
FROM scratch
ADD base.tar /
RUN ln -s /usr/bin/python3.11 /usr/local/bin/python && ln -s python /usr/local/bin/python3
"""


class Builder:
    """buildah with a storage of its own.

    Args:
        folder: for storage, base and build context; may be removed once this program's mounts are gone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = "overlay" if _overlay_works(folder) else "vfs"
        store = [f"--root={folder / 'store'}", f"--runroot={folder / 'run'}", f"--storage-driver={self.driver}"]
        self._buildah = ["buildah", *store]
        # Other programs may write in this checkout; each target is to be made of the same files.
        self._context = _copy_of_checkout(folder / "context")
        self._home = _home_for_pip(folder / "home")
        temporary = folder / "tmp"
        temporary.mkdir()
        temporary.chmod(0o1777)
        self._environment = os.environ | {"TMPDIR": str(temporary)}

    def run(self, *words: str) -> str:
        """What buildah prints.

        Raises:
            AssertionError: it failed; with the last that it said.
        """
        return self._run([*self._buildah, *words], f"buildah {words[0]}")

    def _run(self, command: Sequence[str], what: str) -> str:
        result = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{what} failed: {result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result.stdout.strip()

    def build_base(self) -> None:
        """The image that stands in for Python's own."""
        here = self.folder / "base"
        here.mkdir()
        include = "--include=python3.11,python3.11-venv,ca-certificates"
        bootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(here / "base.tar")]
        self._run(bootstrap, "making a Debian to begin with")
        (here / "Dockerfile").write_text(_BASE_FILE)
        self.run("build", "--isolation=chroot", "--quiet", f"--tag={BASE}", str(here))
        (here / "base.tar").unlink()

    def build(self, target: str) -> BuiltImage:
        """Build a target of the Dockerfile and lay its files out."""
        name = f"localhost/saltern-{target}"
        self.run(
            "build",
            "--isolation=chroot",
            "--network=host",
            "--layers",  # one install for all that run the server
            "--format=docker",  # the only one with a health check
            "--pull=never",
            f"--build-arg=PYTHON_IMAGE={BASE}",
            f"--volume={self._home}:/root:ro",  # over a folder that is there, so that no layer has a trace of it
            f"--file={DOCKERFILE}",
            f"--ignorefile={DOCKERFILE}.dockerignore",
            f"--target={target}",
            f"--tag={name}",
            str(self._context),
        )
        container = self.run("from", "--pull-never", name)
        config: dict[str, Any] = json.loads(self.run("inspect", "--type=image", name))["Docker"]["config"]
        return BuiltImage(Path(self.run("mount", container)), config)

    def base_root(self) -> Path:
        """The files of the base."""
        return Path(self.run("mount", self.run("from", "--pull-never", BASE)))


def _overlay_works(folder: Path) -> bool:
    """Whether layers need not be copied; not where the folder itself is a layer of a container."""
    probe = folder / "probe"
    command = ["buildah", f"--root={probe}", f"--runroot={probe}-run", "--storage-driver=overlay", "images"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _copy_of_checkout(folder: Path) -> Path:
    """What git has or would take, as it is now."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _home_for_pip(folder: Path) -> Path:
    """A home folder whose pip finds its index as this machine's does."""
    (folder / ".config" / "pip").mkdir(parents=True)
    listing = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    settings = {}
    for name, value in re.findall(r"^[\w:]+\.([\w-]+)=(.*)$", said, flags=re.MULTILINE):  # the last one counts
        words = [word for word in str(ast.literal_eval(value)).split() if not word.startswith("file:")]
        if name in _PIP and words:
            settings[name] = " ".join(words)
    if "cert" in settings:
        shutil.copyfile(settings["cert"], folder / "certificates.pem")
        settings["cert"] = "/root/certificates.pem"
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
    (folder / ".config" / "pip" / "pip.conf").write_text("\n".join(lines) + "\n")
    return folder


def build_and_run(folder: Path, targets: Sequence[str]) -> None:
    """Build, look, run. In namespaces of its own."""
    # crun does without cgroups, and refuses to look at both versions of them beside each other.
    if Path("/sys/fs/cgroup/unified").is_mount():
        subprocess.run(["umount", "/sys/fs/cgroup/unified"], check=True)
    builder = Builder(folder)
    builder.build_base()
    print(f"base: Debian 12 with its Python 3.11 (buildah, chroot, {builder.driver})", flush=True)
    base, described = builder.base_root(), stages()
    images = {}
    for target in targets:
        images[target] = builder.build(target)
        print(look_into(target, images[target], described[target], base), flush=True)
    bundles = folder / "bundles"
    bundles.mkdir()
    save_images(bundles, images)
    for target in targets:
        print(look_at_processes(target, Crun(bundles), folder / f"{target}.log"), flush=True)
    if {"node", "control", "cli"} <= set(targets):
        rehearse = [sys.executable, "-m", "tests.docker.rehearse", "--short", "--images", str(bundles)]
        assert subprocess.run(rehearse, cwd=ROOT, check=False).returncode == 0, "compose.yaml does not work with them"


def _get_tools() -> None:
    if all(shutil.which(program) for program in PACKAGES):
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update", "-q"), ("install", "-y", "-q", "--no-install-recommends", *PACKAGES)):
        subprocess.run(["apt-get", *words], check=True, stdout=subprocess.DEVNULL, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docker.build_images", description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS, help="default: " + ", ".join(TARGETS))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        try:
            build_and_run(arguments.inside, arguments.targets)
        except AssertionError as error:
            print(f"images: {error}", flush=True)
            return 1
        return 0
    if not can_make_namespaces():
        parser.error("this needs root, and unshare and ip (util-linux, iproute2)")
    _get_tools()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="images-", dir=ROOT / "build"))
    try:
        folder.chmod(0o711)
        # Everything in there dies with the first process of the namespace, and that one with this program.
        namespaces = ["setpriv", "--pdeathsig=KILL", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        inside = [sys.executable, "-m", "tests.docker.build_images", *arguments.targets, "--inside", str(folder)]
        return subprocess.run([*namespaces, "--mount-proc", "--", *inside], cwd=ROOT, check=False).returncode
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """What was killed may still be ending, and write a last file."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} cannot be removed")


if __name__ == "__main__":
    sys.exit(main())
