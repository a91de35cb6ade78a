"""CredentialService: API keys of tenants and of the platform. A secret is shown once and never stored."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from datetime import datetime, timedelta

from google.protobuf.empty_pb2 import Empty
from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import parse_page_size, parse_parent, parse_text, parse_timestamp, refused
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.requests import forget_requests_of_key
from controlplane.admin.resources import ROLE_FROM_PROTO, to_api_key
from controlplane.admin.service import AdminServicer, Change, absent, load_tenant, method, require_room
from controlplane.auth.revocations import end_api_key_tokens, end_tokens
from controlplane.auth.rotation import OVERLAP_DEFAULT, OVERLAP_MAX, SECRET_LIFE_MIN, rotate
from controlplane.caller import Caller, authorise
from controlplane.db.models import DISPLAY_NAME_MAX_CHARS, ApiKey
from controlplane.rpc import Context
from controlplane.secrets import issue_api_key
from saltern.admin.v1 import credentials_pb2, credentials_pb2_grpc
from saltern.errors import AlreadyExistsError, FailedPreconditionError, PermissionDeniedError
from saltern.names import (
    ApiKeyId,
    NodeId,
    TenantId,
    api_key_name,
    parse_api_key_name,
    parse_identifier,
    parse_node_id,
    tenant_name,
)
from tenants.roles import PLATFORM_ROLES, TENANT_ROLES, Permission, Role
from tenants.salts import parse_scope_id

API_KEYS_PER_OWNER_MAX = 1000
_BINDABLE_ROLES = frozenset({Role.WRITER, Role.READER})


class CredentialService(AdminServicer, credentials_pb2_grpc.CredentialServiceServicer):
    service = "saltern.admin.v1.CredentialService"

    @method
    async def CreateApiKey(
        self, request: credentials_pb2.CreateApiKeyRequest, context: Context
    ) -> credentials_pb2.CreateApiKeyResponse:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)
        key_id = ApiKeyId(parse_identifier(request.api_key_id, what="API key"))
        role = _parse_role(request.api_key.role, tenant, caller)
        display_name = parse_text(request.api_key.display_name, "display_name", max_chars=DISPLAY_NAME_MAX_CHARS)
        expire_time = self._parse_expire_time(request.api_key)
        project, user = _parse_binding(request.api_key, role)
        node = self._parse_node(request.api_key, role)
        issued = issue_api_key()

        async def act(session: AsyncSession, now: datetime) -> Change[credentials_pb2.CreateApiKeyResponse]:
            if tenant is not None:
                await load_tenant(session, tenant, caller, change=True)
            count = select(func.count()).select_from(ApiKey).where(ApiKey.tenant_id.is_not_distinct_from(tenant))
            owner = tenant_name(tenant) if tenant else "the platform"
            require_room(await session.scalar(count) or 0, API_KEYS_PER_OWNER_MAX, "API keys", owner)
            create = insert(ApiKey).values(
                tenant_id=tenant,
                id=key_id,
                lookup=issued.lookup,
                secret_sha256=issued.secret_sha256,
                role=role,
                display_name=display_name,
                created_by=caller.subject,
                create_time=now,
                expire_time=expire_time,
                project_id=project or None,
                user_id=user or None,
                node_id=node,
            )
            row = (await session.scalars(create.on_conflict_do_nothing().returning(ApiKey))).one_or_none()
            if row is None:
                raise AlreadyExistsError(
                    f"{api_key_name(tenant, key_id)} exists already",
                    reason="API_KEY_EXISTS",
                    hint="choose another API key id, or delete that key first",
                    metadata={"api_key": key_id},
                )
            created = to_api_key(row, now)
            return Change(
                tenant=tenant,
                resource=created.name,
                response=credentials_pb2.CreateApiKeyResponse(api_key=created, secret=issued.secret),
                replay=credentials_pb2.CreateApiKeyResponse(api_key=created),
                after=created,
            )

        return await self._change("CreateApiKey", request, credentials_pb2.CreateApiKeyResponse, act)

    @method
    async def GetApiKey(self, request: credentials_pb2.GetApiKeyRequest, context: Context) -> credentials_pb2.ApiKey:
        tenant, key_id = parse_api_key_name(request.name)
        caller = authorise(Permission.CREDENTIALS_READ, tenant)
        async with self._database.transaction() as session:
            return to_api_key(await load_api_key(session, tenant, key_id, caller), self._parts.clock())

    @method
    async def ListApiKeys(
        self, request: credentials_pb2.ListApiKeysRequest, context: Context
    ) -> credentials_pb2.ListApiKeysResponse:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.CREDENTIALS_READ, tenant)
        collection, now = f"{request.parent}/apiKeys", self._parts.clock()
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, collection)
        async with self._database.transaction() as session:
            if tenant is not None:
                await load_tenant(session, tenant, caller)
            statement = (
                select(ApiKey)
                .where(ApiKey.tenant_id.is_not_distinct_from(tenant), ApiKey.id > after)
                .order_by(ApiKey.id)
                .limit(page_size + 1)
            )
            rows, last = cut_page((await session.scalars(statement)).all(), page_size)
        return credentials_pb2.ListApiKeysResponse(
            api_keys=[to_api_key(row, now) for row in rows],
            next_page_token=encode_page_token(collection, last.id) if last else "",
        )

    @method
    async def RotateApiKey(
        self, request: credentials_pb2.RotateApiKeyRequest, context: Context
    ) -> credentials_pb2.RotateApiKeyResponse:
        tenant, key_id = parse_api_key_name(request.name)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)
        overlap = _parse_overlap(request)
        expire_time = self._parse_rotated_expire_time(request)
        issued = issue_api_key()

        async def act(session: AsyncSession, now: datetime) -> Change[credentials_pb2.RotateApiKeyResponse]:
            owner = None if tenant is None else await load_tenant(session, tenant, caller, change=True)
            row = await load_api_key(session, tenant, key_id, caller, change=True)
            before = to_api_key(row, now)
            check_etag(request.etag, before.etag, before.name)
            ended = rotate(row, issued, overlap, now, expire_time=expire_time, end_previous=request.end_previous)
            if owner is not None:  # nodes see only tokens, which would outlive the secret; none takes the platform's
                for lookup in ended:
                    await end_tokens(session, owner, lookup, now)
            rotated = to_api_key(row, now)
            return Change(
                tenant=tenant,
                resource=rotated.name,
                response=credentials_pb2.RotateApiKeyResponse(api_key=rotated, secret=issued.secret),
                replay=credentials_pb2.RotateApiKeyResponse(api_key=rotated),
                before=before,
                after=rotated,
            )

        return await self._change("RotateApiKey", request, credentials_pb2.RotateApiKeyResponse, act)

    @method
    async def DeleteApiKey(self, request: credentials_pb2.DeleteApiKeyRequest, context: Context) -> Empty:
        tenant, key_id = parse_api_key_name(request.name)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            owner = None if tenant is None else await load_tenant(session, tenant, caller, change=True)
            row = await load_api_key(session, tenant, key_id, caller)
            before = to_api_key(row, now)
            check_etag(request.etag, before.etag, before.name)
            if row.role is Role.PLATFORM_ADMIN:
                await _require_another_admin(session, row, now)
            if owner is not None:  # nodes see only tokens, which would outlive the key; no node takes the platform's
                await end_api_key_tokens(session, owner, row, now, is_deleted=True)
            await session.delete(row)
            await forget_requests_of_key(session, before.name)
            return Change(tenant=tenant, resource=before.name, response=Empty(), before=before)

        return await self._change("DeleteApiKey", request, Empty, act)

    def _parse_node(self, api_key: credentials_pb2.ApiKey, role: Role) -> NodeId | None:
        """The one node that a new key is for; None for a key of another role, or for any node where that is allowed."""
        if role is not Role.NODE:
            if api_key.node_id:
                raise refused("api_key.node_id", f"cannot bind the role {role.value}", "leave it empty")
            return None
        if api_key.node_id:
            return parse_node_id(api_key.node_id)
        if self._parts.allow_unbound_node_keys:
            return None
        raise refused("api_key.node_id", "is empty: a key of the role node is for one node", "name the node: --node ID")

    def _parse_expire_time(self, api_key: credentials_pb2.ApiKey) -> datetime | None:
        if not api_key.HasField("expire_time"):
            return None
        expire_time = parse_timestamp(api_key.expire_time, "expire_time")
        if expire_time <= self._parts.clock():
            raise refused("expire_time", "is in the past", "give a time in the future, or none")
        return expire_time

    def _parse_rotated_expire_time(self, request: credentials_pb2.RotateApiKeyRequest) -> datetime | None:
        if not request.HasField("expire_time"):
            return None
        expire_time = parse_timestamp(request.expire_time, "expire_time")
        if expire_time < self._parts.clock() + SECRET_LIFE_MIN:
            raise refused("expire_time", "is less than an hour ahead", "give a later time, or delete the key instead")
        return expire_time


def _parse_overlap(request: credentials_pb2.RotateApiKeyRequest) -> timedelta:
    if not request.HasField("overlap"):
        return OVERLAP_DEFAULT
    seconds = request.overlap.seconds
    is_whole = request.overlap.nanos == 0
    if not (is_whole and (seconds == 0 or SECRET_LIFE_MIN.total_seconds() <= seconds <= OVERLAP_MAX.total_seconds())):
        raise refused("overlap", "is neither 0 nor an hour to 30 days", "give whole seconds, 0 or 3600 to 2592000")
    return timedelta(seconds=seconds)


def _parse_role(value: int, tenant: TenantId | None, caller: Caller) -> Role:
    """The role of a new key, which must be one of its owner's kind.

    Raises:
        PermissionDeniedError: a tenant's caller asks for a role of the platform: an attempt worth an audit event.
        InvalidArgumentError: no such role, or a mistake of the platform's administrator.
    """
    role = ROLE_FROM_PROTO.get(value)  # type: ignore[call-overload]  # any integer can stand on the wire
    allowed = PLATFORM_ROLES if tenant is None else TENANT_ROLES
    if isinstance(role, Role) and role in allowed:
        return role
    choices = ", ".join(sorted(choice.value for choice in allowed))
    if role in PLATFORM_ROLES and not caller.is_platform:
        raise PermissionDeniedError(
            "only the platform gives out its own roles", reason="ROLE_NOT_GRANTABLE", hint=f"choose one of: {choices}"
        )
    raise refused("role", "is not one that this owner's keys can have", f"choose one of: {choices}")


def _parse_binding(api_key: credentials_pb2.ApiKey, role: Role) -> tuple[str, str]:
    """The project and the user that a new key is bound to; empty where it is not.

    Raises:
        InvalidArgumentError: malformed, or the role is another than writer and reader: one that makes keys could make
            itself a wider one, and one that reads no entries gets no salt.
    """
    project = parse_scope_id(api_key.project_id, "project_id")
    user = parse_scope_id(api_key.user_id, "user_id")
    if (project or user) and role not in _BINDABLE_ROLES:
        choices = ", ".join(sorted(choice.value for choice in _BINDABLE_ROLES))
        raise refused(
            "api_key.project_id", f"and user_id cannot bind the role {role.value}", f"choose one of: {choices}"
        )
    return project, user


async def load_api_key(
    session: AsyncSession, tenant: TenantId | None, key_id: ApiKeyId, caller: Caller, *, change: bool = False
) -> ApiKey:
    """The row of an API key, locked to ``change`` it; raises what ``absent`` says if it is not there."""
    statement = select(ApiKey).where(ApiKey.tenant_id.is_not_distinct_from(tenant), ApiKey.id == key_id)
    if change:
        statement = statement.with_for_update()
    row = (await session.scalars(statement)).one_or_none()
    if row is None:
        raise absent(caller, api_key_name(tenant, key_id))
    return row


async def _require_another_admin(session: AsyncSession, row: ApiKey, now: datetime) -> None:
    """The last key of the platform's administrator stays: without one, nobody could get in any more."""
    usable = (
        select(ApiKey.uid)
        .where(
            ApiKey.tenant_id.is_(None),
            ApiKey.role == Role.PLATFORM_ADMIN,
            or_(ApiKey.expire_time.is_(None), ApiKey.expire_time > now),
        )
        .order_by(ApiKey.uid)
        .with_for_update()  # two deletions at a time could each leave the other's key
    )
    if set(await session.scalars(usable)) <= {row.uid}:
        raise FailedPreconditionError(
            "this is the last usable key of the platform's administrator",
            reason="LAST_ADMIN_KEY",
            hint="create another key of the role platform-admin first",
        )
