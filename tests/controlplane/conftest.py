from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.control import Control, control_plane, migrate


@pytest.fixture
async def fresh(postgres, tmp_path: Path) -> AsyncIterator[Control]:  # type: ignore[no-untyped-def]
    """A control plane on a fresh database; its bootstrap token is not redeemed yet."""
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path) as running:
            yield running


@pytest.fixture
async def control(fresh: Control) -> Control:
    """A control plane with a platform administrator."""
    await fresh.redeem()
    return fresh
