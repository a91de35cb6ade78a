"""The audit trail of the services (I11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import func, select, text
from structlog.testing import capture_logs

from controlplane.admin import audit_events, service
from controlplane.db import models
from controlplane.db.models import AuditOutcome
from saltern.admin.v1 import audit_pb2, credentials_pb2, tenants_pb2
from saltern.errors import InternalError, InvalidArgumentError, NotFoundError
from tenants.roles import Role
from tests.support.admin import PLATFORM, Admin, admin_of, admin_services, calling, refused
from tests.support.control import migrate


async def test_every_change_is_an_event_with_its_before_and_after(admin: Admin) -> None:
    await admin.create_tenant("acme", display_name="a")
    renamed = tenants_pb2.Tenant(name="tenants/acme", display_name="b")
    request_id = "00000000-0000-4000-8000-000000000001"
    await admin.tenants.UpdateTenant(
        tenants_pb2.UpdateTenantRequest(tenant=renamed, request_id=request_id), metadata=PLATFORM
    )

    answer = await admin.audit.ListAuditEvents(
        audit_pb2.ListAuditEventsRequest(parent="tenants/acme"), metadata=admin_of("acme")
    )

    newest, first = answer.audit_events
    assert newest.name == "tenants/acme/auditEvents/2"
    assert newest.actor == "apiKeys/test"
    assert newest.method == "saltern.admin.v1.TenantService/UpdateTenant"
    assert newest.resource == "tenants/acme"
    assert newest.outcome == audit_pb2.AuditEvent.OUTCOME_SUCCESS
    assert newest.request_id == request_id
    assert (newest.before["display_name"], newest.after["display_name"]) == ("a", "b")
    assert newest.previous_hash == first.hash
    assert not first.HasField("before")


async def test_acts_of_the_platform_are_on_its_own_chain(admin: Admin) -> None:
    await admin.create_api_key("", "node-1", credentials_pb2.ROLE_NODE)

    answer = await admin.audit.ListAuditEvents(audit_pb2.ListAuditEventsRequest(), metadata=PLATFORM)

    assert [(event.name, event.resource) for event in answer.audit_events] == [("auditEvents/1", "apiKeys/node-1")]


async def test_denied_attempts_are_events_of_who_tried(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_tenant("other")

    await refused(
        admin.tenants.DeleteTenant(
            tenants_pb2.DeleteTenantRequest(name="tenants/other"), metadata=calling(Role.WRITER, "acme", "ci")
        )
    )

    event = (await admin.events("acme"))[-1]
    assert (event.outcome, event.reason) == (AuditOutcome.DENIED, "RESOURCE_NOT_AVAILABLE")
    assert (event.actor, event.resource) == ("tenants/acme/apiKeys/ci", "tenants/other")
    assert event.method == "saltern.admin.v1.TenantService/DeleteTenant"
    assert len(await admin.events("other")) == 1
    assert await admin.chain_faults("acme") == []


async def test_i11_audit_row_in_the_same_transaction(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the row cannot be written, the act does not happen: here the database itself refuses the row."""
    await admin.create_tenant("acme")
    version = await admin.policy_version()
    record = service.record

    async def record_unwritable(*args: Any, **values: Any) -> int:
        return await record(*args, **values | {"reason": "a\0b"})  # no text of PostgreSQL can hold a NUL

    monkeypatch.setattr(service, "record", record_unwritable)

    with capture_logs() as logs:
        error = await refused(admin.create_namespace("acme", "chat"))

    assert isinstance(error, InternalError)
    assert error.metadata["correlation_id"] == logs[-1]["correlation_id"]
    async with admin.database.transaction() as session:
        assert await session.scalar(select(func.count()).select_from(models.Namespace)) == 0
    assert len(await admin.events("acme")) == 1
    assert await admin.policy_version() == version


async def test_i11_no_act_when_the_audit_table_cannot_be_written(postgres: Any) -> None:
    with postgres.fresh_database(migrate) as urls:
        async with admin_services(urls) as admin:
            await admin.create_tenant("acme")
            with postgres.server.connect("superuser", urls.name) as connection:
                connection.execute("REVOKE INSERT ON audit_events FROM saltern_app")

            with capture_logs():
                await refused(admin.delete_tenant("acme"))
                await refused(admin.create_tenant("other"))

            async with admin.database.transaction() as session:
                assert list(await session.scalars(select(models.Tenant.id))) == ["acme"]


async def test_i11_concurrent_acts_make_one_unbroken_chain(admin: Admin) -> None:
    await admin.create_tenant("acme")

    await asyncio.gather(*(admin.create_namespace("acme", f"n{number}") for number in range(20)))

    assert [event.sequence for event in await admin.events("acme")] == list(range(1, 22))
    assert await admin.chain_faults("acme") == []


async def test_i11_the_service_itself_cannot_change_the_trail(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for statement in (
        "UPDATE audit_events SET actor = 'nobody'",
        "DELETE FROM audit_events",
        "TRUNCATE audit_events",
    ):
        with pytest.raises(Exception, match="permission denied"):
            async with admin.database.transaction() as session:
                await session.execute(text(statement))


async def test_i2_a_tenant_reads_nothing_of_an_earlier_one_of_its_id(admin: Admin) -> None:
    await admin.create_tenant("acme", display_name="the first one's secret plan")
    await admin.delete_tenant("acme")
    await admin.create_tenant("acme", display_name="second")
    request = audit_pb2.ListAuditEventsRequest(parent="tenants/acme")

    own = await admin.audit.ListAuditEvents(request, metadata=admin_of("acme"))
    all_of_it = await admin.audit.ListAuditEvents(request, metadata=PLATFORM)

    assert [event.name for event in own.audit_events] == ["tenants/acme/auditEvents/3"]
    assert len(all_of_it.audit_events) == 3


async def test_the_chain_of_a_deleted_tenant_stays_readable_for_the_platform(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.delete_tenant("acme")

    answer = await admin.audit.ListAuditEvents(
        audit_pb2.ListAuditEventsRequest(parent="tenants/acme"), metadata=PLATFORM
    )

    assert len(answer.audit_events) == 2
    error = await refused(
        admin.audit.ListAuditEvents(audit_pb2.ListAuditEventsRequest(parent="tenants/nobody"), metadata=PLATFORM)
    )
    assert isinstance(error, NotFoundError)


async def test_pages_run_from_the_newest_to_the_oldest(admin: Admin) -> None:
    await admin.create_tenant("acme")
    for number in range(4):
        await admin.create_namespace("acme", f"n{number}")

    seen, token = [], ""
    for _ in range(3):
        page = await admin.audit.ListAuditEvents(
            audit_pb2.ListAuditEventsRequest(parent="tenants/acme", page_size=2, page_token=token),
            metadata=PLATFORM,
        )
        seen += [int(event.name.rpartition("/")[2]) for event in page.audit_events]
        token = page.next_page_token

    assert seen == [5, 4, 3, 2, 1]
    assert token == ""


async def test_a_secret_pasted_into_a_text_is_refused_and_stored_nowhere(admin: Admin) -> None:
    await admin.create_tenant("acme")
    key = await admin.create_api_key("acme", "ci")

    error = await refused(admin.create_tenant("other", display_name=f"my key is {key.secret}"))

    assert isinstance(error, InvalidArgumentError) and error.reason == "SECRET_IN_FIELD"
    assert key.secret not in str(error)
    async with admin.database.transaction() as session:
        assert await session.get(models.Tenant, "other") is None


async def test_a_list_is_filtered_by_actor_method_outcome_and_time(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_namespace("acme", "chat", admin_of("acme", "alice"))
    await admin.create_namespace("acme", "code", admin_of("acme", "bob"))
    await refused(
        admin.tenants.DeleteTenant(
            tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=admin_of("acme", "alice")
        )
    )

    async def found(**fields: Any) -> list[int]:
        request = audit_pb2.ListAuditEventsRequest(parent="tenants/acme", **fields)
        answer = await admin.audit.ListAuditEvents(request, metadata=admin_of("acme"))
        return [int(event.name.rpartition("/")[2]) for event in answer.audit_events]

    events = (
        await admin.audit.ListAuditEvents(
            audit_pb2.ListAuditEventsRequest(parent="tenants/acme"), metadata=admin_of("acme")
        )
    ).audit_events
    assert await found() == [4, 3, 2, 1]
    assert await found(actor="apiKeys/alice") == [4, 2]
    assert await found(actor="alice", method="CreateNamespace") == [2]
    assert await found(method="TenantService/") == [4, 1]
    assert await found(outcome=audit_pb2.AuditEvent.OUTCOME_DENIED) == [4]
    assert await found(outcome=audit_pb2.AuditEvent.OUTCOME_SUCCESS, actor="alice") == [2]
    assert await found(since=events[1].event_time, until=events[0].event_time) == [3]
    assert await found(actor="a%") == await found(actor="ali_e") == []  # texts, not patterns
    for wrong in ({"actor": "a" * 257}, {"method": "a\nb"}, {"outcome": 7}):
        request = audit_pb2.ListAuditEventsRequest(parent="tenants/acme", **wrong)  # type: ignore[arg-type]
        error = await refused(admin.audit.ListAuditEvents(request, metadata=admin_of("acme")))
        assert isinstance(error, InvalidArgumentError) and error.hint


async def test_a_page_of_a_filtered_list_looks_at_so_many_events_and_says_where_to_go_on(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admin.create_tenant("acme")
    for number in range(7):
        await admin.create_namespace("acme", f"n-{number}", admin_of("acme", "rare" if number == 0 else "often"))
    monkeypatch.setattr(audit_events, "LOOKED_AT_MAX", 3)

    pages, token = [], ""
    while True:
        answer = await admin.audit.ListAuditEvents(
            audit_pb2.ListAuditEventsRequest(parent="tenants/acme", actor="rare", page_token=token),
            metadata=admin_of("acme"),
        )
        pages.append([event.name.rpartition("/")[2] for event in answer.audit_events])
        token = answer.next_page_token
        if not token:
            break

    assert pages == [[], [], ["2"]]
