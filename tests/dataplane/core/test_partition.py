"""I2: only the admission of a verified session makes a Partition."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import dataplane
from dataplane.core.partition import Partition
from saltern.names import NamespaceId, TenantId

PACKAGE = Path(dataplane.__file__).parent
ADMISSION = PACKAGE / "core" / "admission.py"


def _uses(source: str) -> list[str]:
    """Code where ``Partition`` is used as a value, renamed, or copied with changes; annotations are no use."""
    tree = ast.parse(source)
    annotations: set[int] = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            if annotation is not None:
                annotations.update(id(inner) for inner in ast.walk(annotation))
    lines = []
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        is_value = (isinstance(node, ast.Name) and node.id == "Partition") or (
            isinstance(node, ast.Attribute) and node.attr == "Partition"
        )
        is_renamed = isinstance(node, ast.alias) and node.name == "Partition" and node.asname is not None
        is_copied = (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("replace", "__replace__")
            and any(keyword.arg in {field.name for field in fields(Partition)} for keyword in node.keywords)
        )
        if is_value or is_renamed or is_copied:
            lines.append(ast.unparse(node))
    return lines


def test_i2_only_admission_makes_a_partition() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if path != ADMISSION]
    assert len(sources) > 10
    offenders = {str(path.relative_to(PACKAGE)): _uses(path.read_text()) for path in sources}
    assert {path: lines for path, lines in offenders.items() if lines} == {}
    assert len(_uses(ADMISSION.read_text())) == 1


@pytest.mark.parametrize(
    "source",
    [
        "p = Partition('a', 'ns', 'u', 1)",
        "p = partition.Partition('a', 'ns', 'u', 1)",
        "from dataplane.core.partition import Partition as P",
        "make = Partition",
        "list(map(Partition, a, b, c, d))",
        "object.__new__(Partition)",
        "dataclasses.replace(mine, tenant='other')",
    ],
)
def test_i2_the_check_sees_every_way_around(source: str) -> None:
    assert _uses(source)


def test_a_partition_cannot_be_changed_and_is_a_key() -> None:
    partition = Partition(TenantId("a"), NamespaceId("ns"), "u", 1)
    with pytest.raises(FrozenInstanceError):
        partition.tenant = TenantId("b")  # type: ignore[misc]
    assert {partition: 1}[Partition(TenantId("a"), NamespaceId("ns"), "u", 1)] == 1
    look_alike: object = ("a", "ns", "u", 1)
    assert partition != look_alike
