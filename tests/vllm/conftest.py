"""Tests on real vLLM: `make test-vllm` runs them in an environment of its own; without vLLM they are left out.

Fixtures that start something import it themselves: this file is also read where there is no vLLM.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.vllm.deployment import Engines, Store
    from tests.vllm.stack import Stack

_VLLM_CACHE = Path(__file__).resolve().parents[2] / "build" / "vllm-cache"

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--tp``: also the tests that start one process per rank; they take minutes."""
    parser.addoption("--tp", action="store_true", help="also tensor parallelism over two processes")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Postgres, control plane and a node."""
    from tests.vllm.stack import running_stack

    with running_stack() as running:
        yield running


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """The process's one engine: see :class:`Engines`."""
    from tests.vllm.deployment import Engines

    slot = Engines()
    yield slot
    slot.close()


@pytest.fixture(scope="session")
def _tenant_numbers() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def new_store(stack: Stack, _tenant_numbers: Iterator[int]) -> Callable[..., Store]:
    """Makes a tenant with an empty namespace."""
    from tests.vllm.deployment import Store

    def make(**options: Any) -> Store:
        return Store(stack, f"tenant-{next(_tenant_numbers)}", **options)

    return make


@pytest.fixture
def store(new_store: Callable[..., Store]) -> Store:
    """A tenant with an empty namespace, for engines with the tiny Llama."""
    return new_store()


@pytest.fixture(autouse=True)
def weights_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digests of weights are remembered in a folder of the tests, not in the user's."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    # vLLM's own notes on models stay: to look at a model's class it starts a process that imports all of vLLM.
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT") or str(_VLLM_CACHE))
    return folder
