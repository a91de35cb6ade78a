"""A Mooncake cluster for each test; without the wheel or a network of their own these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import mooncake_cluster
from tests.support.mooncake_cluster import Cluster, running_cluster


@pytest.fixture(scope="session")
def _possible() -> None:
    if why := mooncake_cluster.missing():
        pytest.skip(why)


@pytest.fixture
def cluster(_possible: None, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as running:
        yield running
