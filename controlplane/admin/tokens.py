"""TokenService: the keys that sign tokens, and the end of tokens before they expire."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.credentials import load_api_key
from controlplane.admin.fields import parse_page_size, parse_parent, to_timestamp
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.resources import to_tenant
from controlplane.admin.service import AdminServicer, Change, load_tenant, method
from controlplane.auth import revocations
from controlplane.auth.key_keeper import RESOURCE, publish_key, withdraw_all_but_new
from controlplane.auth.key_set import encode_signing_key
from controlplane.auth.revocations import Ended, list_revocations
from controlplane.auth.signing_keys import to_life
from controlplane.caller import authorise
from controlplane.core.key_rotation import KeyState
from controlplane.db import models
from controlplane.db.locks import lock_signing_keys
from controlplane.rpc import Context
from saltern.admin.v1 import tenants_pb2, tokens_pb2, tokens_pb2_grpc
from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.names import TenantId, parse_api_key_name, parse_tenant_name, tenant_name
from tenants.revocation import EVER_S, TOKEN_ID_CHARS
from tenants.roles import Permission

#: Page tokens hold identifiers, which begin with a letter.
_PAGE_PREFIX = "id-"


class TokenService(AdminServicer, tokens_pb2_grpc.TokenServiceServicer):
    service = "saltern.admin.v1.TokenService"

    @method
    async def ListSigningKeys(
        self, request: tokens_pb2.ListSigningKeysRequest, context: Context
    ) -> tokens_pb2.ListSigningKeysResponse:
        authorise(Permission.SIGNING_KEYS_READ, None)
        async with self._database.transaction() as session:
            return await _list_keys(session, self._parts.clock())

    @method
    async def RotateSigningKey(
        self, request: tokens_pb2.RotateSigningKeyRequest, context: Context
    ) -> tokens_pb2.SigningKey:
        authorise(Permission.SIGNING_KEYS_MANAGE, None)

        async def act(session: AsyncSession, now: datetime) -> Change[tokens_pb2.SigningKey]:
            await lock_signing_keys(session)
            before = await _list_keys(session, now)
            key_encryption_key = self._parts.key_encryption_key
            if request.withdraw_now:
                row = await withdraw_all_but_new(session, key_encryption_key, now)
            else:
                _require_none_published(before)
                row = await publish_key(session, key_encryption_key, now)
            return Change(
                tenant=None,
                resource=RESOURCE,
                response=encode_signing_key(to_life(row), now),
                before=before,
                after=await _list_keys(session, now),
            )

        return await self._change("RotateSigningKey", request, tokens_pb2.SigningKey, act)

    @method
    async def RevokeToken(self, request: tokens_pb2.RevokeTokenRequest, context: Context) -> tokens_pb2.TokenRevocation:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)
        if len(request.token_id) != TOKEN_ID_CHARS:
            raise InvalidArgumentError(
                "token_id is not the id of a token",
                reason="INVALID_REVOCATION",
                hint=f"give the claim jti: {TOKEN_ID_CHARS} hexadecimal digits; never the token itself",
            )

        async def act(session: AsyncSession, now: datetime) -> Change[tokens_pb2.TokenRevocation]:
            owner = None if tenant is None else await load_tenant(session, tenant, caller, change=True)
            if owner is None:
                await lock_signing_keys(session)  # the platform has no row to lock
            ended = await revocations.end_tokens(session, owner, request.token_id, now)
            return _revoked(tenant, f"{_owner(tenant)}/tokens/{request.token_id}", ended, now)

        return await self._change("RevokeToken", request, tokens_pb2.TokenRevocation, act)

    @method
    async def RevokeApiKeyTokens(
        self, request: tokens_pb2.RevokeApiKeyTokensRequest, context: Context
    ) -> tokens_pb2.TokenRevocation:
        tenant, key_id = parse_api_key_name(request.name)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[tokens_pb2.TokenRevocation]:
            owner = None if tenant is None else await load_tenant(session, tenant, caller, change=True)
            if owner is None:
                await lock_signing_keys(session)
            key = await load_api_key(session, tenant, key_id, caller)
            ended = await revocations.end_api_key_tokens(session, owner, key, now, is_deleted=False)
            return _revoked(tenant, request.name, ended, now)

        return await self._change("RevokeApiKeyTokens", request, tokens_pb2.TokenRevocation, act)

    @method
    async def RevokeTenantTokens(
        self, request: tokens_pb2.RevokeTenantTokensRequest, context: Context
    ) -> tenants_pb2.Tenant:
        tenant = parse_tenant_name(request.name)
        caller = authorise(Permission.CREDENTIALS_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[tenants_pb2.Tenant]:
            row = await load_tenant(session, tenant, caller, change=True)
            before = to_tenant(row)
            revocations.end_all_tokens(row, now)
            row.update_time = now
            row.revision += 1
            after = to_tenant(row)
            return Change(tenant=tenant, resource=after.name, response=after, before=before, after=after)

        return await self._change("RevokeTenantTokens", request, tenants_pb2.Tenant, act)

    @method
    async def ListTokenRevocations(
        self, request: tokens_pb2.ListTokenRevocationsRequest, context: Context
    ) -> tokens_pb2.ListTokenRevocationsResponse:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.CREDENTIALS_READ, tenant)
        collection = f"{request.parent}/tokenRevocations"
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, collection).removeprefix(_PAGE_PREFIX)
        async with self._database.transaction() as session:
            if tenant is not None:
                await load_tenant(session, tenant, caller)
            found = await list_revocations(session, tenant, after, page_size + 1, self._parts.clock())
        rows, last = cut_page(found, page_size)
        return tokens_pb2.ListTokenRevocationsResponse(
            revocations=(_to_revocation(row) for row in rows),
            next_page_token=encode_page_token(collection, _PAGE_PREFIX + last.token_id_prefix) if last else "",
        )


async def _list_keys(session: AsyncSession, now: datetime) -> tokens_pb2.ListSigningKeysResponse:
    rows = await session.scalars(select(models.SigningKey).order_by(models.SigningKey.create_time.desc()))
    return tokens_pb2.ListSigningKeysResponse(signing_keys=(encode_signing_key(to_life(row), now) for row in rows))


def _require_none_published(keys: tokens_pb2.ListSigningKeysResponse) -> None:
    for key in keys.signing_keys:
        if key.state == tokens_pb2.SigningKey.STATE_PUBLISHED:
            raise FailedPreconditionError(
                f"a rotation is under way already: key {key.kid} is {KeyState.PUBLISHED.value}",
                reason="ROTATION_IN_PROGRESS",
                hint="it signs once every node holds it; in an emergency withdraw all other keys at once",
                metadata={"kid": key.kid},
            )


def _owner(tenant: TenantId | None) -> str:
    return "platform" if tenant is None else tenant_name(tenant)


def _revoked(tenant: TenantId | None, resource: str, ended: Ended, now: datetime) -> Change[tokens_pb2.TokenRevocation]:
    revocation = ended.revocation
    response = tokens_pb2.TokenRevocation(
        token_id_prefix=revocation.token_id_prefix,
        issued_before_time=_issued_before(revocation.issued_before_s),
        revoke_time=to_timestamp(now),
        expire_time=to_timestamp(datetime.fromtimestamp(revocation.expires_at_s, UTC)),
        widened_to_tenant=ended.is_widened,
    )
    return Change(tenant=tenant, resource=resource, response=response, after=response)


def _to_revocation(row: models.TokenRevocation) -> tokens_pb2.TokenRevocation:
    return tokens_pb2.TokenRevocation(
        token_id_prefix=row.token_id_prefix,
        issued_before_time=_issued_before(row.issued_before_s),
        revoke_time=to_timestamp(row.revoke_time),
        expire_time=to_timestamp(row.expire_time),
    )


def _issued_before(issued_before_s: int) -> Timestamp | None:
    return None if issued_before_s == EVER_S else Timestamp(seconds=issued_before_s)
