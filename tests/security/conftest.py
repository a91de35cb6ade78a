from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.admin import Admin, admin_services
from tests.support.control import migrate


@pytest.fixture
async def admin(postgres: Any) -> AsyncIterator[Admin]:
    with postgres.fresh_database(migrate) as urls:
        async with admin_services(urls) as services:
            yield services
