"""Every secret of a deployment is known here, goes through real calls, and turns up nowhere it is not meant to."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from sqlalchemy import select

from controlplane.audit.checkpoint_keys import load_checkpoint_key
from controlplane.clock import utc_now
from controlplane.db import models
from controlplane.log import configure_logging
from controlplane.secrets import load_key_encryption_key, root_secret_context
from saltern.admin.v1 import audit_pb2, credentials_pb2, namespaces_pb2, quotas_pb2, tenants_pb2
from saltern.audit.formats import TEXT_FORMATS
from saltern.auth.v1 import auth_pb2
from tests.support.control import Control, bearer, control_plane, migrate, text_of
from tests.support.scopes import connect_to_all


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that is logged, by whomever, as the service writes it."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    before = structlog.get_config()
    configure_logging()
    structlog.configure(cache_logger_on_first_use=False)  # loggers that outlive this test must go their own way again
    yield stream
    structlog.configure(**before)
    root.removeHandler(handler)
    root.setLevel(level)


def forms_of(secret: bytes) -> set[bytes]:
    """The ways in which bytes are usually written down."""
    encoded = {secret, secret.hex().encode(), base64.b64encode(secret), base64.urlsafe_b64encode(secret)}
    escaped = "".join(f"\\x{byte:02x}" for byte in secret).encode()
    return {form.rstrip(b"=") for form in encoded} | {secret.hex().upper().encode(), escaped, repr(secret).encode()}


async def everything_exported(control: Control) -> dict[str, bytes]:
    """Each chain in each format."""
    metadata = await control.bearer(control.admin_key)
    found: dict[str, bytes] = {}
    for parent in ("", "tenants/acme", "tenants/globex"):
        lines = b""
        request = audit_pb2.ExportAuditEventsRequest(parent=parent)
        async for response in control.audit.ExportAuditEvents(request, metadata=metadata):
            lines += response.lines
        assert lines
        found |= {f"{parent} as {name}": form.encode(lines) for name, form in TEXT_FORMATS.items()}
        listed = audit_pb2.ListAuditEventsRequest(parent=parent, page_size=1000)
        found[f"{parent} listed"] = (await control.audit.ListAuditEvents(listed, metadata=metadata)).SerializeToString()
    return found


class Errors:
    """Calls that fail, and everything that their callers are told."""

    def __init__(self) -> None:
        self.told: list[bytes] = []

    async def of(self, call: Any) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            trailers = [f"{key}={value!r}" for key, value in error.trailing_metadata() or ()]
            self.told.append("\n".join([str(error), error.details() or "", *trailers]).encode())


async def test_i11_no_secret_is_in_any_export_log_or_error(postgres: Any, tmp_path: Path, logged: io.StringIO) -> None:
    errors = Errors()
    with postgres.fresh_database(migrate) as urls:
        async with control_plane(urls, tmp_path) as control:
            bootstrap_token = control.bootstrap_token()
            await errors.of(
                control.auth.RedeemBootstrapToken(
                    auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=bootstrap_token, api_key_id=bootstrap_token)
                )
            )
            admin_key = await control.redeem()
            for tenant in ("acme", "globex"):
                await control.add_tenant(tenant, "chat", limit_bytes=1 << 20)
            writer_key = await control.add_api_key(credentials_pb2.ROLE_WRITER, "acme", "writer")
            admin_token = (await control.exchange(admin_key)).access_token
            writer_token = (await control.exchange(writer_key)).access_token
            await control.rotate_salt("acme")
            node_session = await control.exchange(writer_key, "chat", project_id="p-1", user_id="ann")
            assert len(node_session.salt_keys) == 2

            texts = {
                "bootstrap token": bootstrap_token,
                "administrator's key": admin_key,
                "tenant's key": writer_key,
                "administrator's token": admin_token,
                "tenant's token": writer_token,
                "node token": node_session.access_token,
                "database password": str(urls.app.password),
                "owner's database password": str(urls.owner.password),
            }
            # A password has no form by which anybody could know it for one; nobody but its own process has it to paste.
            for pasted in (text for name, text in texts.items() if "password" not in name):
                await paste(control, errors, pasted, bearer(admin_token), bearer(writer_token))
            secrets = {name: forms_of(text.encode()) for name, text in texts.items()}
            binary = await binary_secrets(control, text_of(urls.app), tmp_path)
            binary |= {f"salt key {one.epoch}": one.key for one in node_session.salt_keys}
            secrets |= {name: forms_of(secret) for name, secret in binary.items()}
            places = await everything_exported(control)
    places["log"] = logged.getvalue().encode()
    places["errors"] = b"\n".join(errors.told)
    for path in (tmp_path / "audit-checkpoints").rglob("*.jsonl"):
        places[str(path)] = path.read_bytes()

    assert (
        len(errors.told) > 50 and b"denied" in places["tenants/acme as jsonl"] and b"exchange refused" in places["log"]
    )
    assert set(map(type, binary.values())) == {bytes}
    for place, content in places.items():
        for name, forms in secrets.items():
            # Also what is left of one that was cut off: 40 characters of a key or token are too many.
            cut = {form[:40] for form in forms if len(form) > 40 and "password" not in name}
            assert not any(form in content for form in forms | cut), f"the {name} is in: {place}"


async def paste(control: Control, errors: Errors, pasted: str, admin: Any, writer: Any) -> None:
    """Real calls, allowed and denied, with a secret in every field that takes a text."""
    tenants, namespaces, credentials = control.tenants, control.namespaces, control.credentials
    tenant = tenants_pb2.Tenant(name=f"tenants/{pasted}", display_name=pasted, etag=pasted)
    namespace = namespaces_pb2.Namespace(model_fingerprint=pasted, block_tokens=16, block_bytes=4096)
    key = credentials_pb2.ApiKey(role=credentials_pb2.ROLE_READER, display_name=pasted)
    for metadata in (admin, writer):
        for call in (
            tenants.CreateTenant(tenants_pb2.CreateTenantRequest(tenant_id=pasted, tenant=tenant), metadata=metadata),
            tenants.CreateTenant(
                tenants_pb2.CreateTenantRequest(tenant_id="third", tenant=tenant, request_id=pasted), metadata=metadata
            ),
            tenants.GetTenant(tenants_pb2.GetTenantRequest(name=pasted), metadata=metadata),
            tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme", etag=pasted), metadata=metadata),
            tenants.ListTenants(tenants_pb2.ListTenantsRequest(page_token=pasted), metadata=metadata),
            namespaces.CreateNamespace(
                namespaces_pb2.CreateNamespaceRequest(
                    parent="tenants/globex", namespace_id=pasted, namespace=namespace
                ),
                metadata=metadata,
            ),
            namespaces.GetNamespace(
                namespaces_pb2.GetNamespaceRequest(name=f"tenants/globex/namespaces/{pasted}"), metadata=metadata
            ),
            control.quotas.GetQuota(quotas_pb2.GetQuotaRequest(name=f"tenants/{pasted}/quota"), metadata=metadata),
            credentials.CreateApiKey(
                credentials_pb2.CreateApiKeyRequest(parent="tenants/globex", api_key_id=pasted, api_key=key),
                metadata=metadata,
            ),
            credentials.DeleteApiKey(credentials_pb2.DeleteApiKeyRequest(name=f"apiKeys/{pasted}"), metadata=metadata),
            control.audit.ListAuditEvents(audit_pb2.ListAuditEventsRequest(parent=pasted), metadata=metadata),
        ):
            await errors.of(call)
    await errors.of(tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=bearer(pasted + "x")))
    await errors.of(tenants.ListTenants(tenants_pb2.ListTenantsRequest(), metadata=(("authorization", pasted),)))
    exchange = auth_pb2.ExchangeApiKeyRequest(api_key=pasted[:-1], audience=auth_pb2.AUDIENCE_NODE, namespace_id=pasted)
    await errors.of(control.auth.ExchangeApiKey(exchange))
    exchange = auth_pb2.ExchangeApiKeyRequest(api_key=pasted + "A", audience=auth_pb2.AUDIENCE_CONTROL)
    await errors.of(control.auth.ExchangeApiKey(exchange))
    redeem = auth_pb2.RedeemBootstrapTokenRequest(bootstrap_token=pasted, api_key_id="again")
    await errors.of(control.auth.RedeemBootstrapToken(redeem))


async def binary_secrets(control: Control, url: str, state_dir: Path) -> dict[str, bytes]:
    """What lies wrapped in the database, and the key that it is wrapped under."""
    key_encryption_key = load_key_encryption_key(state_dir, create=False)
    database = connect_to_all(url)
    try:
        async with database.transaction() as session:
            epochs = select(models.Tenant.uid, models.SaltEpoch).join(models.SaltEpoch)
            roots_at_rest = [(uid, epoch) for uid, epoch in await session.execute(epochs)]
        checkpoint_key = await load_checkpoint_key(control.database, key_encryption_key, utc_now)
        roots = {
            f"root secret of {row.tenant_id}, epoch {row.epoch}": await key_encryption_key.unwrap(
                row.wrapped_root_secret, root_secret_context(uid, row.epoch)
            )
            for uid, row in roots_at_rest
        }
    finally:
        await database.close()
    return roots | {
        "token-signing key": control.key_ring.private_key.private_bytes_raw(),
        "checkpoint key": checkpoint_key.private_key.private_bytes_raw(),
        "key-encryption key": bytes.fromhex((state_dir / "key-encryption-key").read_text().strip()),
    }
