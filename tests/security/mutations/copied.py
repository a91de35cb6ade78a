"""A copy of the checkout, in which things are broken and mended again, and pytest runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.security.mutations.values import Edit
from tests.security.threats import ROOT

PACKAGES: Final = ("saltern", "tenants", "controlplane", "dataplane", "migrations", "tests")
#: Not a part of the program, or made from it.
_LEFT_OUT: Final = shutil.ignore_patterns(
    ".git", ".venv", ".venv-*", "build", "__pycache__", ".*_cache", ".hypothesis", "node_modules"
)
_TIME_LIMIT_S: Final = 1200
#: Of the guest, boot and all, and of a test in it. It takes one to two minutes; what hangs, the boot on a machine that
#: has no time for it included, is given up long before the limit of everything else.
_GUEST_LIMIT_S: Final = 420
_GUEST_TEST_LIMIT_S: Final = 60
_DETAIL_MAX_CHARS: Final = 110
_TEST_FAILURES: Final = 1  # exit status of pytest


class Outcome(Enum):
    """Of the tests of one mutation."""

    RED = "red"  #: the test has noticed
    GREEN = "GREEN"  #: nobody has noticed
    BROKEN = "BROKEN"  #: the test did not come so far as to say anything
    SLOW = "SLOW"  #: it did not end
    NOT_HERE = "not here"  #: the machine lacks what the test needs


class Copy:
    """The checkout at ``root``, whose packages are imported instead of the installed ones.

    An interpreter of its own sees to that, and not the environment: tests start processes with an environment that they
    make up, and a process that imports what is installed would be one in which nothing is broken.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self._root = root
        self._report = scratch / "report.xml"
        self._executable = _interpreter(scratch / "interpreter", (root, root / "clients"))
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Byte code is compared with its source by whole seconds and length: each edit gets a second of its own.
        self._seconds = count(2_000_000_000)

    def require_own_packages(self) -> None:
        """Raises AssertionError unless a process in the copy imports every package from it."""
        code = f"import {', '.join(PACKAGES)}\nfor package in ({', '.join(PACKAGES)}): print(*package.__path__)"
        shown = set(self._python("-c", code).stdout.split())
        assert len(shown) == len(PACKAGES) and all(Path(path).is_relative_to(self._root) for path in shown), shown

    @contextmanager
    def broken(self, edits: Sequence[Edit]) -> Iterator[None]:
        """Make ``edits`` in the time of the block."""
        before = {edit.path: (self._root / edit.path).read_text() for edit in edits}
        try:
            for edit in edits:
                assert edit.occurrences(self._root) == 1, f"{edit.path} does not hold once: {edit.old}"
                self._write(edit.path, edit.applied((self._root / edit.path).read_text()))
            yield
        finally:
            for path, content in before.items():
                self._write(path, content)

    def run(self, tests: Sequence[str]) -> tuple[Outcome, str]:
        """Run tests; how they ended, and the first thing that went wrong in a few words."""
        self._report.unlink(missing_ok=True)
        arguments = ("-m", "pytest", "-p", "no:cacheprovider", "--maxfail=1", f"--junitxml={self._report}", *tests)
        try:
            ended = self._python(*arguments)
        except subprocess.TimeoutExpired:
            return Outcome.SLOW, f"more than {_TIME_LIMIT_S} s"
        if not self._report.exists() or ended.returncode not in (0, _TEST_FAILURES):
            return Outcome.BROKEN, (ended.stdout or ended.stderr).strip()[-_DETAIL_MAX_CHARS:].replace("\n", " ")
        suite = ElementTree.parse(self._report).getroot().find("testsuite")
        assert suite is not None
        number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        detail = _first_fault(suite)
        if number["failures"]:
            return Outcome.RED, detail
        if number["errors"]:
            return Outcome.BROKEN, detail
        return (Outcome.NOT_HERE, "skipped") if number["skipped"] == number["tests"] else (Outcome.GREEN, "")

    def run_in_guest(self, test: str) -> tuple[Outcome, str]:
        """Run a test of RDMA in the guest of ``make test-rdma``, which is built beside the checkout that was copied.

        Nothing else runs in it, and the first of the test's cases that fails is the last.
        """
        built = self._root / "build" / "rdma"
        if not built.exists():
            (ROOT / "build" / "rdma").mkdir(parents=True, exist_ok=True)
            built.parent.mkdir(exist_ok=True)
            built.symlink_to(ROOT / "build" / "rdma")
        guest = ("-m", "tests.rdma.vm", "--quick", "--required", f"--limit-s={_GUEST_LIMIT_S}")
        try:
            ended = self._python(*guest, "--", test, "--maxfail=1", "--color=no", f"--timeout={_GUEST_TEST_LIMIT_S}")
        except subprocess.TimeoutExpired:
            return Outcome.SLOW, f"more than {_TIME_LIMIT_S} s"
        found = {word: re.search(rf"(\d+) {word}", ended.stdout) for word in ("failed", "passed")}
        fault = re.search(r"^E +(.*)$", ended.stdout, re.MULTILINE)
        if found["failed"]:
            return Outcome.RED, fault.group(1)[:_DETAIL_MAX_CHARS] if fault else ""
        if found["passed"]:
            return Outcome.GREEN, ""
        return Outcome.BROKEN, (ended.stderr or ended.stdout).strip()[-_DETAIL_MAX_CHARS:].replace("\n", " ")

    def _write(self, path: str, content: str) -> None:
        (self._root / path).write_text(content)
        second = next(self._seconds)
        os.utime(self._root / path, (second, second))

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._executable), *arguments],
            cwd=self._root,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )


def _first_fault(suite: ElementTree.Element) -> str:
    """Which test failed first, or could not begin, and how its message begins; empty for none."""
    for kind in ("failure", "error"):
        for case in suite.iter("testcase"):
            fault = case.find(kind)
            if fault is not None:
                message = " ".join(fault.get("message", "").split())
                return f"{case.get('name', '')}: {message[:_DETAIL_MAX_CHARS]}"
    return ""


def _interpreter(folder: Path, packages: Sequence[Path]) -> Path:
    """Make one that finds ``packages`` first and then what is installed here, but for what points to a checkout."""
    venv.EnvBuilder(symlinks=True).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    installed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (own / "copied.pth").write_text("".join(f"{path}\n" for path in (*packages, *installed)))
    return folder / "bin" / "python"


@contextmanager
def copied(root: Path) -> Iterator[Copy]:
    """A copy of the working tree at ``root``, gone after the block."""
    with tempfile.TemporaryDirectory(prefix="saltern-threats-") as scratch:
        Path(scratch).chmod(0o755)  # PostgreSQL's own user passes through
        shutil.copytree(root, Path(scratch, "checkout"), ignore=_LEFT_OUT, symlinks=True)
        copy = Copy(Path(scratch, "checkout"), Path(scratch))
        copy.require_own_packages()
        yield copy
