"""The channel of a node to its control plane: its TLS, its short-lived token, and failures as errors of the tree.

What is said over it is :mod:`dataplane.control_client`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import time
from typing import Final, NoReturn, TypeVar

import grpc
import structlog

from dataplane.metrics.health import ControlLink
from dataplane.policy_file import SNAPSHOT_MAX_BYTES
from saltern.admin_client import ApiKey
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import InternalError, PermissionDeniedError, SalternError, UnavailableError
from saltern.node.v1 import node_pb2, node_pb2_grpc
from saltern.rpc_errors import error_from_rpc
from saltern.rpc_tls import open_aio_channel
from saltern.tls import ClientTls, file_stamps

_log = structlog.get_logger(__name__)

CALL_DEADLINE_S: Final = 5.0
#: A token is exchanged anew when it has this long to live.
TOKEN_MARGIN_S: Final = 60.0
_CHANNEL_OPTIONS: Final = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_receive_message_length", SNAPSHOT_MAX_BYTES),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

PolicyStream = grpc.aio.StreamStreamCall[node_pb2.StreamPolicyRequest, node_pb2.StreamPolicyResponse]
T = TypeVar("T")


class ControlChannel:
    """Calls of one node, each with a token in force. Every failure of a call is raised as an error of the tree.

    Args:
        endpoint: ``host:port`` of the control plane.
        api_key: of the role node; exchanged for short-lived tokens.
        tls: whom to trust at the other end; None for plain text.
    """

    def __init__(self, endpoint: str, api_key: ApiKey, tls: ClientTls | None) -> None:
        self.endpoint = endpoint
        #: How the line fares, for whoever watches the node.
        self.link = ControlLink()
        self._api_key = api_key
        self._tls = tls
        self._token = ""
        self._token_expires_s = 0.0

    def open(self) -> None:
        """Raises SalternError: a file of ``tls`` cannot be used."""
        self._stamps = () if self._tls is None else file_stamps(self._tls.files)
        self._channel = open_aio_channel(self.endpoint, self._tls, _CHANNEL_OPTIONS)
        self._auth = auth_pb2_grpc.AuthServiceStub(self._channel)
        self._nodes = node_pb2_grpc.NodeServiceStub(self._channel)

    async def close(self) -> None:
        """End every call."""
        await self._channel.close()

    async def renew(self) -> None:
        """Take up TLS files that were replaced since: a channel goes on with those that it began with."""
        if self._tls is None or file_stamps(self._tls.files) == self._stamps:
            return
        old = self._channel
        try:
            self.open()
        except SalternError as error:
            _log.error("changed TLS files cannot be used", reason=error.reason, message=error.message)
            return
        await old.close()
        _log.info("calling the control plane with new TLS files")

    # ---- calls

    async def authenticate(self) -> None:
        """Have a token that is in force for a while yet.

        Raises:
            PermissionDeniedError: ROLE_REQUIRED: the API key is a tenant's.
            SalternError: as the control plane refuses the key, or cannot be reached.
        """
        if time() < self._token_expires_s - TOKEN_MARGIN_S:
            return
        request = auth_pb2.ExchangeApiKeyRequest(api_key=self._api_key.reveal(), audience=auth_pb2.AUDIENCE_CONTROL)
        response = await self._call(self._auth.ExchangeApiKey(request, timeout=CALL_DEADLINE_S))
        if response.tenant_id:
            raise PermissionDeniedError(
                f"the API key belongs to tenant {response.tenant_id!r}, not to a node",
                reason="ROLE_REQUIRED",
                hint="give --api-key-file a key of the role node, made by a platform administrator",
            )
        self._token = response.access_token
        self._token_expires_s = response.expire_time.seconds

    def forget_token(self) -> None:
        """The token was revoked, or the key that signed it: get another."""
        self._token_expires_s = 0.0

    async def register(self, request: node_pb2.RegisterNodeRequest) -> node_pb2.RegisterNodeResponse:
        """Register the node."""
        await self.authenticate()
        return await self._call(self._nodes.RegisterNode(request, metadata=self._metadata(), timeout=CALL_DEADLINE_S))

    async def report_usage(self, request: node_pb2.ReportUsageRequest) -> node_pb2.ReportUsageResponse:
        """Report what is used. A caller that builds its report for long authenticates before."""
        return await self._call(self._nodes.ReportUsage(request, metadata=self._metadata(), timeout=CALL_DEADLINE_S))

    def stream_policy(self) -> PolicyStream:
        """Follow the policy. Whoever reads turns its failures into errors with :meth:`raise_status`."""
        return self._nodes.StreamPolicy(metadata=self._metadata())

    async def raise_status(self, call: PolicyStream) -> NoReturn:
        """Raise what ended a stream: a write on an ended one only says that it has ended."""
        code = await call.code()
        if code is grpc.StatusCode.OK:
            raise UnavailableError("the control plane closed the policy stream", reason="STREAM_CLOSED")
        error = grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
        raise error_from_rpc(error, endpoint=self.endpoint)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    async def _call(self, call: Awaitable[T]) -> T:
        """Await a call; raises its failure as an error of the tree."""
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, endpoint=self.endpoint) from None
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise InternalError(f"the call to {self.endpoint} failed: {type(error).__name__}") from error
        self.link.heard()
        return answer
