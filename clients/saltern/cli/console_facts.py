"""What ``saltern doctor`` finds out about the console, by its URL, without a credential and without changing anything.

The form to log in is asked for, and one is sent back whose token is wrong: the console refuses it, and says by what.
From an origin that it does not take for its own it refuses every form, so that nobody can log in.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from saltern.cli.finding import Finding, fail, failed, ok, warn
from saltern.endpoints import Endpoint
from saltern.errors import SalternError

if TYPE_CHECKING:
    from saltern.tls import ClientTls

_CHECK: Final = "console"
_PAGE_MAX_BYTES: Final = 256 * 1024
_LOGIN: Final = "/login"
#: Names of the cookie that comes with the form to log in: over TLS, and in plain text.
_SECURE_COOKIE, _PLAIN_COOKIE = "__Host-saltern-login=", "saltern-console-login="


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    cookies: tuple[str, ...]
    location: str
    text: str


def examine(url: str, deadline_ms: int, tls: ClientTls | None) -> Iterator[Finding]:
    """Look at the console at ``url``, as browsers are told it.

    Args:
        tls: whom to trust; None for the system's authorities.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    is_https = parts.scheme == "https"
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or parts.path not in {"", "/"}:
        yield fail(_CHECK, f"{url[:128]!r} is no URL of a console", "write https://HOST:PORT/, without a path")
        return
    endpoint = Endpoint(parts.hostname, port or (443 if is_https else 80))
    if not is_https and not endpoint.is_loopback:
        yield warn(
            "console transport",
            f"keys and cookies go to {endpoint.host} in plain text",
            "give the control plane --tls-cert and --tls-key, and open https://",
        )
    visitor = _Visitor(parts.netloc, endpoint, deadline_ms / 1000, _context(tls) if is_https else None, parts.scheme)
    try:
        yield _look(visitor, url, is_https=is_https)
    except SalternError as error:
        yield failed(_CHECK, error)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message or "not trusted"
        yield fail(_CHECK, f"the certificate of {endpoint} is refused: {why}", "name its authority with --tls-ca")
    except ssl.SSLError:
        yield fail(
            _CHECK,
            f"no TLS with {endpoint}",
            "open http:// if it serves plain text; if it asks for certificates, give --tls-cert and --tls-key",
        )
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or "it ended the connection"
        yield fail(
            _CHECK,
            f"{endpoint} does not answer as a web server: {why.lower()}",
            "check --console-listen of the control plane, and with https:// that it was given --tls-cert",
        )


def _look(visitor: _Visitor, url: str, *, is_https: bool) -> Finding:
    shown = visitor.ask("GET", {})
    if shown.status in {301, 302, 307, 308}:
        return fail(_CHECK, f"{url} leads to {shown.location[:128]}", "name the URL where the console itself answers")
    cookie = next((one for one in shown.cookies if one.startswith((_SECURE_COOKIE, _PLAIN_COOKIE))), None)
    if shown.status != 200 or cookie is None:
        return fail(
            _CHECK,
            f"{url} is something else than Saltern's console (status {shown.status})",
            "give the address of --console-listen, not that of gRPC or metrics, or the proxy's in front of it",
        )
    answer = visitor.ask("POST", {"origin": url.rstrip("/"), "content-type": "application/x-www-form-urlencoded"})
    if "OTHER_ORIGIN" in answer.text:
        return fail(
            _CHECK,
            f"the console does not take {url} for its own: every form is refused, nobody can log in",
            "let the proxy in front of it pass the Host header on as browsers send it",
        )
    if is_https and cookie.startswith(_PLAIN_COOKIE):
        return warn(
            _CHECK,
            f"a proxy ends TLS for {url}: cookies are not bound to TLS, and the trail has the proxy's address",
            "give the control plane --tls-cert and --tls-key, and let the proxy pass TLS through",
        )
    return ok(_CHECK, f"{url} serves the form to log in")


class _Visitor:
    """Asks for the page to log in; follows nothing, keeps nothing."""

    def __init__(
        self, host: str, endpoint: Endpoint, timeout_s: float, context: ssl.SSLContext | None, scheme: str
    ) -> None:
        self._host = host
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = context
        self._scheme = scheme

    def ask(self, method: str, headers: dict[str, str]) -> _Page:
        """Raises OSError, HTTPException."""
        host, port = self._endpoint.host, self._endpoint.port
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
        try:
            connection.request(method, _LOGIN, headers={"host": self._host, **headers})
            response = connection.getresponse()
            text = response.read(_PAGE_MAX_BYTES).decode("utf-8", "replace")
            cookies = tuple(response.headers.get_all("set-cookie") or ())
            return _Page(response.status, cookies, response.headers.get("location") or "", text)
        finally:
            connection.close()


def _context(tls: ClientTls | None) -> ssl.SSLContext:
    """Raises SalternError."""
    from saltern.tls import client_context

    return ssl.create_default_context() if tls is None else client_context(tls)
