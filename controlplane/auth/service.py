"""AuthService: the only door that takes long-lived credentials. Contract: auth.proto."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import DenialLog
from controlplane.audit.denials import ANONYMOUS
from controlplane.auth import bootstrap
from controlplane.auth.exchange import (
    Credential,
    NamespaceGrant,
    grant_namespace,
    issue_token,
    note_use,
    require_active,
    verify_api_key,
)
from controlplane.auth.key_set import encode_key_set
from controlplane.auth.signing_keys import SigningKeys
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, TenantScope, models, narrow
from controlplane.node.registry import live_nodes
from controlplane.rpc import Context, unary
from controlplane.secrets import KeyEncryptionKey
from controlplane.settings import TOKEN_LIFETIME_DEFAULT_S
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from saltern.names import ApiKeyId, NamespaceId, namespace_name, parse_identifier, parse_namespace_id
from tenants.tokens import Audience

_AUDIENCES: Final = {auth_pb2.AUDIENCE_CONTROL: Audience.CONTROL, auth_pb2.AUDIENCE_NODE: Audience.NODE}
_EXCHANGE_METHOD: Final = "saltern.auth.v1.AuthService/ExchangeApiKey"
_FIRST_API_KEY_ID: Final = "bootstrap-admin"

_log = structlog.get_logger(__name__)


class AuthService(auth_pb2_grpc.AuthServiceServicer):
    """Exchanges credentials for tokens. Needs no token itself.

    There is no throttle on wrong API keys: 256 random bits are not guessed, and one that counts by address would lock
    out everybody behind the same gateway.
    """

    def __init__(
        self,
        *,
        database: Database,
        key_encryption_key: KeyEncryptionKey,
        keys: SigningKeys,
        denials: DenialLog,
        state_dir: Path,
        token_lifetime_s: int = TOKEN_LIFETIME_DEFAULT_S,
        clock: Clock = utc_now,
    ) -> None:
        self._token_lifetime_s = token_lifetime_s
        self._database = database
        self._key_encryption_key = key_encryption_key
        self._keys = keys
        self._denials = denials
        self._state_dir = state_dir
        self._clock = clock

    @unary
    async def ExchangeApiKey(  # noqa: N802 (gRPC's spelling)
        self, request: auth_pb2.ExchangeApiKeyRequest, context: Context
    ) -> auth_pb2.ExchangeApiKeyResponse:
        audience, namespace_id = _decode_audience(request)
        now = self._clock()
        actor, tenant = ANONYMOUS, None
        try:
            async with self._database.transaction(ServiceScope(ServiceTask.CREDENTIAL_LOOKUP)) as session:
                credential = await verify_api_key(session, request.api_key, now)
                actor, tenant = credential.name, credential.tenant_id
                if tenant is not None:
                    await narrow(session, TenantScope(tenant))
                require_active(credential.tenant)
                return await self._exchange(session, credential, audience, namespace_id, now)
        except (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError) as error:
            _log.info("exchange refused", reason=error.reason)
            # Outside the transaction, which is undone: an attempt belongs to the trail although nothing came of it.
            await self._denials.record_denied(
                error,
                method=_EXCHANGE_METHOD,
                resource=namespace_name(tenant, namespace_id) if tenant and namespace_id else "",
                tenant=tenant,
                actor=actor,
            )
            raise

    async def _exchange(
        self,
        session: AsyncSession,
        credential: Credential,
        audience: Audience,
        namespace_id: NamespaceId | None,
        now: datetime,
    ) -> auth_pb2.ExchangeApiKeyResponse:
        grant: NamespaceGrant | None = None
        nodes: list[models.Node] = []
        if namespace_id is not None:
            grant = await grant_namespace(session, self._key_encryption_key, credential, namespace_id)
            nodes = await live_nodes(session, now)
        await note_use(session, credential, now)
        key_ring = await self._keys.signing(session)
        token, claims = issue_token(
            key_ring, credential, audience, namespace_id, now=now, lifetime_s=self._token_lifetime_s
        )
        _log.info("token issued", subject=claims.subject, audience=audience.value, token_id=claims.token_id)
        return _encode_exchange(token, claims.expires_at_s, credential, grant, nodes)

    @unary
    async def RedeemBootstrapToken(  # noqa: N802
        self, request: auth_pb2.RedeemBootstrapTokenRequest, context: Context
    ) -> auth_pb2.RedeemBootstrapTokenResponse:
        api_key_id = ApiKeyId(parse_identifier(request.api_key_id or _FIRST_API_KEY_ID, what="API key"))
        try:
            async with self._database.transaction(ServiceScope(ServiceTask.BOOTSTRAP)) as session:
                key = await bootstrap.redeem(session, request.bootstrap_token, api_key_id, self._clock())
        except UnauthenticatedError as error:
            await self._denials.record_denied(error, method=bootstrap.REDEEM_METHOD)
            raise
        (self._state_dir / bootstrap.FILE_NAME).unlink(missing_ok=True)  # good for nothing any more
        _log.info("bootstrap token redeemed", api_key=key.name)
        return auth_pb2.RedeemBootstrapTokenResponse(api_key_name=key.name, secret=key.secret)

    @unary
    async def GetKeySet(  # noqa: N802
        self, request: auth_pb2.GetKeySetRequest, context: Context
    ) -> auth_pb2.KeySet:
        return encode_key_set((await self._keys.refresh()).key_set)


def _decode_audience(request: auth_pb2.ExchangeApiKeyRequest) -> tuple[Audience, NamespaceId | None]:
    audience = _AUDIENCES.get(request.audience)
    if audience is None:
        raise InvalidArgumentError(
            "the request names no known audience",
            reason="AUDIENCE_REQUIRED",
            hint="ask for AUDIENCE_CONTROL, or for AUDIENCE_NODE with a namespace_id",
        )
    if audience is Audience.NODE:
        return audience, parse_namespace_id(request.namespace_id)
    if request.namespace_id:
        raise InvalidArgumentError(
            "a token for the control plane is for no namespace",
            reason="NAMESPACE_NOT_ALLOWED",
            hint="leave namespace_id empty, or ask for AUDIENCE_NODE",
        )
    return audience, None


def _encode_exchange(
    token: str, expires_at_s: int, credential: Credential, grant: NamespaceGrant | None, nodes: list[models.Node]
) -> auth_pb2.ExchangeApiKeyResponse:
    response = auth_pb2.ExchangeApiKeyResponse(access_token=token, tenant_id=credential.tenant_id or "")
    response.expire_time.FromSeconds(expires_at_s)
    if grant is not None:
        response.salt_keys.extend(auth_pb2.SaltKey(epoch=epoch, key=key) for epoch, key in grant.salt_keys)
        response.model_fingerprint = grant.namespace.model_fingerprint
        response.block_tokens = grant.namespace.block_tokens
        response.block_bytes = grant.namespace.block_bytes
    response.nodes.extend(
        auth_pb2.NodeEndpoint(
            node_id=node.id,
            wire_endpoint=node.wire_endpoint,
            shm_path=node.shm_path,
            grpc_endpoint=node.grpc_endpoint,
            host_id=node.host_id,
            tls_server_name=node.tls_server_name,
        )
        for node in nodes
    )
    return response
