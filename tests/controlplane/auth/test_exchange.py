"""Exchange of API keys for tokens: who gets what, and that every refusal of a key reads the same."""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from controlplane.db import models
from controlplane.secrets import issue_api_key, root_secret_context
from saltern import errors
from saltern.admin.v1 import credentials_pb2, tenants_pb2
from saltern.auth.v1 import auth_pb2
from saltern.keys import RootSecret, SaltScope, derive_salt_key
from saltern.names import NamespaceId, TenantId
from saltern.node.v1 import node_pb2
from tenants.roles import Role
from tenants.tokens import Audience, verify_token
from tests.support.control import Control, refused


async def test_i1_the_token_says_whose_key_it_was(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "writer")
    response = await control.exchange(secret, "chat")
    claims = verify_token(
        response.access_token, control.key_ring.key_set, audience=Audience.NODE, now_s=int(time.time())
    )
    assert (claims.tenant, claims.namespace, claims.role) == ("acme", "chat", Role.WRITER)
    assert claims.subject == "tenants/acme/apiKeys/writer"
    assert claims.expires_at_s - claims.issued_at_s == 600
    assert response.expire_time.seconds == claims.expires_at_s
    assert response.tenant_id == "acme"
    assert (response.model_fingerprint, response.block_tokens, response.block_bytes) == ("model of chat", 16, 65536)


async def test_a_token_for_the_control_plane_comes_without_salt_keys(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    response = await control.exchange(secret)
    claims = verify_token(
        response.access_token, control.key_ring.key_set, audience=Audience.CONTROL, now_s=int(time.time())
    )
    assert claims.namespace is None
    assert not response.salt_keys and not response.nodes


async def test_i2_salt_keys_are_derived_from_the_tenants_own_root(control: Control) -> None:
    salts = {}
    for tenant in ("acme", "bravo"):
        await control.add_tenant(tenant, "chat", "code")
        secret = await control.add_api_key(credentials_pb2.ROLE_READER, tenant)
        async with control.database.transaction() as session:
            row = await session.get_one(models.Tenant, tenant)
            epoch = await session.get_one(models.SaltEpoch, (tenant, 1))
        context = root_secret_context(row.uid, 1)
        root = await control.key_encryption_key.unwrap(epoch.wrapped_root_secret, context)
        for namespace in ("chat", "code"):
            response = await control.exchange(secret, namespace)
            (salt,) = response.salt_keys
            assert salt.epoch == 1
            assert salt.key == derive_salt_key(
                RootSecret(root),
                tenant=TenantId(tenant),
                namespace=NamespaceId(namespace),
                scope=SaltScope.TENANT,
                scope_id="",
                epoch=1,
            )
            salts[tenant, namespace] = salt.key
    assert len(set(salts.values())) == 4


async def test_i10_every_refusal_of_a_key_reads_the_same(control: Control) -> None:
    await control.add_tenant("acme")
    deleted = await control.add_api_key(credentials_pb2.ROLE_READER, "acme", "deleted")
    await control.delete_api_key("tenants/acme/apiKeys/deleted")
    expired = await control.add_api_key(
        credentials_pb2.ROLE_READER, "acme", "expired", datetime.now(UTC) + timedelta(days=1)
    )
    async with control.database.transaction() as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        await session.execute(update(models.ApiKey).where(models.ApiKey.id == "expired").values(expire_time=past))
    live = await control.add_api_key(credentials_pb2.ROLE_READER, "acme", "live")
    wrong_secret = live[:-1] + ("A" if live[-1] != "A" else "B")
    answers = set()
    for secret in (deleted, expired, wrong_secret, issue_api_key().secret):
        error = await refused(control.exchange(secret))
        assert type(error) is errors.UnauthenticatedError
        assert secret not in repr(vars(error))
        answers.add((error.reason, error.message, error.hint))
    assert [reason for reason, _, _ in answers] == ["API_KEY_INVALID"]


async def test_a_malformed_key_is_refused_without_repeating_it(control: Control) -> None:
    for text in ("", "hunter2", "sk-saltern-0123456789abcdef-" + "a" * 44, "s\x00k", "ü" * 5000):
        error = await refused(control.exchange(text))
        assert error.reason == "API_KEY_MALFORMED"
        assert not text or text not in repr(vars(error))


async def test_i2_an_absent_namespace_and_a_foreign_one_answer_the_same(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    await control.add_tenant("bravo", "secret-project")
    secret = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    foreign = await refused(control.exchange(secret, "secret-project"))
    absent = await refused(control.exchange(secret, "nowhere"))
    assert type(foreign) is errors.PermissionDeniedError
    assert vars(foreign) == vars(absent)


async def test_the_platform_reads_nobodys_entries(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    node = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node")
    for secret in (control.admin_key, node):
        error = await refused(control.exchange(secret, "chat"))
        assert (type(error), error.reason) == (errors.PermissionDeniedError, "ROLE_REQUIRED")


async def test_roles_that_read_no_entries_get_no_salt_keys(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_TENANT_AUDITOR, "acme")
    assert (await refused(control.exchange(secret, "chat"))).reason == "ROLE_REQUIRED"


async def test_a_suspended_tenant_gets_no_token_until_it_is_resumed(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    admin = await control.bearer(control.admin_key)
    await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=admin)
    for namespace in ("", "chat"):
        error = await refused(control.exchange(secret, namespace))
        assert (type(error), error.reason) == (errors.FailedPreconditionError, "TENANT_SUSPENDED")
    await control.tenants.ResumeTenant(tenants_pb2.ResumeTenantRequest(name="tenants/acme"), metadata=admin)
    assert (await control.exchange(secret, "chat")).access_token


async def test_the_request_must_name_an_audience_and_a_namespace_that_go_together(control: Control) -> None:
    key = control.admin_key
    for request, reason in (
        (auth_pb2.ExchangeApiKeyRequest(api_key=key), "AUDIENCE_REQUIRED"),
        (auth_pb2.ExchangeApiKeyRequest(api_key=key, audience=77), "AUDIENCE_REQUIRED"),  # type: ignore[arg-type]
        (auth_pb2.ExchangeApiKeyRequest(api_key=key, audience=auth_pb2.AUDIENCE_NODE), "INVALID_IDENTIFIER"),
        (
            auth_pb2.ExchangeApiKeyRequest(api_key=key, audience=auth_pb2.AUDIENCE_CONTROL, namespace_id="chat"),
            "NAMESPACE_NOT_ALLOWED",
        ),
    ):
        error = await refused(control.auth.ExchangeApiKey(request))
        assert (type(error), error.reason) == (errors.InvalidArgumentError, reason)


async def test_only_live_nodes_are_named(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_READER, "acme")
    node = await control.bearer(await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="node"))
    for node_id in ("node-a", "node-b"):
        endpoint = auth_pb2.NodeEndpoint(wire_endpoint=f"{node_id}:7701", shm_path="/s", grpc_endpoint="g", host_id="h")
        request = node_pb2.RegisterNodeRequest(node_id=node_id, endpoint=endpoint)
        await control.node.RegisterNode(request, metadata=node)
    async with control.database.transaction() as session:
        long_ago = datetime.now(UTC) - timedelta(minutes=1)
        await session.execute(update(models.Node).where(models.Node.id == "node-b").values(last_report_time=long_ago))
    (named,) = (await control.exchange(secret, "chat")).nodes
    assert named == auth_pb2.NodeEndpoint(
        node_id="node-a", wire_endpoint="node-a:7701", shm_path="/s", grpc_endpoint="g", host_id="h"
    )


async def test_the_last_use_is_noted_at_most_once_a_minute(control: Control) -> None:
    async def last_used() -> datetime | None:
        async with control.database.transaction() as session:
            return (await session.execute(select(models.ApiKey.last_used_time))).scalar_one()

    assert await last_used() is None
    await control.exchange(control.admin_key)
    first = await last_used()
    assert first is not None
    await control.exchange(control.admin_key)
    assert await last_used() == first
    async with control.database.transaction() as session:
        await session.execute(update(models.ApiKey).values(last_used_time=first - timedelta(minutes=2)))
    await control.exchange(control.admin_key)
    assert (await last_used() or first) > first


async def test_the_key_set_verifies_and_has_the_shape_of_a_jwk_set(control: Control) -> None:
    key_set = await control.auth.GetKeySet(auth_pb2.GetKeySetRequest())
    (key,) = key_set.keys
    assert (key.kty, key.crv, key.alg, key.use) == ("OKP", "Ed25519", "EdDSA", "sig")
    assert key.kid == control.key_ring.kid
    assert key_set.issuer == control.key_ring.key_set.issuer
    assert key_set.issuer.startswith("saltern-")


async def test_neither_keys_nor_tokens_are_in_the_database_or_the_log(
    control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme")
    response = await control.exchange(secret, "chat")
    printed = "".join(capsys.readouterr())
    assert secret not in printed and response.access_token not in printed
    assert response.salt_keys[0].key.hex() not in printed
    async with control.database.transaction() as session:
        (stored,) = await session.scalars(select(models.ApiKey).where(models.ApiKey.tenant_id == "acme"))
        signing_key = (await session.scalars(select(models.SigningKey))).one()
    assert stored.secret_sha256 == hashlib.sha256(secret.encode()).digest()
    raw = control.key_ring.private_key.private_bytes_raw()
    assert raw not in signing_key.wrapped_private_key


async def test_exchanges_in_parallel_all_succeed(control: Control) -> None:
    responses = await asyncio.gather(*(control.exchange(control.admin_key) for _ in range(50)))
    assert len({response.access_token for response in responses}) == 50


async def test_i11_a_refused_exchange_is_audited_where_it_belongs(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "writer")
    for key, namespace, parent, actor, resource, reason in (
        (secret, "absent", "tenants/acme", "tenants/acme/apiKeys/writer", "absent", "RESOURCE_NOT_AVAILABLE"),
        (control.admin_key, "chat", "", "apiKeys/bootstrap-admin", "", "ROLE_REQUIRED"),
        (issue_api_key().secret, "chat", "", "anonymous", "", "API_KEY_INVALID"),
    ):
        await refused(control.exchange(key, namespace))
        newest = (await control.events(parent))[0]
        assert (newest.actor, newest.reason) == (actor, reason)
        assert newest.method == "saltern.auth.v1.AuthService/ExchangeApiKey"
        assert newest.resource == (f"tenants/acme/namespaces/{resource}" if resource else "")
    admin = await control.bearer(control.admin_key)
    await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=admin)
    await refused(control.exchange(secret))
    newest = (await control.events("tenants/acme"))[0]
    assert (newest.actor, newest.reason) == ("tenants/acme/apiKeys/writer", "TENANT_SUSPENDED")


async def test_i11_no_secret_reaches_the_audit_trail_by_a_denied_request(control: Control) -> None:
    """A caller who is denied writes what it likes into request_id: its own key, a colleague's token."""
    await control.add_tenant("acme", "chat")
    secret = await control.add_api_key(credentials_pb2.ROLE_READER, "acme", "reader")
    token = (await control.exchange(secret, "chat")).access_token
    bearer_of_reader = await control.bearer(secret)
    for pasted in (secret, token, f"x{secret}", "bootstrap-saltern-" + "A" * 43):
        request = tenants_pb2.SuspendTenantRequest(name="tenants/acme", request_id=pasted)
        error = await refused(control.tenants.SuspendTenant(request, metadata=bearer_of_reader))
        assert error.reason == "ROLE_REQUIRED"
    recorded = [event for event in await control.events("tenants/acme") if event.reason == "ROLE_REQUIRED"]
    assert len(recorded) == 4
    for event in recorded:
        assert "<secret>" in event.request_id
        assert not any(text in str(event) for text in (secret, token, "A" * 43))


async def test_i10_a_token_does_not_outlive_its_key(control: Control) -> None:
    await control.add_tenant("acme", "chat")
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=60)
    secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "short", expire_time=end)
    for namespace in ("", "chat"):
        assert (await control.exchange(secret, namespace)).expire_time.seconds == int(end.timestamp())
