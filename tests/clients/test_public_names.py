"""What ``import saltern`` promises, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import saltern
from saltern import errors


def test_public_names_are_these() -> None:
    assert saltern.__all__ == sorted(saltern.__all__)
    assert set(saltern.__all__) == set(saltern._HOMES)
    for name in saltern.__all__:
        assert getattr(saltern, name).__module__.startswith(("saltern.", "typing", "types"))
    with pytest.raises(AttributeError):
        _ = saltern.no_such_name


def test_every_error_of_the_tree_is_public() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(saltern.__all__)


@pytest.mark.parametrize(
    "statement",
    ["import saltern", "from saltern import Client, StaticCredentials, Hit", "from saltern import AsyncClient"],
)
def test_importing_the_client_loads_neither_grpc_nor_the_command_line(statement: str) -> None:
    code = f"{statement}; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert not loaded & {"click", "rich", "grpc", "google.protobuf", "cryptography", "numpy"}


def test_type_checkers_see_the_names_that_load_lazily() -> None:
    """``__getattr__`` hides a name that the TYPE_CHECKING block forgot, or one that moved."""
    from pathlib import Path

    source = Path(saltern.__file__).read_text()
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__")]
    for name in saltern.__all__:
        assert name in block
