"""If the audit row cannot be written the act does not happen (I11): with faults that PostgreSQL itself makes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import structlog

from saltern.admin.v1 import credentials_pb2, namespaces_pb2, quotas_pb2, salt_policies_pb2, tenants_pb2
from tests.support.control import Control, refused

#: How the row fails to be written: the body of a trigger function after its insertion, and whether it fires at COMMIT.
FAULTS = {
    "the statement fails": ("RAISE EXCEPTION 'no'", False),
    "the disk is full": ("RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'", False),
    "a constraint fails at commit": ("RAISE EXCEPTION 'late' USING ERRCODE = 'check_violation'", True),
    "the connection dies before the commit": ("PERFORM pg_terminate_backend(pg_backend_pid())", False),
    "the connection dies in the commit": ("PERFORM pg_terminate_backend(pg_backend_pid())", True),
    "a lock is not free in time": ("RAISE EXCEPTION 'busy' USING ERRCODE = 'lock_not_available'", False),
}
TABLES = (
    "tenants",
    "namespaces",
    "tier_quotas",
    "salt_policies",
    "salt_epochs",
    "api_keys",
    "request_log",
    "audit_events",
)


def superuser(control: Control, postgres: Any) -> psycopg.Connection[Any]:
    return postgres.server.connect("superuser", control.owner_url.database)


@asynccontextmanager
async def failing(control: Control, postgres: Any, fault: str) -> AsyncIterator[None]:
    """Let every audit event fail in the time of the block."""
    body, at_commit = FAULTS[fault]
    kind = "CONSTRAINT TRIGGER fault AFTER INSERT ON audit_events DEFERRABLE INITIALLY DEFERRED"
    with superuser(control, postgres) as connection:
        connection.execute(
            "CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS "
            f"$$ BEGIN {body}; RETURN NULL; END $$"
        )
        connection.execute(
            f"CREATE {kind if at_commit else 'TRIGGER fault AFTER INSERT ON audit_events'}"
            " FOR EACH ROW EXECUTE FUNCTION fault()"
        )
    with structlog.testing.capture_logs():  # tracebacks by the dozen take their time to be drawn
        yield
    with superuser(control, postgres) as connection:
        connection.execute("DROP FUNCTION fault() CASCADE")


def content(control: Control, postgres: Any) -> dict[str, list[Any]]:
    """Everything that an act could have changed."""
    with superuser(control, postgres) as connection:
        tables: dict[str, list[Any]] = {
            table: connection.execute(f"SELECT t::text FROM {table} t ORDER BY 1").fetchall() for table in TABLES
        }
        tables["policy"] = connection.execute("SELECT version FROM policy_state").fetchall()
    return tables


@pytest.mark.parametrize("fault", FAULTS)
async def test_i11_no_audit_no_act(control: Control, postgres: Any, fault: str) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=1 << 20)
    await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "old")
    admin = await control.bearer(control.admin_key)
    tier = quotas_pb2.TierQuota(tier=quotas_pb2.TIER_DRAM, limit_bytes=1 << 30)
    acts = {
        control.tenants.CreateTenant: tenants_pb2.CreateTenantRequest(
            tenant_id="globex", request_id="3b241101-e2bb-4255-8caf-4136c566a962"
        ),
        control.tenants.SuspendTenant: tenants_pb2.SuspendTenantRequest(name="tenants/acme"),
        control.tenants.DeleteTenant: tenants_pb2.DeleteTenantRequest(name="tenants/acme"),
        control.namespaces.DeleteNamespace: namespaces_pb2.DeleteNamespaceRequest(name="tenants/acme/namespaces/chat"),
        control.quotas.UpdateQuota: quotas_pb2.UpdateQuotaRequest(
            quota=quotas_pb2.Quota(name="tenants/acme/quota", tiers=[tier])
        ),
        control.credentials.CreateApiKey: credentials_pb2.CreateApiKeyRequest(
            parent="tenants/acme", api_key_id="new", api_key=credentials_pb2.ApiKey(role=credentials_pb2.ROLE_WRITER)
        ),
        control.salt_policies.UpdateSaltPolicy: salt_policies_pb2.UpdateSaltPolicyRequest(
            salt_policy=salt_policies_pb2.SaltPolicy(
                name="tenants/acme/saltPolicy", scope=salt_policies_pb2.SaltPolicy.SCOPE_USER
            )
        ),
        control.salt_policies.RotateSalt: salt_policies_pb2.RotateSaltRequest(name="tenants/acme/saltPolicy"),
        control.credentials.DeleteApiKey: credentials_pb2.DeleteApiKeyRequest(name="tenants/acme/apiKeys/old"),
    }
    before = content(control, postgres)

    async with failing(control, postgres, fault):
        for call, request in acts.items():
            error = await refused(call(request, metadata=admin))
            assert error.reason in {"UNEXPECTED", "DATABASE_UNAVAILABLE", "CONCURRENT_CHANGE"}, error
            assert "fault" not in error.message and "INSERT" not in error.message
            assert content(control, postgres) == before, request

    # And all of it happens once the trail can be written again, each act with its row.
    for call, request in acts.items():
        if call != control.tenants.DeleteTenant:
            await call(request, metadata=admin)
    assert len(content(control, postgres)["audit_events"]) == len(before["audit_events"]) + len(acts) - 1


async def test_i11_the_bootstrap_token_stays_good_when_its_redemption_cannot_be_recorded(
    fresh: Control, postgres: Any
) -> None:
    async with failing(fresh, postgres, "the statement fails"):
        assert (await refused(fresh.redeem())).reason == "UNEXPECTED"

    assert (await fresh.redeem()).startswith("sk-saltern-")
