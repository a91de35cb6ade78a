"""What must hold of the files and settings of a built image, and of a process in a container of it."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.docker.container import UID, Wishes
from tests.docker.dockerfile import Stage
from tests.docker.runtime import BuiltImage, Crun
from tests.support.network import Host

#: What the image's user may write, if the root folder is not read-only: its own two, and what Debian gives everybody.
WRITABLE = {"/var/lib/saltern", "/credentials", "/tmp", "/var/tmp", "/run/lock"}
#: Nothing that installs, compiles or fetches is where the program is.
_TOOLS = ("pip", "setuptools", "wheel", "_distutils_hack")
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
_PROBE = """
import importlib.util, json, os, pwd
def refused(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
print(json.dumps({
    "user": [os.getuid(), os.getgid(), os.getgroups()],
    "account": list(pwd.getpwuid(os.getuid())),
    "tools": [name for name in %r if importlib.util.find_spec(name)],
    "refused": {path: refused(path) for path in ("/x", "/opt/saltern/x", "/usr/local/lib/saltern/healthcheck.py")},
    "written": [path for path in ("/tmp/x", "/var/lib/saltern/x") if refused(path) is None],
}))
"""
#: Which of the images can load what RDMA needs: RDMA_NO_LIBRARY or "loads".
_RDMA = """
from saltern.errors import SalternError
from saltern.rdma.bindings import load_binding
try:
    load_binding("")
    print("loads")
except SalternError as error:
    print(error.reason)
"""
_RDMA_SAYS = {"node": "RDMA_NO_LIBRARY", "node-rdma": "loads"}


def look_into(target: str, image: BuiltImage, stage: Stage, base: Path) -> str:
    """Check an image at rest; returns a line about its sizes.

    Args:
        stage: what the Dockerfile says of the target.
        base: the files of the image that it begins with.

    Raises:
        AssertionError: something is not as it must be.
    """
    config, root = image.config, image.root
    site_packages = next(root.glob("opt/saltern/lib/python*/site-packages"))
    rdma = [root.glob("usr/lib/*/libibverbs.so.1"), root.glob("etc/libibverbs.d/*")]
    found_and_wanted: dict[str, tuple[object, object]] = {
        "user": (config["User"], f"{UID}:{UID}"),
        "entry point": (config["Entrypoint"], list(stage.entrypoint)),
        "command": (list(config["Cmd"] or ()), list(stage.command)),
        "health check": (image.healthcheck, list(stage.healthcheck)),
        "working folder": (config["WorkingDir"], stage.workdir),
        "signal to stop": (config["StopSignal"], "SIGTERM"),
        "ports": (set(config.get("ExposedPorts") or {}), {f"{port}/tcp" for port in stage.ports}),
        "environment": (dict(pair.split("=", 1) for pair in config["Env"]), stage.env),
        "volumes": (set(config["Volumes"]), {"/var/lib/saltern"}),
        "writable by its user": ({name for name, path in _everything(root) if _is_writable(path)} ^ WRITABLE, set()),
        "not root's in /opt and /usr/local": (_not_of_root(root / "opt") | _not_of_root(root / "usr/local"), set()),
        "gives rights, beside the base's": (_raising_rights(root) - _raising_rights(base), set()),
        "tools": ({path.name for path in site_packages.iterdir() if path.name.split("-")[0] in _TOOLS}, set()),
        "sources": ((root / "src").exists(), False),
        # What this build needed to get at packages is in no layer.
        "home of root": (_names(root / "root"), _names(base / "root")),
        "settings of pip": ({name for name, path in _everything(root / "etc") if path.name == "pip.conf"}, set()),
        "authorities": (_digest(root / _CERTIFICATES), _digest(base / _CERTIFICATES)),
        "lists of packages": (_names(root / "var/lib/apt/lists") - _names(base / "var/lib/apt/lists"), set()),
        "libraries of RDMA": (all(any(paths) for paths in rdma), target == "node-rdma"),
    }
    wrong = [
        f"{what}: {found} and not {wanted}" for what, (found, wanted) in found_and_wanted.items() if found != wanted
    ]
    assert not wrong, f"image {target}: " + "; ".join(wrong)

    own, whole, begun = (_megabytes(path) for path in (root / "opt/saltern", root, base))
    return f"{target}: {whole} MB, of them {own} MB in /opt/saltern; the base {begun} MB"


def look_at_processes(target: str, crun: Crun, log: Path) -> str:
    """Start containers of an image that ask what they are; returns a line about it.

    Raises:
        AssertionError: something is not as it must be.
    """
    version = _said(target, crun, log, Wishes("version", entrypoint=("saltern", "--version"))).split()
    assert version[:2] == ["saltern,", "version"], version
    assert "Usage: saltern" in _said(target, crun, log, Wishes("help", entrypoint=("saltern", "--help")))
    probe = ("python", "-c", _PROBE % (_TOOLS,))
    found = json.loads(_said(target, crun, log, Wishes("probe", entrypoint=probe, tmpfs=("/tmp:size=1m,mode=1777",))))
    assert found["user"] == [UID, UID, []] and found["account"][0] == "saltern", found
    assert found["account"][5:] == ["/var/lib/saltern", "/usr/sbin/nologin"], found
    assert not found["tools"], found
    assert set(found["refused"].values()) == {"Read-only file system"}, found
    assert found["written"] == ["/tmp/x", "/var/lib/saltern/x"], found
    if target == "control":  # what the job before an upgrade runs; it ends at once, without a database
        migrate = ("sh", "-c", "python -m migrations 2>&1 || test $? = 2")
        said = _said(target, crun, log, Wishes("migrate", entrypoint=migrate))
        assert "SALTERN_MIGRATION_DATABASE_URL" in said, said
    if target in _RDMA_SAYS:
        said = _said(target, crun, log, Wishes("rdma", entrypoint=("python", "-c", _RDMA))).strip()
        assert said == _RDMA_SAYS[target], said
    return f"{target}: version {version[2]} as user {UID} without capability on a read-only root"


def _said(target: str, crun: Crun, log: Path, wishes: Wishes) -> str:
    output = log.with_suffix(f".{wishes.name}")
    with output.open("wb") as file:
        container = crun.start(target, wishes, Host(), file)
        try:
            status = container.wait(120.0)
        finally:
            container.kill()
    said = output.read_text()
    assert status == 0, f"{target}, {wishes.name}: {status}: {said}"
    return said


def _everything(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file and folder, by its path in the image; symbolic links and devices have no rights of their own."""
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            yield f"/{path.relative_to(root)}", path


def _is_writable(path: Path) -> bool:
    status = path.lstat()
    mine = status.st_uid == UID or (status.st_gid == UID and status.st_mode & stat.S_IWGRP)
    return bool(mine or status.st_mode & stat.S_IWOTH)


def _raising_rights(root: Path) -> set[str]:
    privileged = stat.S_ISUID | stat.S_ISGID
    return {name for name, path in _everything(root) if path.is_file() and path.lstat().st_mode & privileged}


def _not_of_root(root: Path) -> set[str]:
    return {name for name, path in _everything(root) if path.lstat().st_uid != 0}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _megabytes(root: Path) -> int:
    return round(sum(path.lstat().st_size for _, path in _everything(root) if path.is_file()) / 1e6)
