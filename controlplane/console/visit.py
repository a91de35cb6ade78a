"""One request of a browser: who asks, what for, and how it is answered.

A page is a function from a :class:`Visit` to a response; what it raises of :mod:`saltern.errors` becomes a page that
says the same as the command line: what was asked, what refused it, what to do next.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

import structlog
from jinja2 import Environment
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from controlplane.clock import Clock
from controlplane.console.attempts import Attempts
from controlplane.console.calls import Calls, Services
from controlplane.console.guard import require_own_origin
from controlplane.console.seal import is_form_token, parse_cookie
from controlplane.console.sessions import Session, Sessions
from controlplane.console.views.navigation import navigation
from controlplane.console.views.notices import find_notice
from controlplane.rpc import to_saltern_error
from saltern.billing.prices import Prices
from saltern.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
    StatusCode,
    UnauthenticatedError,
)
from saltern.names import TenantId
from tenants.roles import Permission, may

FORM_MAX_BYTES: Final = 64 * 1024
_FORM_FIELDS_MAX: Final = 64
_FORM_WAIT_S: Final = 10.0
_FORM_TYPE: Final = "application/x-www-form-urlencoded"
#: Sent by what a page asks for by itself: it is no use of the session.
REFRESH_HEADER: Final = "saltern-refresh"
_LOCAL_PATH: Final = re.compile(r"/(?:[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*)?", re.ASCII)
_HTTP_STATUS: Final = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.ABORTED: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_BY_REASON: Final = {"RESOURCE_NOT_AVAILABLE": 404, "FORM_TOO_LARGE": 413}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Console:
    """What all pages share.

    Attributes:
        prices: of the deployment's price file, or None.
        is_secure: browsers reach it over TLS.
    """

    services: Services
    sessions: Sessions
    environment: Environment
    clock: Clock
    prices: Prices | None
    is_secure: bool
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def cookie_name(self) -> str:
        """Over TLS a name that browsers accept from this very host and path only, and never in plain text."""
        return "__Host-saltern" if self.is_secure else "saltern-console"

    @property
    def login_cookie_name(self) -> str:
        """Of the form to log in: apart, so that whoever comes by a link of another site keeps their session."""
        return f"{self.cookie_name}-login"

    def set_cookie(self, response: Response, name: str, value: str) -> None:
        """Until the browser is closed; the session's own end is in the database."""
        response.set_cookie(name, value, path="/", secure=self.is_secure, httponly=True, samesite="strict")

    def drop_cookie(self, response: Response, name: str) -> None:
        response.delete_cookie(name, path="/", secure=self.is_secure, httponly=True, samesite="strict")

    def render(self, template: str, status_code: int = 200, **values: object) -> HTMLResponse:
        return HTMLResponse(self.environment.get_template(template).render(**values), status_code)


class Visit:
    """A request of somebody who is logged in.

    Attributes:
        form: the fields of a change; empty for a page that is only looked at.
        now: the time of the request.
    """

    def __init__(self, request: Request, console: Console, session: Session, now: datetime) -> None:
        self.request = request
        self.console = console
        self.session = session
        self.now = now
        self.form: Mapping[str, str] = {}
        self.calls = Calls(console.services, session, address_of(request))
        self.services = console.services

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query_params

    @property
    def tenant(self) -> TenantId | None:
        """The tenant that the path names; None for a page of the platform. Whether it may be seen, services say."""
        name = self.request.path_params.get("tenant")
        return None if name is None else TenantId(name)

    @property
    def parent(self) -> str:
        """Resource name of :attr:`tenant`; empty for the platform."""
        return "" if self.tenant is None else f"tenants/{self.tenant}"

    @property
    def base(self) -> str:
        """Path of the pages of :attr:`tenant`, or of the platform."""
        return "" if self.tenant is None else f"/tenants/{quote(self.tenant, safe='')}"

    @property
    def request_id(self) -> str:
        """Of a change: drawn when its form was shown, so that a form that is sent twice does its work once."""
        return self.form.get("request_id", "")

    def may(self, permission: Permission) -> bool:
        """Whether the role has ``permission``: for what is offered; services decide."""
        return may(self.session.role, permission)

    def path(self, name: str) -> str:
        """A segment of the request's path."""
        value: str = self.request.path_params[name]
        return value

    def render(self, template: str, title: str, *, status_code: int = 200, **values: object) -> HTMLResponse:
        """A page in its frame."""
        return self.console.render(
            template,
            status_code,
            title=title,
            session=self.session,
            base=self.base,
            tenant=self.tenant,
            navigation=navigation(self.session.role, self.session.tenant, self.tenant, self.request.url.path),
            notice=find_notice(self.query.get("done"), self.query.get("version")),
            form_token=self.session.form_token,
            request_id=str(uuid.uuid4()),
            now=self.now,
            may=lambda name: self.may(Permission(name)),
            **values,
        )

    def redirect(self, path: str, done: str) -> Response:
        """Answer a change: go to ``path``, which says what was ``done`` and which policy holds it."""
        query = {"done": done} | ({"version": self.calls.policy_version} if self.calls.policy_version else {})
        return RedirectResponse(f"{path}?{urlencode(query)}", 303)


Page = Callable[[Visit], Awaitable[Response]]


def page(function: Page) -> Callable[[Request], Awaitable[Response]]:
    """Make a route of a page: find the session, read and check a form, answer errors."""

    @wraps(function)
    async def route(request: Request) -> Response:
        console = console_of(request)
        try:
            session = await find_session(request)
            if session is None:
                return _to_login(request)
            visit = Visit(request, console, session, console.clock())
            try:
                if request.method == "POST":
                    visit.form = await read_form(request)
                    if not is_form_token(session.cookie, visit.form.get("form_token", "")):
                        raise _wrong_form_token()
                return await function(visit)
            except UnauthenticatedError as error:
                return await _end(request, session, error)
            except SalternError as error:
                return error_page(request, error, visit)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_page(request, failure(error, request.method), None)

    return route


def console_of(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


async def find_session(request: Request) -> Session | None:
    """The session of the request's cookie, if it has one."""
    console = console_of(request)
    cookie = parse_cookie(request.cookies.get(console.cookie_name))
    if cookie is None:
        return None
    return await console.sessions.find(cookie, console.clock(), is_use=REFRESH_HEADER not in request.headers)


def address_of(request: Request) -> str:
    """Where the browser's connection comes from, ``HOST:PORT``; what a proxy says of others is not believed."""
    client = request.client
    if client is None:
        return ""
    return f"[{client.host}]:{client.port}" if ":" in client.host else f"{client.host}:{client.port}"


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form of this console's own, of bounded size, that came within a bounded time.

    Raises:
        PermissionDeniedError: OTHER_ORIGIN. InvalidArgumentError: FORM_MALFORMED.
        ResourceExhaustedError: FORM_TOO_LARGE. DeadlineExceededError: it did not come.
    """
    require_own_origin(request.headers)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
        raise _malformed()
    body = bytearray()
    try:
        async with asyncio.timeout(_FORM_WAIT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > FORM_MAX_BYTES:
                    raise ResourceExhaustedError(
                        f"the form has more than {FORM_MAX_BYTES} bytes", reason="FORM_TOO_LARGE", hint="write less"
                    )
    except TimeoutError:
        raise DeadlineExceededError("the form did not arrive", hint="send it again") from None
    try:
        pairs = parse_qsl(
            body.decode("ascii"), keep_blank_values=True, strict_parsing=bool(body), errors="strict",
            max_num_fields=_FORM_FIELDS_MAX,
        )  # fmt: skip
    except ValueError:
        raise _malformed() from None
    if len({name for name, _ in pairs}) != len(pairs):
        raise _malformed()
    return dict(pairs)


def failure(error: Exception, method: str) -> SalternError:
    """What a browser may hear of an error that is not one of ours; the rest is in the log."""
    return to_saltern_error(error, method=f"console {method}")


def error_page(request: Request, error: SalternError, visit: Visit | None) -> Response:
    """An error as a page. What is another tenant's and what is not there are one answer, to the byte (I2)."""
    status_code = _HTTP_STATUS.get(error.code, 500)
    status_code = _STATUS_BY_REASON.get(error.reason, status_code)
    values = {"error": error, "status": status_code}
    if visit is None:
        response = console_of(request).render("error_bare.html", status_code, title="Error", **values)
    else:
        response = visit.console.render(
            "error.html",
            status_code,
            title="Error",
            session=visit.session,
            navigation=navigation(visit.session.role, visit.session.tenant, None, ""),
            form_token=visit.session.form_token,
            notice=None,
            **values,
        )
    if error.retry_after_ms is not None:
        response.headers["retry-after"] = str(max(-(-error.retry_after_ms // 1000), 1))
    return response


def local_path(text: str | None) -> str:
    """``text`` if it is a path of this console, else its beginning: a log-in leads to nowhere else."""
    return text if text and _LOCAL_PATH.fullmatch(text) and not text.startswith("/log") else "/"


def _to_login(request: Request) -> Response:
    if request.method == "POST":
        return RedirectResponse("/login?done=session-ended", 303)
    query = {"next": request.url.path} if local_path(request.url.path) != "/" else {}
    return RedirectResponse("/login" + (f"?{urlencode(query)}" if query else ""), 303)


async def _end(request: Request, session: Session, error: UnauthenticatedError) -> Response:
    """The credential is good no more, and so is the session."""
    console = console_of(request)
    await console.sessions.end(session.cookie)
    console.services.forget(session)
    _log.info("console session ended", reason=error.reason, actor=session.login.subject)
    response = RedirectResponse("/login?done=credential-ended", 303)
    console.drop_cookie(response, console.cookie_name)
    return response


def _wrong_form_token() -> PermissionDeniedError:
    return PermissionDeniedError(
        "the form is not one that this session was shown",
        reason="FORM_TOKEN_WRONG",
        hint="go back, reload the page and send its form again; nothing was changed",
    )


def _malformed() -> InvalidArgumentError:
    return InvalidArgumentError(
        "that is no form of the console", reason="FORM_MALFORMED", hint="go back, reload the page and try again"
    )
