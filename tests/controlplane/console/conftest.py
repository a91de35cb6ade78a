from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from saltern.admin.v1 import credentials_pb2
from saltern.endpoints import Endpoint
from tests.support.control import Control, control_plane, migrate

ANY_PORT = Endpoint("127.0.0.1", 0)


@dataclass
class Ahead:
    """The wall clock, and how far a test has set it ahead."""

    by: timedelta = field(default_factory=timedelta)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.by


@dataclass
class Console:
    """A control plane with a console, two tenants, and a key of each kind."""

    control: Control
    clock: Ahead
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.control.plane.console_url


@pytest.fixture
async def console(postgres: Any, tmp_path: Path) -> AsyncIterator[Console]:
    clock = Ahead()
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, tmp_path, clock=clock, console_listen=ANY_PORT) as control:
            await control.redeem()
            keys = {"platform": control.admin_key}
            for tenant in ("acme", "beta"):
                await control.add_tenant(tenant, "chat", limit_bytes=2**26)
                for role in ("ADMIN", "AUDITOR"):
                    number = credentials_pb2.Role.Value(f"ROLE_TENANT_{role}")
                    keys[f"{tenant}/{role.lower()}"] = await control.add_api_key(number, tenant, role.lower())
                keys[f"{tenant}/writer"] = await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant, "writer")
            yield Console(control, clock, keys)
