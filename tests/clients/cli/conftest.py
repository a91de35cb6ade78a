"""Running the command line in this process: where nothing runs, and against the session's real stack."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from saltern.cli import main
from saltern.demo.stack import Stack


@dataclass(frozen=True)
class Outcome:
    """What one invocation did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Saltern = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not leak into tests."""
    for name in ("CONTROL", "API_KEY", "API_KEY_FILE", "DATA_DIR", "OUTPUT", "DEADLINE_MS", "DEBUG"):
        monkeypatch.delenv(f"SALTERN_{name}", raising=False)


@pytest.fixture
def offline(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saltern:
    """Run ``saltern ARGUMENTS`` where no stack runs."""
    monkeypatch.setenv("SALTERN_DATA_DIR", str(tmp_path / "nothing-here"))

    def run(*arguments: str) -> Outcome:
        code = main(arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def saltern(capfd: pytest.CaptureFixture[str], stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Saltern:
    """Run ``saltern ARGUMENTS`` against the session's stack as the platform's admin."""
    monkeypatch.setenv("SALTERN_CONTROL", stack.control)
    monkeypatch.setenv("SALTERN_API_KEY_FILE", str(stack.admin_api_key_file))

    def run(*arguments: str) -> Outcome:
        code = main(arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


_numbers = itertools.count(1)


@pytest.fixture
def tenant(saltern: Saltern) -> Iterator[str]:
    """A fresh tenant with 8 MiB of quota and the namespace ``chat``."""
    name = f"tenant-{next(_numbers)}"
    assert saltern("tenant", "create", name, "--display-name", f"Tenant {name}").code == 0
    assert saltern("quota", "set", name, "--dram-limit", "8MiB", "--dram-reserved", "2MiB").code == 0
    created = saltern(
        "namespace", "create", name, "chat", "--model-fingerprint", "m@1/bf16", "--block-tokens", "16",
        "--block-bytes", "64KiB",
    )  # fmt: skip
    assert created.code == 0
    yield name
    saltern("tenant", "delete", name, "--yes")
