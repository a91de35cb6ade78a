"""Middleware for vLLM's API server that cannot be lied to: ``--middleware saltern.vllm.gateway.SalternGateway``.

::

    caller ── Authorization: Bearer TOKEN ──> SalternGateway ──> vLLM
                                               |  no credential, in no header
                                               |  cache_salt              derived from the caller's salt key
                                               |  kv_transfer_params      the caller's token, sealed for the connector
                                               '  whatever the body said of either is overwritten

So vLLM's own prefix cache and the remote cache are parted by the same salt, and nothing that a caller writes chooses it
(I1, I2). Routes are an allow-list (:mod:`saltern.vllm.gateway_routes`). A pure ASGI class: no dependency but the SDK.

===================================  ==================================================================================
environment
===================================  ==================================================================================
``SALTERN_GATEWAY_CONTROL``          ``host:port`` of the control plane; else ``SALTERN_CONTROL``
``SALTERN_GATEWAY_SEAL_KEY_FILE``    key file shared with the engine's connector; made if it is not there
``SALTERN_GATEWAY_UNKNOWN_CALLERS``  ``refuse`` (default: 401), or ``private``: served under a fresh random salt, so
                                     they find nothing of anybody, and without remote cache
``SALTERN_GATEWAY_NAMESPACE``        what API keys are exchanged for; without it callers need tokens
``SALTERN_GATEWAY_BODY_MAX``         of a request; 32MiB
``SALTERN_GATEWAY_CHECK_S``          between two looks at a credential that is used: so late a revocation is felt; 30
``SALTERN_TLS_CA`` and its kin       whom to trust at the control plane (:mod:`saltern.tls`)
===================================  ==================================================================================
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

from saltern.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
    StatusCode,
    UnauthenticatedError,
)
from saltern.keys import KEY_BYTES, SaltKey
from saltern.sizes import parse_size
from saltern.tls import client_tls_from_environment
from saltern.vllm.gateway_bodies import parse_body, rename_media, set_fields, write_body
from saltern.vllm.gateway_callers import Caller, Callers, is_credential
from saltern.vllm.gateway_routes import Route, Treatment, find_route
from saltern.vllm.token_seal import KEY_FILE_VARIABLE, TokenSeal

logger = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

_BODY_MAX: Final = "32MiB"
_BODY_TOO_LARGE: Final = "BODY_TOO_LARGE"
_CHECK_S: Final = 30.0
#: Headers that hold a credential: read here, and never seen by vLLM.
_CREDENTIAL_HEADERS: Final = frozenset({b"authorization", b"x-api-key", b"proxy-authorization", b"cookie"})
#: Of the body as the caller sent it; of ours they are others.
_FRAMING_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding", b"content-encoding", b"content-type"})
_HTTP_STATUS: Final = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.FAILED_PRECONDITION: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
}
_TOO_LARGE: Final = 413
_UNAVAILABLE: Final = 503


class UnknownCallers(StrEnum):
    """What becomes of a request without a credential of Saltern."""

    REFUSE = "refuse"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """See the module."""

    control: str
    seal_key_file: Path
    unknown_callers: UnknownCallers = UnknownCallers.REFUSE
    namespace: str = ""
    body_max_bytes: int = parse_size(_BODY_MAX)
    check_every_s: float = _CHECK_S

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> GatewaySettings:
        """Read the variables.

        Raises:
            InvalidArgumentError: INVALID_GATEWAY_SETTING: one is missing, wrong, or begins as ours and is not known.
        """
        prefix = "SALTERN_GATEWAY_"
        given = {name.removeprefix(prefix): value for name, value in environment.items() if name.startswith(prefix)}
        known = {"CONTROL", "SEAL_KEY_FILE", "UNKNOWN_CALLERS", "NAMESPACE", "BODY_MAX", "CHECK_S"}
        for name in sorted(given.keys() - known):
            raise _wrong_setting(f"{prefix}{name} is no variable of the gateway")
        control = given.get("CONTROL") or environment.get("SALTERN_CONTROL", "")
        if not control:
            raise _wrong_setting(f"{prefix}CONTROL is missing")
        if not given.get("SEAL_KEY_FILE"):
            raise _wrong_setting(f"{KEY_FILE_VARIABLE} is missing")
        try:
            unknown_callers = UnknownCallers(given.get("UNKNOWN_CALLERS", UnknownCallers.REFUSE))
        except ValueError:
            raise _wrong_setting(f"{prefix}UNKNOWN_CALLERS is neither refuse nor private") from None
        try:
            check_every_s = float(given.get("CHECK_S", _CHECK_S))
        except ValueError:
            check_every_s = 0.0
        if not 1 <= check_every_s <= 600:
            raise _wrong_setting(f"{prefix}CHECK_S is not a number of seconds from 1 to 600")
        return cls(
            control=control,
            seal_key_file=Path(given["SEAL_KEY_FILE"]),
            unknown_callers=unknown_callers,
            namespace=given.get("NAMESPACE", ""),
            body_max_bytes=parse_size(given.get("BODY_MAX", _BODY_MAX), what=f"{prefix}BODY_MAX"),
            check_every_s=check_every_s,
        )


class SalternGateway:
    """The middleware; vLLM makes it with the app that it stands in front of.

    Args:
        app: what the requests go on to.
        settings: by default from the environment.

    Raises:
        InvalidArgumentError, FailedPreconditionError: so that a server with a gateway that cannot work does not start.
    """

    def __init__(self, app: App, settings: GatewaySettings | None = None) -> None:
        self._app = app
        self._settings = settings or GatewaySettings.from_environment(os.environ)
        self._seal = TokenSeal.from_file(self._settings.seal_key_file)
        self._callers = Callers(
            self._settings.control,
            namespace=self._settings.namespace,
            check_every_s=self._settings.check_every_s,
            tls=client_tls_from_environment(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                try:
                    passed_on = await self._check(scope, receive)
                except SalternError as error:
                    await _answer(send, error)
                    return
                await self._app(*passed_on, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case "websocket":
                await receive()  # websocket.connect; a close before accept is HTTP 403
                await send({"type": "websocket.close", "code": 1008, "reason": "not through this gateway"})

    def close(self) -> None:
        """Ask nobody any more; for a gateway that ends before its process."""
        self._callers.close()

    async def _check(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request as vLLM may have it, or a SalternError."""
        route = find_route(scope)
        if route is None:
            raise NotFoundError(
                "the gateway does not let this route through",
                reason="ROUTE_NOT_ALLOWED",
                hint="docs/gateway.md lists the routes and why others are refused",
            )
        headers: Headers = scope["headers"]
        without_credentials = [(name, value) for name, value in headers if name.lower() not in _CREDENTIAL_HEADERS]
        if route.treatment is Treatment.OPEN:
            return {**scope, "headers": without_credentials}, receive
        # Before the body is read: a stranger must not make the server hold one.
        caller = await self._caller(headers)
        _require_json(scope["method"], headers)
        raw = await _read(receive, headers, self._settings.body_max_bytes)
        if scope["method"] == "POST":
            raw = self._rewritten(raw, caller, route)
        kept = [(name, value) for name, value in without_credentials if name.lower() not in _FRAMING_HEADERS]
        if scope["method"] == "POST":
            kept += [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        return {**scope, "headers": kept}, _replay(raw, receive)

    async def _caller(self, headers: Headers) -> Caller | None:
        """Who calls; None for an unknown caller that is served all the same."""
        credential = _credential(headers)
        is_private = self._settings.unknown_callers is UnknownCallers.PRIVATE
        # What looks like ours and is not good is refused there too: an expired token is to be renewed, not served cold.
        if is_private and (credential is None or not is_credential(credential)):
            return None
        if credential is None:
            raise UnauthenticatedError(
                "the request holds no credential",
                reason="TOKEN_MISSING",
                hint="send Authorization: Bearer with a token of `saltern token issue --namespace`",
            )
        return await self._callers.verify(credential)

    def _rewritten(self, raw: bytes, caller: Caller | None, route: Route) -> bytes:
        body = parse_body(raw)
        if caller is None:
            salt, salt_key, sealed = secrets.token_urlsafe(KEY_BYTES), SaltKey(secrets.token_bytes(KEY_BYTES)), ""
        else:
            salt, salt_key = caller.cache_salt, caller.salt_key
            sealed = self._seal.seal(caller.token, salt) if route.treatment is Treatment.SALTED else ""
        rename_media(body, salt_key)
        if route.treatment is Treatment.SALTED:
            set_fields(body, cache_salt=salt, sealed_token=sealed, refused_fields=route.refused_fields)
        return write_body(body)


def _credential(headers: Headers) -> str | None:
    """The bearer token of ``Authorization``, or what ``x-api-key`` holds; None where there is neither.

    Raises:
        UnauthenticatedError: CREDENTIAL_AMBIGUOUS: there is more than one.
    """
    found = []
    for name, value in headers:
        match name.lower():
            case b"authorization":
                scheme, _, token = value.decode("latin-1").strip().partition(" ")
                if scheme.lower() == "bearer":
                    found.append(token.strip())
            case b"x-api-key":
                found.append(value.decode("latin-1").strip())
    if len(set(found)) > 1:
        raise UnauthenticatedError(
            "the request holds more than one credential", reason="CREDENTIAL_AMBIGUOUS", hint="send one"
        )
    return found[0] if found else None


def _require_json(method: str, headers: Headers) -> None:
    """Raise InvalidArgumentError (CONTENT_TYPE) unless the body is JSON, in UTF-8 and not compressed."""
    if method != "POST":
        return
    types = [value for name, value in headers if name.lower() == b"content-type"]
    encodings = [value.strip().lower() for name, value in headers if name.lower() == b"content-encoding"]
    media_type, _, parameters = (types[0] if types else b"").partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"")
    if (
        len(types) != 1
        or media_type.strip().lower() != b"application/json"
        or charset not in (b"", b"charset=utf-8")
        or any(encoding != b"identity" for encoding in encodings)
    ):
        raise InvalidArgumentError(
            "the request's body is not said to be plain JSON",
            reason="CONTENT_TYPE",
            hint="send Content-Type: application/json, without Content-Encoding",
        )


async def _read(receive: Receive, headers: Headers, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ResourceExhaustedError: BODY_TOO_LARGE; as soon as that is known.
        FailedPreconditionError: CALLER_GONE: the caller hung up in the middle of it.
    """
    announced = [value for name, value in headers if name.lower() == b"content-length"]
    if any(value.isdigit() and int(value) > limit_bytes for value in announced if len(value) < 20):
        raise _too_large(limit_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise FailedPreconditionError("the caller hung up", reason="CALLER_GONE")
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """What vLLM receives: the body in one piece, then whatever comes (that the caller hangs up)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return pending.pop() if pending else await receive()

    return receive_next


async def _answer(send: Send, error: SalternError) -> None:
    """Answer with an error, in the form that OpenAI's clients read."""
    status = _TOO_LARGE if error.reason == _BODY_TOO_LARGE else _HTTP_STATUS.get(error.code, _UNAVAILABLE)
    if isinstance(error, PermissionDeniedError | FailedPreconditionError | UnauthenticatedError):
        logger.info("request refused: %s", error.reason)
    detail = {"message": f"{error.message} ({error.hint})" if error.hint else error.message, "type": error.reason}
    body = json.dumps({"error": {**detail, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, UnauthenticatedError):  # RFC 9110, section 11.6.1
        headers.append((b"www-authenticate", b"Bearer"))
    if status == _UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _too_large(limit_bytes: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the request's body is larger than {limit_bytes} bytes",
        reason=_BODY_TOO_LARGE,
        hint="send less, or raise SALTERN_GATEWAY_BODY_MAX",
        metadata={"limit_bytes": str(limit_bytes)},
    )


def _wrong_setting(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        message, reason="INVALID_GATEWAY_SETTING", hint="docs/gateway.md lists the variables of the gateway"
    )
