"""The service's database as a test looks at it: every tenant's rows, unless it says otherwise."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.db import Database, PlatformScope, Scope, connect


class EveryTenant(Database):
    """Transactions whose scope is every tenant where none is given; shares the connections of ``database``."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.engine)

    def transaction(self, scope: Scope | None = None, **options: Any) -> AbstractAsyncContextManager[AsyncSession]:
        return super().transaction(scope or PlatformScope(), **options)


def connect_to_all(url: str | URL, *, pool_connections: int = 10) -> EveryTenant:
    """As ``controlplane.db.connect``."""
    return EveryTenant(connect(url, pool_connections=pool_connections))
