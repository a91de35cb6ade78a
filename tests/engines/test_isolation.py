"""Every row of the isolation table holds with a real Mooncake store below the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.isolation.adapter import MIB
from tests.isolation.saltern_store import SalternAdapter
from tests.isolation.suite import SUITE
from tests.isolation.table import Case, Outcome, run_case
from tests.support.mooncake_cluster import running_cluster


@pytest.fixture(scope="module")
def saltern(_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SalternAdapter]:
    with (
        running_cluster(tmp_path_factory.mktemp("mooncake"), 512 * MIB) as cluster,
        closing(SalternAdapter(mooncake=cluster.settings)) as adapter,
    ):
        yield adapter


@pytest.mark.parametrize("tried", SUITE, ids=[tried.name for tried in SUITE])
def test_isolation(saltern: SalternAdapter, tried: Case) -> None:
    row = run_case(saltern, tried)
    assert row.outcome is Outcome.HOLDS, row.detail
