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
    config = image.config
    assert config["User"] == f"{UID}:{UID}" and config["StopSignal"] == stage.stop_signal == "SIGTERM"
    assert tuple(config["Entrypoint"]) == stage.entrypoint and tuple(config["Cmd"] or ()) == stage.command
    assert tuple(image.healthcheck) == stage.healthcheck and config["WorkingDir"] == stage.workdir
    assert set(config.get("ExposedPorts") or {}) == {f"{port}/tcp" for port in stage.ports}
    assert dict(pair.split("=", 1) for pair in config["Env"]) == stage.env, config["Env"]
    assert set(config["Volumes"]) == {"/var/lib/saltern"}

    writable = {name for name, path in _everything(image.root) if _is_writable(path)}
    assert writable == WRITABLE, f"{target}: {sorted(writable ^ WRITABLE)[:10]}"
    for folder in ("opt/saltern", "usr/local"):
        foreign = [name for name, path in _everything(image.root / folder) if path.lstat().st_uid != 0]
        assert not foreign, f"{target}: not root's: {foreign[:10]}"
    privileged = {name for name, path in _everything(image.root) if _raises_rights(path)}
    assert privileged <= {name for name, path in _everything(base) if _raises_rights(path)}, privileged

    packages = next(image.root.glob("opt/saltern/lib/python*/site-packages"))
    assert not [path.name for path in packages.iterdir() if path.name.split("-")[0] in _TOOLS]
    assert (packages / "saltern").is_dir() and not (image.root / "src").exists()
    # What this build needed to get at packages is in no layer.
    assert {path.name for path in (image.root / "root").iterdir()} == {path.name for path in (base / "root").iterdir()}
    assert not [name for name, path in _everything(image.root / "etc") if path.name == "pip.conf"]
    assert _digest(image.root / _CERTIFICATES) == _digest(base / _CERTIFICATES)
    if target == "node-rdma":
        assert list(image.root.glob("usr/lib/*/libibverbs.so.1")) and list(image.root.glob("etc/libibverbs.d/*"))
        assert not list(image.root.glob("var/lib/apt/lists/*"))

    own, whole, begun = (_megabytes(path) for path in (image.root / "opt/saltern", image.root, base))
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


def _raises_rights(path: Path) -> bool:
    return bool(path.is_file() and path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _megabytes(root: Path) -> int:
    return round(sum(path.lstat().st_size for _, path in _everything(root) if path.is_file()) / 1e6)
