from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.control import Control, control_plane, migrate


@pytest.fixture
async def control(postgres, tmp_path: Path) -> AsyncIterator[Control]:  # type: ignore[no-untyped-def]
    """A control plane with a platform administrator."""
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path / "control") as running:
            await running.redeem()
            yield running
