"""Logging in and out, and where somebody begins."""

from __future__ import annotations

import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from controlplane.console.login import log_in
from controlplane.console.seal import Cookie, form_token, is_form_token, new_cookie, parse_cookie
from controlplane.console.views.navigation import home as home_path
from controlplane.console.views.notices import find_notice
from controlplane.console.visit import (
    Visit,
    address_of,
    console_of,
    error_page,
    failure,
    find_session,
    local_path,
    page,
    read_form,
)
from saltern.errors import PermissionDeniedError, ResourceExhaustedError, SalternError

_log = structlog.get_logger(__name__)


@page
async def home(visit: Visit) -> Response:
    return RedirectResponse(home_path(visit.session.tenant), 303)


async def show_login(request: Request) -> Response:
    """The form to log in. It has a cookie and a token of its own: another site cannot log somebody in here either."""
    try:
        if await find_session(request) is not None:
            return RedirectResponse("/", 303)
    except Exception as error:
        return error_page(request, failure(error, "login"), None)
    return _form(request)


async def submit_login(request: Request) -> Response:
    console = console_of(request)
    try:
        form = await read_form(request)
        shown = parse_cookie(request.cookies.get(console.login_cookie_name))
        if shown is None or not is_form_token(shown, form.get("form_token", "")):
            raise PermissionDeniedError(
                "the form to log in is not one that this browser was shown just now",
                reason="FORM_TOKEN_WRONG",
                hint="try again with this one; cookies must be allowed for the console",
            )
        session = await log_in(
            console.services,
            console.sessions,
            console.attempts,
            secret=form.get("credential", ""),
            address=address_of(request),
            now=console.clock(),
        )
        before = parse_cookie(request.cookies.get(console.cookie_name))
        if before is not None:  # whoever was logged in with this browser
            await console.sessions.end(before)
    except SalternError as error:
        return _form(request, error)
    except Exception as error:
        return error_page(request, failure(error, "login"), None)
    _log.info("console session began", actor=session.login.subject)
    response = RedirectResponse(local_path(form.get("next")), 303)
    console.set_cookie(response, console.cookie_name, session.cookie)
    console.drop_cookie(response, console.login_cookie_name)
    return response


@page
async def log_out(visit: Visit) -> Response:
    await visit.console.sessions.end(visit.session.cookie)
    visit.services.forget(visit.session)
    response = RedirectResponse("/login?done=logged-out", 303)
    visit.console.drop_cookie(response, visit.console.cookie_name)
    return response


def _form(request: Request, error: SalternError | None = None) -> Response:
    """The form with a new cookie, which becomes worthless with the log-in."""
    console = console_of(request)
    cookie: Cookie = new_cookie()
    is_throttled = isinstance(error, ResourceExhaustedError)
    response = console.render(
        "login.html",
        200 if error is None else 429 if is_throttled else 403,
        title="Log in",
        form_token=form_token(cookie),
        next=local_path(request.query_params.get("next")),
        notice=find_notice(request.query_params.get("done"), None),
        error=error,
    )
    if error is not None and error.retry_after_ms is not None:
        response.headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
    console.set_cookie(response, console.login_cookie_name, cookie)
    return response
