"""ExportAuditEvents through the real door: whole, in order, only what the caller may read, and provable afterwards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from controlplane.audit.stretches import PAGE_EVENTS
from saltern.admin.v1 import audit_pb2, credentials_pb2, tenants_pb2
from saltern.audit.chain import verify
from saltern.audit.lines import ExportedEvent, decode_event, is_one_form, time_of
from tests.support.audit_chains import START_US, STEP_US, chain_of, exported, store
from tests.support.control import Control, refused


async def export(control: Control, parent: str = "", api_key: str = "", **fields: Any) -> list[ExportedEvent]:
    """Every event of an export; each line is in its one form."""
    metadata = await control.bearer(api_key or control.admin_key)
    request = audit_pb2.ExportAuditEventsRequest(parent=parent, **fields)
    events: list[ExportedEvent] = []
    async for response in control.audit.ExportAuditEvents(request, metadata=metadata):
        lines = response.lines.splitlines()
        page = [decode_event(line) for line in lines]
        assert all(map(is_one_form, lines, page))
        assert (response.events, response.last_sequence) == (len(page), page[-1].sequence)
        events += page
    return events


async def test_i11_an_export_is_the_whole_chain_and_verifies(control: Control) -> None:
    await control.add_tenant("acme", "chat", limit_bytes=1 << 20)
    await control.set_quota("acme", limit_bytes=1 << 21)

    events = await export(control, "tenants/acme")

    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert verify("acme", [event.to_chained_record() for event in events]) == []
    created, *_, resized = events
    assert created.method == "saltern.admin.v1.TenantService/CreateTenant"
    assert (created.actor, created.actor_role) == ("apiKeys/bootstrap-admin", "platform-admin")
    assert created.peer.startswith("127.0.0.1:") and created.peer.partition(":")[2].isdecimal()
    assert created.policy_version < resized.policy_version
    assert resized.before is not None and resized.after is not None
    assert [quota["tiers"][0]["limit_bytes"] for quota in (resized.before, resized.after)] == ["1048576", "2097152"]
    listed = await control.events("tenants/acme")
    assert [(one.peer, one.actor_role, one.policy_version, one.hash_format) for one in reversed(listed)] == [
        (event.peer, event.actor_role, event.policy_version, 2) for event in events
    ]


async def test_an_export_of_many_pages_is_what_was_written(control: Control) -> None:
    written = list(chain_of(2 * PAGE_EVENTS + 1))
    store(control.owner_url, iter(written))

    assert await export(control, "tenants/acme") == [exported(event) for event in written]
    rest = await export(control, "tenants/acme", after_sequence=PAGE_EVENTS)
    assert [rest[0].sequence, rest[-1].sequence] == [PAGE_EVENTS + 1, 2 * PAGE_EVENTS + 1]
    assert await export(control, "tenants/acme", after_sequence=2 * PAGE_EVENTS + 1) == []


async def test_times_cut_a_stretch_without_gaps(control: Control) -> None:
    store(control.owner_url, chain_of(10))
    since = time_of(START_US + 3 * STEP_US)

    async def sequences(**fields: Any) -> list[int]:
        return [event.sequence for event in await export(control, "tenants/acme", **fields)]

    assert await sequences(since=since) == list(range(4, 11))
    assert await sequences(until=since) == [1, 2, 3]
    assert await sequences(since=since, until=since + timedelta(seconds=2)) == [4, 5]
    assert await sequences(since=since, after_sequence=6) == [7, 8, 9, 10]
    assert await sequences(since=since + timedelta(days=1)) == []
    assert await sequences(until=since - timedelta(days=1)) == []


async def test_i2_nobody_exports_what_is_not_theirs_and_the_attempt_is_audited(control: Control) -> None:
    for tenant in ("acme", "globex"):
        await control.add_tenant(tenant)
    auditor = await control.add_api_key(credentials_pb2.ROLE_TENANT_AUDITOR, "acme")
    writer = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "writer")

    async def refusal(parent: str, api_key: str) -> str:
        call = control.audit.ExportAuditEvents(
            audit_pb2.ExportAuditEventsRequest(parent=parent), metadata=await control.bearer(api_key)
        )
        return (await refused(call.read())).reason

    assert await refusal("tenants/globex", auditor) == "RESOURCE_NOT_AVAILABLE"
    assert await refusal("tenants/nobody", auditor) == "RESOURCE_NOT_AVAILABLE"
    assert await refusal("", auditor) == "RESOURCE_NOT_AVAILABLE"
    assert await refusal("tenants/acme", writer) == "ROLE_REQUIRED"
    events = await export(control, "tenants/acme", auditor)
    denied = [(event.resource, event.reason, event.actor_role) for event in events if event.outcome == "denied"]
    assert ("tenants/globex", "RESOURCE_NOT_AVAILABLE", "tenant-auditor") in denied
    assert ("tenants/acme", "ROLE_REQUIRED", "writer") in denied


async def test_i2_a_tenant_exports_nothing_of_its_namesake(control: Control) -> None:
    await control.add_tenant("acme")
    admin = await control.bearer(control.admin_key)
    await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=admin)
    await control.add_tenant("acme")
    auditor = await control.add_api_key(credentials_pb2.ROLE_TENANT_AUDITOR, "acme")

    theirs = await export(control, "tenants/acme", auditor)

    assert theirs[0].sequence == 3 and theirs[0].method.endswith("/CreateTenant")
    assert (await export(control, "tenants/acme", auditor, after_sequence=1))[0].sequence == 3
    assert (await export(control, "tenants/acme"))[0].sequence == 1


async def test_a_key_that_is_deleted_ends_the_export_it_has_begun(control: Control) -> None:
    store(control.owner_url, chain_of(12 * PAGE_EVENTS))
    second = await control.add_api_key(credentials_pb2.ROLE_PLATFORM_ADMIN, key_id="second")
    call = control.audit.ExportAuditEvents(
        audit_pb2.ExportAuditEventsRequest(parent="tenants/acme"), metadata=await control.bearer(second)
    )
    await call.read()
    await control.delete_api_key("apiKeys/second")

    async def rest() -> None:
        while await call.read():
            pass

    assert (await refused(rest())).reason == "CREDENTIAL_REVOKED"
