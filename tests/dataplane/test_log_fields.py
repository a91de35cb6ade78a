"""A node's log lines speak one language: every field is in the documentation, and says its unit."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from dataplane.log import configure_logging

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception"}
UNITS = ("_bytes", "_s", "_percent", "_entries")


def log_fields() -> Iterator[tuple[str, str]]:
    """(where, field) of every call of a logger in the data plane."""
    for path in sorted((ROOT / "dataplane").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and is_log_call(call.func):
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        yield f"{path.name}:{call.lineno}", keyword.arg


def is_log_call(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in LEVELS and isinstance(function.value, ast.Name) and function.value.id == "_log"
    return isinstance(function, ast.Name) and function.id in {"log", "level"}


def test_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", page[page.index("## Watching") :]))
    found = list(log_fields())
    assert len(found) > 20
    unknown = [(where, field) for where, field in found if field not in documented and not field.endswith(UNITS)]
    assert not unknown, "add these to docs/operating.md, Watching, or use a field that is there"


def test_every_line_names_its_node(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    try:
        configure_logging("node-7")
        structlog.get_logger().warning("something", tenant="acme")
    finally:
        structlog.configure(**before)
    line = json.loads(capsys.readouterr().err)
    assert line["node"] == "node-7" and line["tenant"] == "acme" and line["level"] == "warning"
