from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf import field_mask_pb2
from sqlalchemy import select

from controlplane.admin import namespaces as module
from controlplane.db import PlatformScope
from controlplane.db.models import AuditEvent
from saltern.admin.v1 import namespaces_pb2, quotas_pb2, tenants_pb2
from saltern.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from tests.support.admin import PLATFORM, Admin, admin_of, namespace_request, refused


async def test_the_tenants_own_admin_creates_lists_and_deletes(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_tenant("other")
    await admin.create_namespace("other", "chat")
    created = await admin.create_namespace("acme", "chat", admin_of("acme"))
    await admin.create_namespace("acme", "agents", admin_of("acme"))

    assert created.name == "tenants/acme/namespaces/chat"
    assert (created.model_fingerprint, created.block_tokens, created.block_bytes) == ("model bf16", 16, 65536)
    listed = await admin.namespaces.ListNamespaces(
        namespaces_pb2.ListNamespacesRequest(parent="tenants/acme"), metadata=admin_of("acme")
    )
    assert [namespace.name for namespace in listed.namespaces] == [
        "tenants/acme/namespaces/agents",
        "tenants/acme/namespaces/chat",
    ]
    delete = namespaces_pb2.DeleteNamespaceRequest(name=created.name, etag=created.etag)
    await admin.namespaces.DeleteNamespace(delete, metadata=admin_of("acme"))
    error = await refused(
        admin.namespaces.GetNamespace(namespaces_pb2.GetNamespaceRequest(name=created.name), metadata=PLATFORM)
    )
    assert isinstance(error, NotFoundError)


async def test_i12_a_namespace_of_the_same_id_is_another_one(admin: Admin) -> None:
    await admin.create_tenant("acme")
    first = await admin.create_namespace("acme", "chat")
    await admin.namespaces.DeleteNamespace(namespaces_pb2.DeleteNamespaceRequest(name=first.name), metadata=PLATFORM)
    second = await admin.create_namespace("acme", "chat")

    assert second.etag != first.etag
    error = await refused(
        admin.namespaces.DeleteNamespace(
            namespaces_pb2.DeleteNamespaceRequest(name=first.name, etag=first.etag), metadata=PLATFORM
        )
    )
    assert isinstance(error, AbortedError)


async def test_an_existing_namespace_is_not_created_again(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.create_namespace("acme", "chat")

    error = await refused(admin.create_namespace("acme", "chat"))

    assert isinstance(error, AlreadyExistsError) and error.reason == "NAMESPACE_EXISTS"


async def test_a_suspended_tenant_changes_nothing_by_itself(admin: Admin) -> None:
    await admin.create_tenant("acme")
    await admin.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=PLATFORM)

    error = await refused(admin.create_namespace("acme", "chat", admin_of("acme")))

    assert error.reason == "TENANT_SUSPENDED"
    await admin.create_namespace("acme", "chat", PLATFORM)


async def test_the_number_of_namespaces_has_a_limit_that_races_do_not_pass(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMESPACES_PER_TENANT_MAX", 3)
    await admin.create_tenant("acme")

    outcomes = await asyncio.gather(
        *(admin.create_namespace("acme", f"n{number}") for number in range(6)), return_exceptions=True
    )

    assert sum(isinstance(outcome, namespaces_pb2.Namespace) for outcome in outcomes) == 3
    error = await refused(admin.create_namespace("acme", "one-more"))
    assert isinstance(error, ResourceExhaustedError) and error.reason == "TOO_MANY_RESOURCES"


async def test_a_namespace_is_not_created_in_a_tenant_that_is_being_deleted(admin: Admin) -> None:
    await admin.create_tenant("acme")

    created, _ = await asyncio.gather(
        admin.create_namespace("acme", "chat"), admin.delete_tenant("acme"), return_exceptions=True
    )

    # Either it came first and went with the tenant, or there was no tenant any more; never a fault.
    assert isinstance(created, namespaces_pb2.Namespace) or created.code().name == "NOT_FOUND"
    assert await admin.chain_faults("acme") == []


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"block_tokens": 0},
    {"block_tokens": -1},
    {"block_tokens": 65537},
    {"block_tokens": 2**31 - 1},
    {"block_bytes": 0},
    {"block_bytes": -(2**63)},
    {"block_bytes": 2**26 + 1},
    {"block_bytes": 2**63 - 1},
    {"model_fingerprint": ""},
    {"model_fingerprint": "   "},
    {"model_fingerprint": "a\0b"},
    {"model_fingerprint": "a\nb"},
    {"model_fingerprint": "a\u202eb"},
    {"model_fingerprint": "x" * 513},
    {"model_fingerprint": "x" * 10_000},
]


async def test_values_out_of_range_are_refused(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for changes in OUT_OF_RANGE:
        request = namespace_request("acme", "chat", **changes)
        error = await refused(admin.namespaces.CreateNamespace(request, metadata=PLATFORM))

        assert isinstance(error, InvalidArgumentError), changes
        assert error.metadata["field"] in changes
        assert len(error.message) < 300


def limits(**limit_bytes: int) -> list[namespaces_pb2.NamespaceLimit]:
    return [
        namespaces_pb2.NamespaceLimit(tier=quotas_pb2.Tier.Value(f"TIER_{tier}"), limit_bytes=value)
        for tier, value in limit_bytes.items()
    ]


def update(name: str, *, etag: str = "", paths: tuple[str, ...] = (), **limit_bytes: int) -> Any:
    namespace = namespaces_pb2.Namespace(name=name, etag=etag, tier_limits=limits(**limit_bytes))
    return namespaces_pb2.UpdateNamespaceRequest(namespace=namespace, update_mask=field_mask_pb2.FieldMask(paths=paths))


async def test_limits_are_set_at_creation_and_changed_as_a_whole_later(admin: Admin) -> None:
    await admin.create_tenant("acme")
    request = namespace_request("acme", "chat", tier_limits=limits(DRAM=4096))
    created = await admin.namespaces.CreateNamespace(request, metadata=admin_of("acme"))
    assert list(created.tier_limits) == limits(DRAM=4096)

    raised = await admin.namespaces.UpdateNamespace(
        update(created.name, etag=created.etag, paths=("tier_limits",), DRAM=8192, SSD=0), metadata=admin_of("acme")
    )
    assert list(raised.tier_limits) == limits(DRAM=8192, SSD=0)
    assert raised.etag != created.etag and raised.model_fingerprint == created.model_fingerprint
    stale = await refused(admin.namespaces.UpdateNamespace(update(created.name, etag=created.etag), metadata=PLATFORM))
    assert isinstance(stale, AbortedError) and stale.reason == "ETAG_MISMATCH"

    lifted = await admin.namespaces.UpdateNamespace(update(created.name), metadata=PLATFORM)
    assert not lifted.tier_limits
    assert await admin.chain_faults("acme") == []


async def test_i11_a_change_of_limits_is_audited_with_both_values(admin: Admin) -> None:
    await admin.create_tenant("acme")
    created = await admin.create_namespace("acme", "chat")
    await admin.namespaces.UpdateNamespace(update(created.name, DRAM=4096), metadata=admin_of("acme"))
    async with admin.database.transaction(PlatformScope()) as session:
        newest = select(AuditEvent).where(AuditEvent.chain == "acme").order_by(AuditEvent.sequence.desc()).limit(1)
        event = (await session.scalars(newest)).one()
    assert event.method.endswith("/UpdateNamespace") and event.before is not None and event.after is not None
    assert "tier_limits" not in event.before
    assert event.after["tier_limits"] == [{"tier": "TIER_DRAM", "limit_bytes": "4096"}]


async def test_limits_that_make_no_sense_are_refused(admin: Admin) -> None:
    await admin.create_tenant("acme")
    created = await admin.create_namespace("acme", "chat")
    twice = update(created.name)
    twice.namespace.tier_limits.extend(limits(DRAM=1) + limits(DRAM=2))
    unknown = update(created.name)
    unknown.namespace.tier_limits.append(namespaces_pb2.NamespaceLimit(limit_bytes=1))
    wrong = [
        twice,
        unknown,
        update(created.name, DRAM=-1),
        update(created.name, SSD=2**53 + 1),
        update(created.name, paths=("block_bytes",)),
    ]
    for request in wrong:
        error = await refused(admin.namespaces.UpdateNamespace(request, metadata=PLATFORM))
        assert isinstance(error, InvalidArgumentError), request
