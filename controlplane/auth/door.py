"""The door of the control plane: a grpc.aio interceptor that lets a call in only with a verified caller (I1).

Services that hand out the means to authenticate, or tell only that the service is up, are open; everything else needs
``authorization: Bearer TOKEN`` metadata. The check runs inside the handler, so that it has the call's context to refuse
with a whole status, and so that the caller is set for exactly the coroutine that serves the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message

from controlplane.audit import DenialLog
from controlplane.audit.denials import ANONYMOUS
from controlplane.auth.verifier import TokenVerifier, to_caller
from controlplane.caller import calling_as
from controlplane.rpc import Context, to_saltern_error
from saltern.errors import FailedPreconditionError, PermissionDeniedError, ResourceExhaustedError, UnauthenticatedError
from saltern.rpc_errors import abort
from tenants.tokens import Claims

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OPEN_SERVICES: Final = frozenset(
    {
        "saltern.auth.v1.AuthService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    }
)
#: Refusals that go into the audit trail; a database that is away is no attempt at anything.
SECURITY_REFUSALS: Final = (UnauthenticatedError, PermissionDeniedError, FailedPreconditionError)
_ADMIN_PACKAGE: Final = "saltern.admin.v1."
ADMIN_REQUEST_MAX_BYTES: Final = 1024 * 1024


class AuthenticationDoor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, sets the caller of the others."""

    def __init__(self, verifier: TokenVerifier, denials: DenialLog) -> None:
        self._verifier = verifier
        self._denials = denials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.lstrip("/")
        if handler is None or method.partition("/")[0] in OPEN_SERVICES:
            return handler
        return self._guard(handler, method)

    def _guard(self, handler: Handler, method: str) -> Handler:
        """The same handler behind the check, of the same cardinality."""
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            inner_unary: Any = handler.unary_unary  # the stubs know only synchronous handlers

            async def unary(request: Any, context: Context) -> Any:
                claims = await self._admit(request, context, method)
                with calling_as(to_caller(claims)):
                    return await inner_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(unary, **codec)
        assert handler.stream_stream is not None, f"{method} is of a cardinality that no service here has"
        inner_stream: Any = handler.stream_stream

        async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            claims = await self._admit(None, context, method)
            with calling_as(to_caller(claims)):
                async for response in inner_stream(requests, context):
                    # A stream may outlive its token, never the credential behind it.
                    await self._check_again(claims, context, method)
                    yield response

        return grpc.stream_stream_rpc_method_handler(stream, **codec)

    async def _admit(self, request: Message | None, context: Context, method: str) -> Claims:
        """Verify the call; ends it with a status if it may not go on."""
        claims = None
        try:
            claims = self._verifier.verify_claims(bearer_token(context.invocation_metadata() or ()))
            await self._verifier.check_credential(claims)
            check_request_size(request, method)
        except Exception as error:
            await self._refuse(error, claims, context, method)
        return claims

    async def _check_again(self, claims: Claims, context: Context, method: str) -> None:
        try:
            await self._verifier.check_credential(claims)
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
            )
        await abort(context, refusal)


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


def check_request_size(request: Message | None, method: str) -> None:
    """Administrative requests are small; raises ResourceExhaustedError (MESSAGE_TOO_LARGE) for one above 1 MiB."""
    if request is None or not method.startswith(_ADMIN_PACKAGE):
        return
    size_bytes = request.ByteSize()
    if size_bytes > ADMIN_REQUEST_MAX_BYTES:
        raise ResourceExhaustedError(
            f"the request is {size_bytes} bytes, above the limit of {ADMIN_REQUEST_MAX_BYTES}",
            reason="MESSAGE_TOO_LARGE",
            hint="send less in one request",
            metadata={"limit_bytes": str(ADMIN_REQUEST_MAX_BYTES)},
        )
