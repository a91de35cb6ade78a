"""The door of the control plane: a grpc.aio interceptor that lets a call in only with a verified caller (I1).

Services that hand out the means to authenticate, or tell only that the service is up, are open; everything else needs
``authorization: Bearer TOKEN`` metadata. A token is verified before the message is read, so that nobody without one can
make the service hold a message; the credential behind it afterwards, at the last moment before the act. Every tenant,
and everybody without a token, has a share of the calls, so that none can take all the places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc

from controlplane.audit import DenialLog
from controlplane.audit.denials import ANONYMOUS
from controlplane.auth.verifier import TokenVerifier
from controlplane.auth.vouching import Voucher
from controlplane.caller import Caller, calling_as, note_peer
from controlplane.rpc import RETRY_AFTER_MS, Context, to_saltern_error
from saltern.errors import FailedPreconditionError, PermissionDeniedError, ResourceExhaustedError, UnauthenticatedError
from saltern.rpc_errors import abort
from saltern.rpc_intake import Admission, Handler, MessageLimits, take_in
from tenants.tokens import Claims

#: Open to everybody, with the number of calls at a time that all of them together may have.
OPEN_SERVICES: Final = {
    "saltern.auth.v1.AuthService": 256,
    "grpc.health.v1.Health": 64,
    "grpc.reflection.v1alpha.ServerReflection": 16,
    "grpc.reflection.v1.ServerReflection": 16,
}
TENANT_CALLS_MAX: Final = 64
#: Every node has a policy stream open.
PLATFORM_CALLS_MAX: Final = 1024
#: Refusals that go into the audit trail; a database that is away is no attempt at anything.
SECURITY_REFUSALS: Final = (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError)
_ADMIN_PACKAGE: Final = "saltern.admin.v1."
ADMIN_REQUEST_MAX_BYTES: Final = 1024 * 1024
_MESSAGE_WAIT_S: Final = 10.0
_FIELDS_MAX: Final = 64
_OPEN_LIMITS: Final = MessageLimits(bytes_max=64 * 1024, fields_max=_FIELDS_MAX, wait_s=_MESSAGE_WAIT_S)
_ADMIN_LIMITS: Final = MessageLimits(bytes_max=ADMIN_REQUEST_MAX_BYTES, fields_max=_FIELDS_MAX, wait_s=_MESSAGE_WAIT_S)
#: A report names every tenant; the server's own limit on messages holds.
_NODE_LIMITS: Final = MessageLimits(bytes_max=2**31, fields_max=None, wait_s=_MESSAGE_WAIT_S)


class AuthenticationDoor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, sets the caller of the others."""

    def __init__(self, verifier: TokenVerifier, denials: DenialLog, voucher: Voucher | None = None) -> None:
        """``voucher``: of the console of this process; by default there is none, and nobody is believed."""
        self._verifier = verifier
        self._denials = denials
        self._voucher = voucher or Voucher()
        self._calls: Counter[str] = Counter()
        self._open: dict[str, Handler] = {}  # by method: what everybody may call is the same for every call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.lstrip("/")
        service = method.partition("/")[0]
        if handler is None:
            return None
        if service in OPEN_SERVICES:
            if method not in self._open:
                self._open[method] = take_in(handler, self._place(service, OPEN_SERVICES[service]), _OPEN_LIMITS)
            return self._open[method]
        try:
            claims = await self._verifier.verify_claims(bearer_token(handler_call_details.invocation_metadata or ()))
        except Exception as error:
            return self._refusing(error, method)
        limits = _ADMIN_LIMITS if method.startswith(_ADMIN_PACKAGE) else _NODE_LIMITS
        calls_max = PLATFORM_CALLS_MAX if claims.tenant is None else TENANT_CALLS_MAX
        return take_in(self._guard(handler, claims, method), self._place(claims.tenant or "", calls_max), limits)

    def _guard(self, handler: Handler, claims: Claims, method: str) -> Handler:
        """The same handler, of the same cardinality, behind the check of the credential."""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            inner_unary: Any = handler.unary_unary  # the stubs know only synchronous handlers

            async def unary(request: Any, context: Context) -> Any:
                with calling_as(await self._check_credential(claims, context, method)):
                    return await inner_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(unary, **codec)
        if handler.unary_stream is not None:
            inner_export: Any = handler.unary_stream

            async def export(request: Any, context: Context) -> AsyncIterator[Any]:
                with calling_as(await self._check_credential(claims, context, method)):
                    async for response in inner_export(request, context):
                        # A long answer may outlive its token, never the credential behind it.
                        await self._check_credential(claims, context, method)
                        yield response

            return grpc.unary_stream_rpc_method_handler(export, **codec)
        assert handler.stream_stream is not None, f"{method} is of a cardinality that no service here has"
        inner_stream: Any = handler.stream_stream

        async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            with calling_as(await self._check_credential(claims, context, method)):
                async for response in inner_stream(requests, context):
                    # A stream may outlive its token, never the credential behind it.
                    await self._check_credential(claims, context, method)
                    yield response

        return grpc.stream_stream_rpc_method_handler(stream, **codec)

    def _refusing(self, error: Exception, method: str) -> Handler:
        """A handler of any call that refuses it before anything of it is read."""

        async def refuse(_requests: object, context: Context) -> NoReturn:
            note_peer(self._voucher.peer_of(context))
            await self._refuse(error, None, context, method)

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _place(self, owner: str, calls_max: int) -> Admission:
        """Admits at most ``calls_max`` calls of ``owner`` at a time."""
        return lambda context: _Place(self._calls, owner, calls_max, context, self._voucher)

    async def _check_credential(self, claims: Claims, context: Context, method: str) -> Caller:
        """The caller; ends the call with a status if the credential behind the token is no longer what it was."""
        try:
            return await self._verifier.check_credential(claims)
        except Exception as error:
            await self._refuse(error, claims, context, method)

    async def _refuse(self, error: Exception, claims: Claims | None, context: Context, method: str) -> NoReturn:
        refusal = to_saltern_error(error, method=method)
        if isinstance(refusal, SECURITY_REFUSALS):
            await self._denials.record_denied(
                refusal,
                method=method,
                tenant=claims.tenant if claims else None,
                actor=claims.subject if claims else ANONYMOUS,
                role=claims.role if claims else None,
            )
        await abort(context, refusal)


class _Place:
    """One of the ``calls_max`` places of ``owner``, for the time of a call. Made for every call: no generator."""

    __slots__ = ("_calls", "_calls_max", "_context", "_owner", "_voucher")

    def __init__(self, calls: Counter[str], owner: str, calls_max: int, context: Context, voucher: Voucher) -> None:
        self._calls = calls
        self._owner = owner
        self._calls_max = calls_max
        self._context = context
        self._voucher = voucher

    async def __aenter__(self) -> None:
        note_peer(self._voucher.peer_of(self._context))
        if self._calls[self._owner] >= self._calls_max:
            await abort(self._context, _too_many_calls(self._calls_max))
        self._calls[self._owner] += 1

    async def __aexit__(self, *_raised: object) -> None:
        self._calls[self._owner] -= 1
        if not self._calls[self._owner]:
            del self._calls[self._owner]


def bearer_token(metadata: Any) -> str:
    """The token of a call's metadata.

    Raises:
        UnauthenticatedError: TOKEN_MISSING, or TOKEN_MALFORMED where there is not exactly one bearer token.
    """
    values = [entry[1] for entry in metadata if entry[0] == "authorization"]
    if not values:
        raise UnauthenticatedError(
            "this method needs a token", reason="TOKEN_MISSING", hint="send authorization: Bearer TOKEN"
        )
    scheme, _, token = values[0].partition(" ") if isinstance(values[0], str) else ("", "", "")
    if len(values) > 1 or scheme.lower() != "bearer":
        raise UnauthenticatedError(
            "the authorization metadata is not one bearer token",
            reason="TOKEN_MALFORMED",
            hint="send authorization: Bearer TOKEN, once",
        )
    return token


def _too_many_calls(calls_max: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"{calls_max} calls are in progress already, and that is this caller's share",
        reason="TOO_MANY_CALLS",
        hint="wait for answers before making more calls",
        retry_after_ms=RETRY_AFTER_MS,
        metadata={"limit_calls": str(calls_max)},
    )
