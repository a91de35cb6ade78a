from __future__ import annotations

import asyncio
from datetime import timedelta

from sqlalchemy import func, select

from controlplane.clock import ceiling_s
from controlplane.db import models
from controlplane.secrets import LocalKeyEncryptionKey, root_secret_context
from saltern.admin.v1 import quotas_pb2, salt_policies_pb2, tenants_pb2
from saltern.errors import AbortedError, AlreadyExistsError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from tenants.tokens import CLOCK_SKEW_S
from tests.support.admin import PLATFORM, Admin, admin_of, refused


async def test_a_tenant_is_created_with_a_zero_quota_a_salt_policy_and_a_wrapped_root_secret(admin: Admin) -> None:
    created = await admin.create_tenant("acme", display_name="Acme GmbH, Köln")

    assert created.name == "tenants/acme"
    assert created.display_name == "Acme GmbH, Köln"
    assert created.state == tenants_pb2.Tenant.STATE_ACTIVE
    assert created == await admin.tenants.GetTenant(
        tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=admin_of("acme")
    )
    quota = await admin.quotas.GetQuota(
        quotas_pb2.GetQuotaRequest(name="tenants/acme/quota"), metadata=admin_of("acme")
    )
    assert [(tier.reserved_bytes, tier.limit_bytes, tier.weight) for tier in quota.tiers] == [(0, 0, 100), (0, 0, 100)]
    policy = await admin.salt_policies.GetSaltPolicy(
        salt_policies_pb2.GetSaltPolicyRequest(name="tenants/acme/saltPolicy"), metadata=admin_of("acme")
    )
    assert (policy.scope, policy.epoch) == (salt_policies_pb2.SaltPolicy.SCOPE_TENANT, 1)
    async with admin.database.transaction() as session:
        row = await session.get_one(models.Tenant, "acme")
        epoch = await session.get_one(models.SaltEpoch, ("acme", 1))
    root = await LocalKeyEncryptionKey(bytes(32)).unwrap(epoch.wrapped_root_secret, root_secret_context(row.uid, 1))
    assert len(root) == 32


async def test_an_existing_tenant_is_not_created_again(admin: Admin) -> None:
    await admin.create_tenant("acme", display_name="first")

    error = await refused(admin.create_tenant("acme", display_name="second"))

    assert isinstance(error, AlreadyExistsError) and error.reason == "TENANT_EXISTS"
    tenant = await admin.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=PLATFORM)
    assert tenant.display_name == "first"


async def test_of_two_creations_at_a_time_one_wins(admin: Admin) -> None:
    outcomes = await asyncio.gather(*(admin.create_tenant("acme") for _ in range(4)), return_exceptions=True)

    assert sum(isinstance(outcome, tenants_pb2.Tenant) for outcome in outcomes) == 1
    assert len(await admin.events("acme")) == 1


async def test_pages_list_every_tenant_once_in_order(admin: Admin) -> None:
    names = [f"tenants/t-{number}" for number in range(5)]
    for name in names:
        await admin.create_tenant(name.removeprefix("tenants/"))

    seen, token = [], ""
    for _ in range(3):
        page = await admin.tenants.ListTenants(
            tenants_pb2.ListTenantsRequest(page_size=2, page_token=token), metadata=PLATFORM
        )
        seen += [tenant.name for tenant in page.tenants]
        token = page.next_page_token

    assert seen == names
    assert token == ""


async def test_an_update_with_a_stale_etag_is_aborted(admin: Admin) -> None:
    created = await admin.create_tenant("acme", display_name="a")
    renamed = tenants_pb2.Tenant(name="tenants/acme", display_name="b", etag=created.etag)
    updated = await admin.tenants.UpdateTenant(tenants_pb2.UpdateTenantRequest(tenant=renamed), metadata=PLATFORM)
    assert updated.display_name == "b"
    assert updated.etag != created.etag
    assert updated.update_time.ToDatetime() > created.update_time.ToDatetime()

    error = await refused(
        admin.tenants.UpdateTenant(tenants_pb2.UpdateTenantRequest(tenant=renamed), metadata=PLATFORM)
    )

    assert isinstance(error, AbortedError) and error.reason == "ETAG_MISMATCH"


async def test_of_two_updates_with_one_etag_one_wins(admin: Admin) -> None:
    created = await admin.create_tenant("acme")
    requests = [
        tenants_pb2.UpdateTenantRequest(
            tenant=tenants_pb2.Tenant(name="tenants/acme", display_name=name, etag=created.etag)
        )
        for name in "abcd"
    ]

    outcomes = await asyncio.gather(
        *(admin.tenants.UpdateTenant(request, metadata=PLATFORM) for request in requests), return_exceptions=True
    )

    assert sum(isinstance(outcome, tenants_pb2.Tenant) for outcome in outcomes) == 1


async def test_suspend_and_resume_are_repeatable(admin: Admin) -> None:
    await admin.create_tenant("acme")
    name = "tenants/acme"
    for _ in range(2):
        tenant = await admin.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name=name), metadata=PLATFORM)
        assert tenant.state == tenants_pb2.Tenant.STATE_SUSPENDED
    for _ in range(2):
        tenant = await admin.tenants.ResumeTenant(tenants_pb2.ResumeTenantRequest(name=name), metadata=PLATFORM)
        assert tenant.state == tenants_pb2.Tenant.STATE_ACTIVE


async def test_i12_deleting_a_tenant_leaves_nothing_but_its_audit_chain(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_namespace("acme", "chat")
    await admin.create_api_key("acme", "ci")

    await admin.delete_tenant("acme")

    async with admin.database.transaction() as session:
        for table in (
            models.Tenant,
            models.Namespace,
            models.TierQuota,
            models.SaltPolicy,
            models.SaltEpoch,
            models.ApiKey,
        ):
            assert await session.scalar(select(func.count()).select_from(table)) == 0, table
    events = await admin.events("acme")
    assert [event.method.partition("/")[2] for event in events] == [
        "CreateTenant",
        "CreateNamespace",
        "CreateApiKey",
        "DeleteTenant",
    ]
    assert await admin.chain_faults("acme") == []
    error = await refused(admin.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=PLATFORM))
    assert isinstance(error, NotFoundError)


async def test_i12_a_tenant_of_the_same_id_is_another_one_and_continues_the_chain(admin: Admin) -> None:
    first = await admin.create_tenant("acme")
    async with admin.database.transaction() as session:
        first_row = await session.get_one(models.Tenant, "acme")
        first_epoch = await session.get_one(models.SaltEpoch, ("acme", 1))
    await admin.delete_tenant("acme")

    second = await admin.create_tenant("acme")

    async with admin.database.transaction() as session:
        second_row = await session.get_one(models.Tenant, "acme")
        second_epoch = await session.get_one(models.SaltEpoch, ("acme", 1))
    assert second_row.uid != first_row.uid
    assert second_epoch.wrapped_root_secret != first_epoch.wrapped_root_secret
    assert second_row.min_issue_time > first_row.min_issue_time
    assert second.etag != first.etag
    assert [event.sequence for event in await admin.events("acme")] == [1, 2, 3]
    assert await admin.chain_faults("acme") == []
    # An etag of the first one opens nothing of the second.
    error = await refused(
        admin.tenants.DeleteTenant(
            tenants_pb2.DeleteTenantRequest(name="tenants/acme", etag=first.etag), metadata=PLATFORM
        )
    )
    assert error.reason == "ETAG_MISMATCH"


MALFORMED_IDS = ["", "platform", "Acme", "acme-", "-acme", "1a", "a b", "a\0b", "ä", "a\n", "../etc", "tenants/a"]


async def test_a_malformed_tenant_id_is_refused(admin: Admin) -> None:
    for tenant in [*MALFORMED_IDS, "a" * 64, "x" * 10_000]:
        error = await refused(admin.create_tenant(tenant))

        assert isinstance(error, InvalidArgumentError), tenant
        assert error.hint
        assert len(error.message) < 300


async def test_i12_no_token_of_a_namesake_of_the_same_second_is_good_for_a_tenant(admin: Admin) -> None:
    """Made, deleted and made again within one second: the tokens of each are older than the next allows."""
    latest_issue_s = 0
    for _ in range(CLOCK_SKEW_S - 1):
        await admin.create_tenant("acme")
        async with admin.database.transaction() as session:
            min_issue_s = ceiling_s((await session.get_one(models.Tenant, "acme")).min_issue_time)
        assert min_issue_s > latest_issue_s
        # As controlplane.auth.exchange.issue_token does it.
        latest_issue_s = max(int(admin.clock.now.timestamp()), min_issue_s)
        assert latest_issue_s <= admin.clock.now.timestamp() + CLOCK_SKEW_S
        await admin.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=PLATFORM)
    error = await refused(admin.create_tenant("acme"))
    assert (type(error), error.reason) == (ResourceExhaustedError, "NAMES_REUSED_TOO_FAST")
    admin.clock.now += timedelta(seconds=10)
    await admin.create_tenant("acme")
