"""AuthService: the only door that takes long-lived credentials. Contract: auth.proto."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from controlplane.audit import DenialLog
from controlplane.audit.denials import ANONYMOUS
from controlplane.audit.redaction import require_no_secrets
from controlplane.auth import bootstrap
from controlplane.auth.exchange_queue import EXCHANGE_METHOD, Ask, Denied, ExchangeQueue, Granted
from controlplane.auth.exchange_token import TokenAsk, TokenExchange, TokenGrant
from controlplane.auth.facts import NodeFacts
from controlplane.auth.key_set import encode_key_set
from controlplane.auth.signing_keys import SigningKeys
from controlplane.caller import current_peer
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, ServiceScope, ServiceTask, models
from controlplane.rpc import Context, unary
from controlplane.secrets import KeyEncryptionKey
from controlplane.settings import TOKEN_LIFETIME_DEFAULT_S
from controlplane.sharing.salts import GroupName
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from saltern.keys import NOT_NARROWED, Narrowing
from saltern.names import (
    ApiKeyId,
    NamespaceId,
    namespace_name,
    parse_identifier,
    parse_namespace_id,
    parse_sharing_group_name,
)
from tenants.roles import PERMISSIONS, Permission
from tenants.salts import parse_scope_id
from tenants.tokens import Audience

_AUDIENCES: Final = {auth_pb2.AUDIENCE_CONTROL: Audience.CONTROL, auth_pb2.AUDIENCE_NODE: Audience.NODE}
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
        self._exchanges = ExchangeQueue(
            database, key_encryption_key, keys, token_lifetime_s=token_lifetime_s, clock=clock
        )
        self._token_exchange = TokenExchange(database, key_encryption_key, keys, denials, clock=clock)
        self._database = database
        self._keys = keys
        self._denials = denials
        self._state_dir = state_dir
        self._clock = clock

    @unary
    async def ExchangeApiKey(  # noqa: N802 (gRPC's spelling)
        self, request: auth_pb2.ExchangeApiKeyRequest, context: Context
    ) -> auth_pb2.ExchangeApiKeyResponse:
        audience, namespace_id = _decode_audience(request)
        narrowing, group = _decode_narrowing(request), _decode_group(request)
        if narrowing != NOT_NARROWED and audience is not Audience.NODE:
            raise InvalidArgumentError(
                "a token for the control plane comes with no salt to narrow",
                reason="SALT_SCOPE_NOT_ALLOWED",
                hint="leave project_id, user_id and session_id empty, or ask for AUDIENCE_NODE",
            )
        ask = Ask(request.api_key, audience, namespace_id, current_peer(), narrowing, group)
        outcome = await self._exchanges.exchange(ask)
        if isinstance(outcome, Denied):
            _log.info("exchange refused", reason=outcome.error.reason)
            # Outside the transaction of the others: an attempt belongs to the trail although nothing came of it.
            tenant = outcome.tenant
            await self._denials.record_denied(
                outcome.error,
                method=EXCHANGE_METHOD,
                resource=namespace_name(tenant, namespace_id) if tenant and namespace_id else "",
                tenant=tenant,
                actor=outcome.credential.name if outcome.credential else ANONYMOUS,
            )
            raise outcome.error
        return _encode_exchange(outcome)

    @unary
    async def ExchangeToken(  # noqa: N802
        self, request: auth_pb2.ExchangeTokenRequest, context: Context
    ) -> auth_pb2.ExchangeTokenResponse:
        ask = TokenAsk(request.access_token, _decode_narrowing(request), current_peer())
        try:
            return _encode_token_grant(await self._token_exchange.exchange(ask))
        except (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError) as error:
            _log.info("exchange of a token refused", reason=error.reason)
            raise

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


def _decode_narrowing(request: auth_pb2.ExchangeApiKeyRequest | auth_pb2.ExchangeTokenRequest) -> Narrowing:
    narrowing = Narrowing(
        project=parse_scope_id(request.project_id, "project_id"),
        user=parse_scope_id(request.user_id, "user_id"),
        session=parse_scope_id(request.session_id, "session_id"),
    )
    # It goes into the audit event: a secret pasted here is refused before it can hold up the exchanges beside it.
    require_no_secrets([narrowing.project, narrowing.user, narrowing.session])
    return narrowing


def _decode_group(request: auth_pb2.ExchangeApiKeyRequest) -> GroupName | None:
    if not request.sharing_group:
        return None
    if request.audience != auth_pb2.AUDIENCE_NODE:
        raise InvalidArgumentError(
            "a token for the control plane is for no sharing group",
            reason="SHARING_GROUP_NOT_ALLOWED",
            hint="leave sharing_group empty, or ask for AUDIENCE_NODE",
        )
    return parse_sharing_group_name(request.sharing_group)


def _encode_exchange(granted: Granted) -> auth_pb2.ExchangeApiKeyResponse:
    response = auth_pb2.ExchangeApiKeyResponse(access_token=granted.token, tenant_id=granted.credential.tenant_id or "")
    response.expire_time.FromSeconds(granted.claims.expires_at_s)
    grant = granted.grant
    if grant is not None:
        response.salt_keys.extend(auth_pb2.SaltKey(epoch=epoch, key=key) for epoch, key in grant.salt_keys)
        response.model_fingerprint = grant.namespace.model_fingerprint
        response.block_tokens = grant.namespace.block_tokens
        response.block_bytes = grant.namespace.block_bytes
        response.sharing_group_uid = grant.group_uid
    response.nodes.extend(map(_encode_node, granted.nodes))
    return response


def _encode_token_grant(granted: TokenGrant) -> auth_pb2.ExchangeTokenResponse:
    grant = granted.grant
    response = auth_pb2.ExchangeTokenResponse(
        tenant_id=grant.namespace.tenant_id,
        namespace_id=grant.namespace.id,
        salt_keys=[auth_pb2.SaltKey(epoch=epoch, key=key) for epoch, key in grant.salt_keys],
        model_fingerprint=grant.namespace.model_fingerprint,
        block_tokens=grant.namespace.block_tokens,
        block_bytes=grant.namespace.block_bytes,
        nodes=map(_encode_node, granted.nodes),
        sharing_group_uid=grant.group_uid,
        project_id=grant.narrowing.project,
        user_id=grant.narrowing.user,
        session_id=grant.narrowing.session,
        can_write=Permission.ENTRIES_WRITE in PERMISSIONS[granted.claims.role],
    )
    response.expire_time.FromSeconds(granted.claims.expires_at_s)
    return response


def _encode_node(node: NodeFacts) -> auth_pb2.NodeEndpoint:
    return auth_pb2.NodeEndpoint(
        node_id=node.id,
        wire_endpoint=node.wire_endpoint,
        shm_path=node.shm_path,
        grpc_endpoint=node.grpc_endpoint,
        host_id=node.host_id,
        tls_server_name=node.tls_server_name,
        read_only=node.admin_state is not models.NodeAdminState.ACTIVE,
    )
