"""Running the command line in this process: where nothing runs, and against the session's real stack."""

from __future__ import annotations

import json
from collections.abc import Callable
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
