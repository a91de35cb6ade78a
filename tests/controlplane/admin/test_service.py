from __future__ import annotations

from types import SimpleNamespace

from sqlalchemy import make_url
from structlog.testing import capture_logs

from saltern.admin.v1 import tenants_pb2
from saltern.errors import UnavailableError
from tests.support.admin import PLATFORM, admin_services, refused


async def test_i10_without_its_database_every_call_says_what_is_wrong() -> None:
    nowhere = make_url("postgresql+psycopg://nobody:hunter2@127.0.0.1:1/none")

    with capture_logs() as logs:
        async with admin_services(SimpleNamespace(owner=nowhere, app=nowhere)) as admin:
            errors = [
                await refused(admin.create_tenant("acme")),
                await refused(
                    admin.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=PLATFORM)
                ),
            ]

    for error in errors:
        assert isinstance(error, UnavailableError) and error.reason == "DATABASE_UNAVAILABLE"
        assert "SALTERN_DATABASE_URL" in error.hint
        assert error.retry_after_ms is not None
    assert "hunter2" not in repr((errors, logs))
