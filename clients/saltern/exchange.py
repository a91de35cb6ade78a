"""The exchange of an API key, or of a token that was handed over, for a :class:`~saltern.grant.Grant`, over gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from saltern.auth.v1 import auth_pb2
from saltern.auth.v1.auth_pb2_grpc import AuthServiceStub
from saltern.errors import InternalError
from saltern.grant import WHOLE_NAMESPACE, EpochSalt, Grant, NodeEndpoint, SaltScopeChoice
from saltern.keys import KEY_BYTES, SaltKey
from saltern.names import NamespaceId, TenantId
from saltern.rpc_errors import error_from_rpc
from saltern.rpc_tls import open_channel

if TYPE_CHECKING:
    from saltern.tls import ClientTls


def exchange_api_key(
    control: str,
    api_key: str,
    namespace: NamespaceId,
    *,
    timeout_ms: int,
    scope: SaltScopeChoice = WHOLE_NAMESPACE,
    tls: ClientTls | None = None,
) -> Grant:
    """Ask AuthService.ExchangeApiKey for a node token and salt keys of one namespace; over TLS if ``tls`` is given.

    One channel for each exchange: there is one every few minutes, and a channel that lives on does not survive a fork.

    Raises:
        SalternError: what the control plane answered, or UnavailableError or DeadlineExceededError of the channel.
    """
    request = auth_pb2.ExchangeApiKeyRequest(
        api_key=api_key,
        audience=auth_pb2.AUDIENCE_NODE,
        namespace_id=namespace,
        sharing_group=scope.sharing_group,
        project_id=scope.project,
        user_id=scope.user,
        session_id=scope.session,
    )
    with open_channel(control, tls, ()) as channel:
        try:
            response = AuthServiceStub(channel).ExchangeApiKey(request, timeout=timeout_ms / 1000)
        except grpc.RpcError as error:
            # "from None": the RpcError's text could quote the request.
            raise error_from_rpc(error, endpoint=control) from None
    return grant_from_response(response, namespace)


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """What a token is good for.

    Attributes:
        grant: with the token itself; its salts are narrowed as the token is.
        can_write: whether the token's role may store entries.
    """

    grant: Grant
    can_write: bool


def exchange_token(control: str, access_token: str, *, timeout_ms: int, tls: ClientTls | None = None) -> TokenGrant:
    """Ask AuthService.ExchangeToken what a token for nodes is good for; so also whether it still is.

    Raises:
        UnauthenticatedError: it does not verify, has expired or was revoked, or its API key was.
        PermissionDeniedError, FailedPreconditionError: its namespace is gone, its tenant suspended.
        SalternError: what else the control plane answered, or UnavailableError or DeadlineExceededError of the channel.
    """
    request = auth_pb2.ExchangeTokenRequest(access_token=access_token)
    with open_channel(control, tls, ()) as channel:
        try:
            response = AuthServiceStub(channel).ExchangeToken(request, timeout=timeout_ms / 1000)
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint=control) from None
    grant = grant_from_response(response, NamespaceId(response.namespace_id), access_token=access_token)
    return TokenGrant(grant, response.can_write)


def grant_from_response(
    response: auth_pb2.ExchangeApiKeyResponse | auth_pb2.ExchangeTokenResponse,
    namespace: NamespaceId,
    *,
    access_token: str = "",
) -> Grant:
    """Check and convert an answer of the control plane; raises InternalError where it breaks the contract.

    Args:
        access_token: the one that was exchanged; empty where the answer brings one.
    """
    if isinstance(response, auth_pb2.ExchangeApiKeyResponse):
        access_token = response.access_token
    salts = tuple(EpochSalt(salt.epoch, SaltKey(salt.key)) for salt in response.salt_keys)
    if not access_token or not salts or any(len(salt.key) != KEY_BYTES for salt in salts):
        raise InternalError(
            "the control plane's answer holds no token or no usable salt key",
            reason="BAD_EXCHANGE_RESPONSE",
            hint="check that the control plane is of the same release as this client",
        )
    return Grant(
        access_token=access_token,
        expires_at_s=response.expire_time.seconds + response.expire_time.nanos / 1e9,
        tenant=TenantId(response.tenant_id),
        namespace=namespace,
        nodes=tuple(
            NodeEndpoint(
                node.node_id, node.wire_endpoint, node.shm_path, node.host_id, node.tls_server_name, node.read_only
            )
            for node in response.nodes
        ),
        salts=salts,
        epoch=salts[-1].epoch,
        model_fingerprint=response.model_fingerprint.encode(),
        block_tokens=response.block_tokens,
        block_bytes=response.block_bytes,
        sharing_group_uid=response.sharing_group_uid,
    )
