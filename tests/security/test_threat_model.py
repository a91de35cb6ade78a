"""The table of SECURITY.md is not a promise: each line names rules, code and tests that are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.security.mutations.table import MUTATIONS
from tests.security.mutations.values import Mutation
from tests.security.threats import ROOT, THREATS, Threat, threats_of

RULES = {f"I{number}" for number in range(1, 13)}


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


@pytest.mark.parametrize("line", THREATS, ids=lambda line: line.text[:48])
def test_each_threat_names_rules_code_and_tests_that_are_there(line: Threat) -> None:
    assert line.rules and set(line.rules) <= RULES, line.rules
    assert line.code and line.tests
    assert [fault for one in line.code if (fault := missing(one, ":"))] == []
    assert [fault for one in line.tests if (fault := missing(one, "::"))] == []
    assert all(one.startswith("tests/") for one in line.tests)
    assert any("::test_" in one for one in line.tests), "a whole file is no answer: name the test"


def test_every_rule_is_in_the_table() -> None:
    assert {rule for line in THREATS for rule in line.rules} == RULES
    assert len(THREATS) >= 40
    assert len({line.text for line in THREATS}) == len(THREATS)


def test_what_is_not_there_is_found() -> None:
    table = (
        "| threat | rule | code | tests |\n|---|---|---|---|\n| x | I1 | `no/such.py` | `tests/security/a.py::b` |\n"
    )
    (line,) = threats_of(table)
    assert missing(line.code[0], ":") == "no/such.py is not there"
    assert missing("tenants/roles.py:may", ":") == ""
    assert missing("tenants/roles.py:might", ":") == "tenants/roles.py has no might"


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat.text[:48])
def test_each_threat_has_an_answer_that_can_be_taken_away(threat: Threat) -> None:
    """``make threats`` does so; here only that each test that a line names has a mutation which it must notice."""
    broken = [test for mutation in MUTATIONS if threat.text.startswith(mutation.threat) for test in mutation.tests]
    assert broken
    unbroken = [one for one in threat.tests if not any(test == one or test.startswith(f"{one}::") for test in broken)]
    assert unbroken == [] or any("rdma" in test for test in broken), "give each of them a mutation"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.tests[0].rpartition("::")[2])
def test_each_mutation_still_finds_what_it_breaks(mutation: Mutation) -> None:
    (threat,) = (one for one in THREATS if one.text.startswith(mutation.threat))
    assert all(edit.occurrences(ROOT) == 1 and edit.new != edit.old for edit in mutation.edits)
    assert all(test in threat.tests or test.partition("::")[0] in threat.tests for test in mutation.tests)
    assert [fault for test in mutation.tests if (fault := missing(test, "::"))] == []
