"""One real ``saltern up`` for the tests that need a whole service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from saltern.demo.stack import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """One real stack for the session: Postgres, control plane and a node with 64 MiB."""
    with running_stack(dram_bytes=64 * 1024 * 1024, environment={}) as running:
        yield running
