"""``python -m migrations``: for a job before an upgrade."""

from __future__ import annotations

from typing import Any

import pytest

from migrations import head_revision
from migrations.__main__ import main

VARIABLE = "SALTERN_MIGRATION_DATABASE_URL"


def test_it_migrates_and_then_finds_nothing_to_do(
    postgres: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres.fresh_database() as database:
        monkeypatch.setenv(VARIABLE, database.owner.render_as_string(hide_password=False))
        assert main() == 0
        assert capsys.readouterr().out == f"schema none -> {head_revision()}\n"
        assert main() == 0
        assert capsys.readouterr().out == f"schema {head_revision()} -> {head_revision()}\n"


def test_it_says_what_it_lacks_and_keeps_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main() == 2 and VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "postgresql://owner:hush-hush@127.0.0.1:1/saltern")
    assert main() == 1
    said = capsys.readouterr().err
    assert "DATABASE_UNAVAILABLE" in said and "hush" not in said
