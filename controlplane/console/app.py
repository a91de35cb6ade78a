"""The application: every page of the console in one table."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from controlplane.console.guard import Guard
from controlplane.console.routes import audit, entrance, keys, overview, platform, salts, sharing
from controlplane.console.templating import Asset
from controlplane.console.visit import Console, error_page, failure
from saltern.errors import InvalidArgumentError, NotFoundError

_TENANT = "/tenants/{tenant}"
#: Assets are named with a hash of what is in them.
_KEEP = {"cache-control": "public, max-age=31536000, immutable"}


def make_app(console: Console, assets: Mapping[str, Asset], *, is_reachable: bool = False) -> ASGIApp:
    """The console as an ASGI application.

    Args:
        is_reachable: from other hosts: then browsers are told to use TLS only, where there is TLS.
    """

    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return Response(found.content, media_type=found.content_type, headers=_KEEP)

    def owned(path: str) -> tuple[str, str]:
        """Of a tenant, and of the platform."""
        return f"{_TENANT}{path}", path

    routes = [
        Route("/", entrance.home, methods=["GET"]),
        Route("/login", entrance.show_login, methods=["GET"]),
        Route("/login", entrance.submit_login, methods=["POST"]),
        Route("/logout", entrance.log_out, methods=["POST"]),
        Route("/static/{name}", asset, methods=["GET"]),
        Route("/tenants", platform.tenants, methods=["GET"]),
        Route("/nodes", platform.nodes, methods=["GET"]),
        Route("/policy", platform.policy, methods=["GET"]),
        Route(_TENANT, overview.overview, methods=["GET"]),
        Route(f"{_TENANT}/cost", overview.cost, methods=["GET"]),
        Route(f"{_TENANT}/cost.csv", overview.cost_csv, methods=["GET"]),
        Route(f"{_TENANT}/salts", salts.show_salts, methods=["GET"]),
        Route(f"{_TENANT}/salts/rotate", salts.ask_rotate, methods=["GET"]),
        Route(f"{_TENANT}/salts/rotate", salts.rotate_salt, methods=["POST"]),
        Route(f"{_TENANT}/sharing", sharing.list_groups, methods=["GET"]),
        Route(f"{_TENANT}/sharing/{{owner}}/{{group}}/{{act}}", sharing.ask, methods=["GET"]),
        Route(f"{_TENANT}/sharing/{{owner}}/{{group}}/{{act}}", sharing.do, methods=["POST"]),
    ]
    for path in owned("/keys"):
        routes += [
            Route(path, keys.list_keys, methods=["GET"]),
            Route(f"{path}/new", keys.new_key, methods=["GET"]),
            Route(f"{path}/new", keys.create_key, methods=["POST"]),
            Route(f"{path}/{{key}}/rotate", keys.ask_rotate, methods=["GET"]),
            Route(f"{path}/{{key}}/rotate", keys.rotate_key, methods=["POST"]),
            Route(f"{path}/{{key}}/delete", keys.ask_delete, methods=["GET"]),
            Route(f"{path}/{{key}}/delete", keys.delete_key, methods=["POST"]),
        ]
    for path in owned("/audit"):
        routes += [
            Route(path, audit.list_events, methods=["GET"]),
            Route(f"{path}/export.{{format}}", audit.export_events, methods=["GET"]),
        ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    # A slash too many is no page: an answer that leads elsewhere would go by what the caller says this host is called.
    app.router.redirect_slashes = False
    app.state.console = console
    # Around everything, so that no answer is without its headers, not even that of a fault.
    return Guard(app, is_secure=console.is_secure and is_reachable)


async def _refused(request: Request, error: Exception) -> Response:
    """What no route is there for."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wrong = InvalidArgumentError(
            "this page does not take that method", reason="METHOD_NOT_ALLOWED", hint="open it as a page"
        )
        response = error_page(request, wrong, None)
        response.status_code = 405
        response.headers.update(error.headers or {})
        return response
    absent = NotFoundError("there is no such page", reason="NO_SUCH_PAGE", hint="begin at the start page")
    return error_page(request, absent, None)


async def _failed(request: Request, error: Exception) -> Response:
    return error_page(request, failure(error, request.method), None)
