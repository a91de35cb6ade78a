"""What every answer of the console says to browsers, and what no request gets past.

The headers allow a page its own style sheet, script and pictures, forms to itself, and nothing else: no inline script
or style, no other site, no frame. So text of a stranger that came through as markup, against escaping, would still not
run. Strict cookies, a token in each form and the origin of each change answer requests that another site makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saltern.errors import PermissionDeniedError

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = (
    ("content-security-policy", CONTENT_SECURITY_POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),  # with none at all browsers do not name the origin of a form either
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)
_NO_STORE: Final = (b"cache-control", b"no-store")
#: Browsers that have seen it never speak plain text to this host again; not said of loopback, which others use too.
_TRANSPORT_SECURITY: Final = (b"strict-transport-security", b"max-age=31536000")
_SAME_ORIGIN: Final = "same-origin"


class Guard:
    """Adds the headers to every answer, whoever makes it; an answer that says nothing of caches is not kept."""

    def __init__(self, app: ASGIApp, *, is_secure: bool) -> None:
        """``is_secure``: the console is reached over TLS from other hosts."""
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS]
        if is_secure:
            self._headers.append(_TRANSPORT_SECURITY)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], *self._headers]
                if not any(name.lower() == b"cache-control" for name, _ in headers):
                    headers.append(_NO_STORE)
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, guarded)


def require_own_origin(headers: Mapping[str, str]) -> None:
    """Return if a change was asked for by a page of this console.

    Every browser names the origin of a form's page; one that does not has to say that the site is the same.

    Raises:
        PermissionDeniedError: OTHER_ORIGIN.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site is not None and site != _SAME_ORIGIN:
        raise _other_origin()
    if origin is not None:
        try:
            is_own = bool(headers.get("host")) and urlsplit(origin).netloc == headers["host"]
        except ValueError:  # no URL at all
            is_own = False
        if not is_own:
            raise _other_origin()
    elif site is None:
        raise _other_origin()


def _other_origin() -> PermissionDeniedError:
    return PermissionDeniedError(
        "this change was not asked for by a page of the console",
        reason="OTHER_ORIGIN",
        hint="open the console itself and do it there; nothing was changed",
    )
