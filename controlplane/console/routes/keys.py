"""API keys of a tenant, or of the platform: listed, made, rotated, deleted."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from starlette.responses import Response

from controlplane.console.views.keys import (
    EXPIRY_DAYS,
    OVERLAP_HOURS,
    PLATFORM_ROLES,
    ROLE_HELP,
    TENANT_ROLES,
    key_rows,
    role_number,
)
from controlplane.console.visit import Visit, page
from saltern.admin.v1.credentials_pb2 import (
    ApiKey,
    CreateApiKeyRequest,
    CreateApiKeyResponse,
    DeleteApiKeyRequest,
    GetApiKeyRequest,
    ListApiKeysRequest,
    RotateApiKeyRequest,
    RotateApiKeyResponse,
)
from saltern.errors import InvalidArgumentError, PermissionDeniedError, SalternError, UnauthenticatedError
from tenants.roles import Role

_FIELDS: Final = ("api_key_id", "display_name", "role", "days", "project_id", "user_id", "node_id")


@page
async def list_keys(visit: Visit) -> Response:
    keys = await visit.calls.list(
        visit.services.credentials.ListApiKeys, ListApiKeysRequest(parent=visit.parent), "api_keys"
    )
    rows = key_rows(keys, visit.now, own_subject=visit.session.login.subject)
    return visit.render("keys.html", "API keys", keys=rows)


@page
async def new_key(visit: Visit) -> Response:
    # Asks for nothing that the form needs: whose keys somebody may not see, of those there is no form either (I2).
    await visit.calls(visit.services.credentials.ListApiKeys, ListApiKeysRequest(parent=visit.parent, page_size=1))
    return _new_form(visit, {"days": "90", "role": _roles(visit)[0].value}, None)


@page
async def create_key(visit: Visit) -> Response:
    """Make a key; its secret is on the page that answers, and nowhere else ever."""
    try:
        response: CreateApiKeyResponse = await visit.calls(
            visit.services.credentials.CreateApiKey, _create_request(visit)
        )
    except (UnauthenticatedError, PermissionDeniedError):
        raise
    except SalternError as error:
        return _new_form(visit, {name: visit.form.get(name, "") for name in _FIELDS}, error)
    return _secret_page(visit, response, "API key made")


@page
async def ask_rotate(visit: Visit) -> Response:
    key = await _key(visit)
    return visit.render("key_rotate.html", "Rotate API key", key=key, overlap_hours=OVERLAP_HOURS)


@page
async def rotate_key(visit: Visit) -> Response:
    request = RotateApiKeyRequest(
        name=_name(visit),
        etag=visit.form.get("etag", ""),
        end_previous=visit.form.get("end_previous") == "yes",
        request_id=visit.request_id,
    )
    request.overlap.FromTimedelta(timedelta(hours=_integer(visit, "overlap_hours", OVERLAP_HOURS)))
    response: RotateApiKeyResponse = await visit.calls(visit.services.credentials.RotateApiKey, request)
    return _secret_page(visit, response, "API key rotated")


@page
async def ask_delete(visit: Visit) -> Response:
    key = await _key(visit)
    return visit.render("key_delete.html", "Delete API key", key=key)


@page
async def delete_key(visit: Visit) -> Response:
    request = DeleteApiKeyRequest(name=_name(visit), etag=visit.form.get("etag", ""), request_id=visit.request_id)
    await visit.calls(visit.services.credentials.DeleteApiKey, request)
    return visit.redirect(f"{visit.base}/keys", "key-deleted")


def _secret_page(visit: Visit, response: CreateApiKeyResponse | RotateApiKeyResponse, title: str) -> Response:
    row = key_rows([response.api_key], visit.now, own_subject="")[0]
    return visit.render("key_secret.html", title, key=row, secret=response.secret)


def _new_form(visit: Visit, values: dict[str, str], error: SalternError | None) -> Response:
    return visit.render(
        "key_new.html",
        "New API key",
        status_code=200 if error is None else 400,
        values={name: values.get(name, "") for name in _FIELDS},
        error=error,
        roles=[(role.value, ROLE_HELP[role]) for role in _roles(visit)],
        expiry_days=EXPIRY_DAYS,
    )


def _create_request(visit: Visit) -> CreateApiKeyRequest:
    form = visit.form
    try:
        role = role_number(Role(form.get("role", "")))
    except ValueError:
        raise InvalidArgumentError(
            "that is no role", reason="INVALID_ROLE", hint="choose one of the roles of the form"
        ) from None
    key = ApiKey(
        display_name=form.get("display_name", ""),
        role=role,
        project_id=form.get("project_id", ""),
        user_id=form.get("user_id", ""),
        node_id=form.get("node_id", ""),
    )
    days = _integer(visit, "days", EXPIRY_DAYS)
    if days:
        # Whole days from today: a form that is sent twice asks for the same.
        midnight = visit.now.replace(hour=0, minute=0, second=0, microsecond=0)
        key.expire_time.FromDatetime(midnight + timedelta(days=days + 1))
    return CreateApiKeyRequest(
        parent=visit.parent, api_key_id=form.get("api_key_id", ""), api_key=key, request_id=visit.request_id
    )


async def _key(visit: Visit) -> dict[str, object]:
    key: ApiKey = await visit.calls(visit.services.credentials.GetApiKey, GetApiKeyRequest(name=_name(visit)))
    return {"row": key_rows([key], visit.now, own_subject=visit.session.login.subject)[0], "etag": key.etag}


def _name(visit: Visit) -> str:
    owner = f"{visit.parent}/" if visit.parent else ""
    return f"{owner}apiKeys/{visit.path('key')}"


def _roles(visit: Visit) -> tuple[Role, ...]:
    return PLATFORM_ROLES if visit.tenant is None else TENANT_ROLES


def _integer(visit: Visit, name: str, allowed: tuple[int, ...]) -> int:
    """A number that the form offers."""
    text = visit.form.get(name, "")
    number = next((number for number in allowed if str(number) == text), None)
    if number is None:
        raise InvalidArgumentError(
            f"{name} is not one of what the form offers", reason="INVALID_FIELD", hint="choose one of the list"
        )
    return number
