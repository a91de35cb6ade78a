"""Calls of the services of this process, as the person whose browser asks: same door, same services, same audit.

The console reaches them over a unix socket in a folder of its own, whatever the control plane's other listener asks of
its callers, and vouches for the browser's address (``controlplane.auth.vouching``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import Message

from controlplane.auth.vouching import Voucher
from controlplane.console.sessions import Session
from saltern.admin.v1 import (
    audit_pb2_grpc,
    credentials_pb2_grpc,
    namespaces_pb2_grpc,
    quotas_pb2_grpc,
    salt_policies_pb2_grpc,
    sharing_groups_pb2_grpc,
    tenants_pb2_grpc,
    usage_pb2_grpc,
)
from saltern.admin_client import MESSAGE_MAX_BYTES
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.errors import UnauthenticatedError
from saltern.policy_version import read_policy_version
from saltern.rpc_errors import error_from_rpc

_DEADLINE_S: Final = 10.0
#: Tokens that are remembered, one for each session in use here; another one costs an exchange.
_TOKENS_MAX: Final = 1024
#: A token is renewed when a tenth of its life is left.
_RENEW_AT: Final = 0.9
_PAGE_ITEMS: Final = 500
#: What one page shows at most of a list; it says so where there is more.
LIST_ITEMS_MAX: Final = 2000

ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    renew_at_s: float


class Services:
    """Stubs of every service over one channel, and the tokens of the sessions that are in use."""

    def __init__(self, target: str, voucher: Voucher) -> None:
        """``target``: of gRPC, such as ``unix:/run/saltern/console.sock``. Needs a running event loop."""
        self._channel = grpc.aio.insecure_channel(
            target,
            options=[
                ("grpc.enable_http_proxy", 0),
                ("grpc.service_config_disable_resolution", 1),
                ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
                ("grpc.default_authority", "localhost"),
            ],
        )
        self.voucher: Final = voucher
        self._tokens: OrderedDict[bytes, _Token] = OrderedDict()
        self._exchanging: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self.auth: Final[Any] = auth_pb2_grpc.AuthServiceStub(self._channel)  # the stubs know the synchronous API only
        self.tenants: Final[Any] = tenants_pb2_grpc.TenantServiceStub(self._channel)
        self.namespaces: Final[Any] = namespaces_pb2_grpc.NamespaceServiceStub(self._channel)
        self.quotas: Final[Any] = quotas_pb2_grpc.QuotaServiceStub(self._channel)
        self.salt_policies: Final[Any] = salt_policies_pb2_grpc.SaltPolicyServiceStub(self._channel)
        self.sharing_groups: Final[Any] = sharing_groups_pb2_grpc.SharingGroupServiceStub(self._channel)
        self.credentials: Final[Any] = credentials_pb2_grpc.CredentialServiceStub(self._channel)
        self.audit: Final[Any] = audit_pb2_grpc.AuditServiceStub(self._channel)
        self.usage: Final[Any] = usage_pb2_grpc.UsageServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def exchange(self, api_key: str, address: str) -> auth_pb2.ExchangeApiKeyResponse:
        """A token of the control plane for an API key.

        Raises:
            UnauthenticatedError: the key is wrong, or was revoked. FailedPreconditionError: its tenant is suspended.
        """
        request = auth_pb2.ExchangeApiKeyRequest(api_key=api_key, audience=auth_pb2.AUDIENCE_CONTROL)
        metadata = self.voucher.metadata(address)
        response: auth_pb2.ExchangeApiKeyResponse = await _answer(
            self.auth.ExchangeApiKey(request, timeout=_DEADLINE_S, metadata=metadata)
        )
        return response

    async def token_of(self, session: Session, address: str, *, anew: bool = False) -> str:
        """The token of a session: the one that somebody logged in with, or one for its API key.

        Args:
            anew: the one there was is refused by now.

        Raises:
            UnauthenticatedError: as :meth:`exchange`: the session has nothing left to act with.
        """
        if session.login.token:
            return session.login.token
        known = self._tokens.get(session.key)
        async with self._exchanging.setdefault(session.key, asyncio.Lock()):
            # The calls of one page are made at a time: the first of them exchanges for all.
            if self._tokens.get(session.key) is not known:
                anew = False
            known = self._tokens.get(session.key)
            if anew or known is None or monotonic() >= known.renew_at_s:
                known = self.remember(session, await self.exchange(session.login.api_key, address))
        return known.text

    def remember(self, session: Session, answer: auth_pb2.ExchangeApiKeyResponse) -> _Token:
        """Keep the token of a session for its next calls."""
        life_s = max(answer.expire_time.seconds - time(), 1.0)
        token = self._tokens[session.key] = _Token(answer.access_token, monotonic() + life_s * _RENEW_AT)
        self._tokens.move_to_end(session.key)
        while len(self._tokens) > _TOKENS_MAX:
            self._tokens.popitem(last=False)
        return token

    def forget(self, session: Session) -> None:
        """Drop the token of a session that has ended."""
        self._tokens.pop(session.key, None)


class Calls:
    """The calls of one request of a browser.

    Attributes:
        services: whose methods are called, as ``await calls(calls.services.usage.GetUsage, request)``.
        policy_version: of the last change; 0 for none.
    """

    def __init__(self, services: Services, session: Session, address: str) -> None:
        self.services: Final = services
        self._session = session
        self._address = address
        self.policy_version = 0

    async def __call__(self, method: Any, request: Message) -> Any:
        """Call a method of one answer.

        Raises:
            SalternError: whatever the service or the channel answered, decoded.
        """
        try:
            return await self._invoke(method, request, anew=False)
        except UnauthenticatedError as error:
            # The token may have been revoked since it was issued, alone or with all of its tenant's: one new one, one
            # retry. The exchange for it says whether the key is still good.
            if error.reason.startswith("API_KEY_") or self._session.login.token:
                raise
        return await self._invoke(method, request, anew=True)

    async def _invoke(self, method: Any, request: Message, *, anew: bool) -> Any:
        call = method(request, timeout=_DEADLINE_S, metadata=await self._metadata(anew=anew))
        response = await _answer(call)
        self.policy_version = read_policy_version(await call.trailing_metadata()) or self.policy_version
        return response

    async def list(self, method: Any, request: Any, field_name: str, *, items_max: int = LIST_ITEMS_MAX) -> list[Any]:
        """The items of every page, at most ``items_max``."""
        items: list[Any] = []
        request.page_size = min(_PAGE_ITEMS, items_max)
        while True:
            page = await self(method, request)
            items += getattr(page, field_name)
            if not page.next_page_token or len(items) >= items_max:
                return items[:items_max]
            request.page_token = page.next_page_token

    async def stream(self, method: Any, request: Message) -> AsyncIterator[Any]:
        """The answers of a streaming method, for as long as they come.

        Raises:
            SalternError: as a call; also after some answers.
        """
        call = method(request, metadata=await self._metadata(anew=False))
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise error_from_rpc(error, endpoint="the control plane") from None
        finally:
            call.cancel()

    async def _metadata(self, *, anew: bool) -> tuple[tuple[str, str | bytes], ...]:
        token = await self.services.token_of(self._session, self._address, anew=anew)
        return (("authorization", f"Bearer {token}"), *self.services.voucher.metadata(self._address))


async def _answer(call: Awaitable[ResponseT]) -> ResponseT:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_from_rpc(error, endpoint="the control plane") from None
