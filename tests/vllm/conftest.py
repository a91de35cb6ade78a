"""Tests on real vLLM: `make test-vllm` runs them in an environment of their own; without vLLM they are left out."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--tp``: also the tests that start one process per rank; they take minutes."""
    parser.addoption("--tp", action="store_true", help="also tensor parallelism over two processes")
