"""The table of SECURITY.md is not a promise: each line names rules, code and tests that are there."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = {f"I{number}" for number in range(1, 13)}
_HEADER = ["threat", "rule", "code", "tests"]
_QUOTED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Line:
    threat: str
    rules: tuple[str, ...]
    code: tuple[str, ...]
    tests: tuple[str, ...]


def lines_of(page: str) -> list[Line]:
    """The lines of the one table whose columns are ``_HEADER``."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if row.startswith("|")]
    begin = rows.index(_HEADER)
    found = []
    for cells in rows[begin + 2 :]:
        assert len(cells) == len(_HEADER), f"a bar too many or too few: {cells[0]}"
        threat, rules, code, tests = cells
        found.append(
            Line(threat, tuple(re.split(r"[ ,]+", rules)), *(tuple(_QUOTED.findall(c)) for c in (code, tests)))
        )
    return found


LINES = lines_of((ROOT / "SECURITY.md").read_text())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, methods, classes and constants that a module defines."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def missing(reference: str, separator: str) -> str:
    """What is wrong with ``path`` or ``path<separator>name``; empty for nothing."""
    path, _, name = reference.partition(separator)
    if not (ROOT / path).exists():
        return f"{path} is not there"
    if name and name not in names_in(ROOT / path):
        return f"{path} has no {name}"
    return ""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.threat[:48])
def test_each_threat_names_rules_code_and_tests_that_are_there(line: Line) -> None:
    assert line.rules and set(line.rules) <= RULES, line.rules
    assert line.code and line.tests
    assert [fault for one in line.code if (fault := missing(one, ":"))] == []
    assert [fault for one in line.tests if (fault := missing(one, "::"))] == []
    assert all(one.startswith("tests/") for one in line.tests)
    assert any("::test_" in one for one in line.tests), "a whole file is no answer: name the test"


def test_every_rule_is_in_the_table() -> None:
    assert {rule for line in LINES for rule in line.rules} == RULES
    assert len(LINES) >= 40
    assert len({line.threat for line in LINES}) == len(LINES)


def test_what_is_not_there_is_found() -> None:
    table = (
        "| threat | rule | code | tests |\n|---|---|---|---|\n| x | I1 | `no/such.py` | `tests/security/a.py::b` |\n"
    )
    (line,) = lines_of(table)
    assert missing(line.code[0], ":") == "no/such.py is not there"
    assert missing("tenants/roles.py:may", ":") == ""
    assert missing("tenants/roles.py:might", ":") == "tenants/roles.py has no might"
