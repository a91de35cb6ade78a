"""Hostile input at the door of the services: a typed error each time, and the service goes on."""

from __future__ import annotations

import base64
import json
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.admin.pages import decode_identifier_token, decode_sequence_token, encode_page_token
from saltern.admin.v1 import (
    audit_pb2,
    credentials_pb2,
    namespaces_pb2,
    quotas_pb2,
    salt_policies_pb2,
    sharing_groups_pb2,
    tenants_pb2,
    usage_pb2,
)
from saltern.errors import AbortedError, InvalidArgumentError, SalternError
from tests.support.admin import PLATFORM, Admin, refused

HOSTILE_NAMES = [
    "",
    "\0",
    "tenants/\0",
    "tenants/a\0b",
    "tenants/",
    "tenants",
    "tenants/a/",
    "/tenants/a",
    "tenants/a/namespaces",
    "tenants/platform",
    "tenants/../tenants/a",
    "tenants/A",
    "tenants/ﬁ",
    "tenants/" + "a" * 10_000,
    "x" * 10_000,
    "tenants/a'; DROP TABLE tenants; --",
    "tenants/%",
    "apiKeys/../apiKeys/x",
    "tenants/a/apiKeys/\n",
]


async def test_names_that_are_none_are_refused_by_every_method(admin: Admin) -> None:
    for name in HOSTILE_NAMES:
        for call, request in calls_with(admin, name):
            error = await refused(call(request, metadata=PLATFORM))
            assert isinstance(error, InvalidArgumentError), (name, error)
            assert error.hint
            assert len(error.message) < 400


def calls_with(admin: Admin, name: str) -> list[tuple[Any, Any]]:
    """Every method that takes a name, with this one."""
    calls: list[tuple[Any, Any]] = [
        (admin.tenants.GetTenant, tenants_pb2.GetTenantRequest(name=name)),
        (admin.tenants.UpdateTenant, tenants_pb2.UpdateTenantRequest(tenant=tenants_pb2.Tenant(name=name))),
        (admin.tenants.DeleteTenant, tenants_pb2.DeleteTenantRequest(name=name)),
        (admin.tenants.SuspendTenant, tenants_pb2.SuspendTenantRequest(name=name)),
        (admin.tenants.ResumeTenant, tenants_pb2.ResumeTenantRequest(name=name)),
        (admin.namespaces.GetNamespace, namespaces_pb2.GetNamespaceRequest(name=name)),
        (admin.namespaces.DeleteNamespace, namespaces_pb2.DeleteNamespaceRequest(name=name)),
        (admin.sharing_groups.GetSharingGroup, sharing_groups_pb2.GetSharingGroupRequest(name=name)),
        (admin.sharing_groups.DeleteSharingGroup, sharing_groups_pb2.DeleteSharingGroupRequest(name=name)),
        (admin.sharing_groups.ListSharingGroups, sharing_groups_pb2.ListSharingGroupsRequest(parent=name)),
        (
            admin.sharing_groups.InviteMember,
            sharing_groups_pb2.InviteMemberRequest(name="tenants/a/sharingGroups/g", namespace=name),
        ),
        (
            admin.sharing_groups.AcceptInvitation,
            sharing_groups_pb2.AcceptInvitationRequest(name=name, namespace="tenants/a/namespaces/n"),
        ),
        (admin.namespaces.ListNamespaces, namespaces_pb2.ListNamespacesRequest(parent=name)),
        (admin.namespaces.CreateNamespace, namespaces_pb2.CreateNamespaceRequest(parent=name)),
        (admin.quotas.GetQuota, quotas_pb2.GetQuotaRequest(name=name)),
        (admin.quotas.UpdateQuota, quotas_pb2.UpdateQuotaRequest(quota=quotas_pb2.Quota(name=name))),
        (admin.salt_policies.GetSaltPolicy, salt_policies_pb2.GetSaltPolicyRequest(name=name)),
        (admin.credentials.GetApiKey, credentials_pb2.GetApiKeyRequest(name=name)),
        (admin.credentials.DeleteApiKey, credentials_pb2.DeleteApiKeyRequest(name=name)),
        (admin.usage.GetUsage, usage_pb2.GetUsageRequest(tenant=name)),
    ]
    if name:  # the empty parent is the platform
        calls += [
            (admin.credentials.ListApiKeys, credentials_pb2.ListApiKeysRequest(parent=name)),
            (admin.credentials.CreateApiKey, credentials_pb2.CreateApiKeyRequest(parent=name, api_key_id="a")),
            (admin.audit.ListAuditEvents, audit_pb2.ListAuditEventsRequest(parent=name)),
        ]
    return calls


async def test_a_negative_page_size_is_refused_and_a_huge_one_means_the_largest(admin: Admin) -> None:
    await admin.create_tenant("acme")
    for page_size in (-1, -(2**31)):
        error = await refused(
            admin.tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_size=page_size), metadata=PLATFORM)
        )
        assert isinstance(error, InvalidArgumentError)

    answer = await admin.tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_size=2**31 - 1), metadata=PLATFORM)

    assert len(answer.tenants) == 1


async def test_a_foreign_etag_is_aborted(admin: Admin) -> None:
    await admin.create_tenant("acme")

    for etag in ("?", "\0", 'W/"1"', "?" * 10_000, "*"):
        request = tenants_pb2.DeleteTenantRequest(name="tenants/acme", etag=etag)
        error = await refused(admin.tenants.DeleteTenant(request, metadata=PLATFORM))
        assert isinstance(error, AbortedError)
        assert etag not in error.message


async def test_a_display_name_is_one_line_of_plain_text(admin: Admin) -> None:
    for display_name in ("a\0b", "a\nb", "a\x1b[31m", "a\u202eb", "x" * 129, "x" * 10_000):
        error = await refused(admin.create_tenant("acme", display_name=display_name))
        assert isinstance(error, InvalidArgumentError)
        assert error.metadata["field"] == "display_name"


def token_of(fields: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()


TOKEN = encode_page_token("tenants", "acme")
DIGEST = json.loads(base64.urlsafe_b64decode(TOKEN + "=="))[1]
HOSTILE_TOKENS = [
    "x",
    "\0",
    "ä",
    TOKEN[:-1],
    TOKEN + "A",
    TOKEN * 100,
    "x" * 10_000,
    encode_page_token("tenants/acme/namespaces", "chat"),
    encode_page_token("tenants", 5),
    token_of([1, DIGEST, "a\0b"]),
    token_of([1, DIGEST, "'; --"]),
    token_of([1, DIGEST, None]),
    token_of([1, DIGEST, {"a": 1}]),
    token_of([1, DIGEST]),
    token_of([2, DIGEST, "acme"]),
    token_of([1, DIGEST, "acme", 1]),
    token_of({"a": 1}),
    token_of(1),
    base64.urlsafe_b64encode(b"[" * 150).decode(),
    base64.urlsafe_b64encode(b"\xff\xfe").decode(),
]


async def test_a_page_token_of_another_list_or_of_nobody_is_refused(admin: Admin) -> None:
    for token in HOSTILE_TOKENS:
        request = tenants_pb2.ListTenantsRequest(page_token=token)
        error = await refused(admin.tenants.ListTenants(request, metadata=PLATFORM))
        assert isinstance(error, InvalidArgumentError), token
        assert error.reason == "INVALID_PAGE_TOKEN"


@pytest.mark.parametrize("last", [0, -1, 2**63, 2**200, True, 1.5, "1"])
def test_a_sequence_token_holds_a_sequence(last: object) -> None:
    digest = json.loads(base64.urlsafe_b64decode(encode_page_token("auditEvents", 1) + "=="))[1]

    with pytest.raises(InvalidArgumentError):
        decode_sequence_token(token_of([1, digest, last]), "auditEvents")


@given(st.text(max_size=300))
def test_no_text_is_more_than_an_invalid_page_token(token: str) -> None:
    for decode in (decode_identifier_token, decode_sequence_token):
        try:
            assert decode(token, "tenants") in ("", None)
        except SalternError as error:
            assert error.reason == "INVALID_PAGE_TOKEN"


@given(st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True), st.integers(1, 2**63 - 1))
def test_page_tokens_come_back_as_they_went(identifier: str, sequence: int) -> None:
    assert decode_identifier_token(encode_page_token("c", identifier), "c") == identifier
    assert decode_sequence_token(encode_page_token("c", sequence), "c") == sequence


async def test_bytes_that_are_no_message_do_not_disturb_the_others(admin: Admin) -> None:
    await admin.create_tenant("acme")
    channel: grpc.aio.Channel = admin.channel
    call = channel.unary_unary("/saltern.admin.v1.TenantService/GetTenant")
    for garbage in (b"\xff" * 100, b"\x0a\x03\xff\xfe\xfd", b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(grpc.RpcError):
            await call(garbage, metadata=PLATFORM)

    tenant = await admin.tenants.GetTenant(tenants_pb2.GetTenantRequest(name="tenants/acme"), metadata=PLATFORM)
    assert tenant.name == "tenants/acme"
