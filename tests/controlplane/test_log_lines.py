"""Whoever is warned by a control plane finds in the documentation what it means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVELS = {"warning", "error", "exception", "critical"}


def warnings() -> Iterator[tuple[str, str]]:
    """(where, event) of every warning in the control plane."""
    for path in sorted((ROOT / "controlplane").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and _is_warning(call.func):
                yield f"{path.name}:{call.lineno}", ast.literal_eval(call.args[0])


def _is_warning(function: ast.expr) -> bool:
    logger = function.value if isinstance(function, ast.Attribute) and function.attr in LEVELS else None
    return isinstance(logger, ast.Name) and logger.id == "_log"


def test_every_warning_is_documented() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([^`\n]+)`", page[page.index("## Watching") :]))
    found = list(warnings())
    assert len(found) > 20
    assert [(where, event) for where, event in found if event not in documented] == []
