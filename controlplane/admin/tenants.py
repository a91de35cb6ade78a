"""TenantService: who pays and owns quota."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import uuid4

from google.protobuf.empty_pb2 import Empty
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import parse_page_size, parse_text
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.requests import forget_requests_of_tenant
from controlplane.admin.resources import TENANT_COLUMNS, to_tenant
from controlplane.admin.service import AdminServicer, Change, Witness, load_tenant, method
from controlplane.audit.trail import next_sequence
from controlplane.caller import Caller, authorise
from controlplane.db.models import (
    DISPLAY_NAME_MAX_CHARS,
    AuditEvent,
    AuditOutcome,
    SaltEpoch,
    SaltPolicy,
    Tenant,
    TierQuota,
)
from controlplane.rpc import Context
from controlplane.salts.roots import new_root
from controlplane.secrets import root_secret_context
from controlplane.sharing.groups import depart
from saltern.admin.v1 import tenants_pb2, tenants_pb2_grpc
from saltern.errors import AlreadyExistsError, ResourceExhaustedError
from saltern.keys import SaltScope
from saltern.names import TenantId, parse_tenant_id, parse_tenant_name, tenant_name
from tenants.policy import TenantState
from tenants.quota import WEIGHT_DEFAULT, Tier
from tenants.roles import Permission
from tenants.tokens import CLOCK_SKEW_S

_COLLECTION = "tenants"
_FIRST_EPOCH = 1
_NAMESAKES_WINDOW = timedelta(seconds=10)


class TenantService(AdminServicer, tenants_pb2_grpc.TenantServiceServicer):
    service = "saltern.admin.v1.TenantService"

    @method
    async def CreateTenant(self, request: tenants_pb2.CreateTenantRequest, context: Context) -> tenants_pb2.Tenant:
        authorise(Permission.TENANTS_MANAGE, None)
        tenant = parse_tenant_id(request.tenant_id)
        display_name = _parse_display_name(request.tenant)
        uid = uuid4()
        # Outside the transaction: a key management service may be slow, and nothing is locked yet.
        wrapped = await new_root(self._parts.key_encryption_key, root_secret_context(uid, _FIRST_EPOCH))

        async def act(session: AsyncSession, now: datetime) -> Change[tenants_pb2.Tenant]:
            namesakes = await _recent_namesakes(session, tenant, now)
            create = insert(Tenant).values(
                id=tenant,
                uid=uid,
                display_name=display_name,
                state=TenantState.ACTIVE,
                # No token of an earlier tenant of this id is good for this one (I12). Token times are whole seconds,
                # and may be as late as the earlier one's own first; so each namesake of the last moments adds one.
                min_issue_time=now + namesakes * timedelta(seconds=1),
                first_audit_sequence=0,
                create_time=now,
                update_time=now,
                revision=1,
            )
            row = (await session.scalars(create.on_conflict_do_nothing().returning(Tenant))).one_or_none()
            if row is None:
                raise AlreadyExistsError(
                    f"{tenant_name(tenant)} exists already",
                    reason="TENANT_EXISTS",
                    hint="choose another tenant id",
                    metadata={"tenant": tenant},
                )
            session.add(SaltPolicy(tenant_id=tenant, scope=SaltScope.TENANT, epoch=_FIRST_EPOCH, update_time=now))
            session.add(SaltEpoch(tenant_id=tenant, epoch=_FIRST_EPOCH, wrapped_root_secret=wrapped, create_time=now))
            session.add_all(
                TierQuota(
                    tenant_id=tenant,
                    tier=tier,
                    reserved_bytes=0,
                    limit_bytes=0,
                    weight=WEIGHT_DEFAULT,
                    update_time=now,
                )
                for tier in Tier
            )
            row.first_audit_sequence = await next_sequence(session, tenant)
            created = to_tenant(row)
            return Change(tenant=tenant, resource=created.name, response=created, after=created)

        return await self._change("CreateTenant", request, tenants_pb2.Tenant, act)

    @method
    async def GetTenant(self, request: tenants_pb2.GetTenantRequest, context: Context) -> tenants_pb2.Tenant:
        tenant = parse_tenant_name(request.name)
        caller = authorise(Permission.TENANTS_READ, tenant)
        async with self._database.transaction() as session:
            return to_tenant(await load_tenant(session, tenant, caller))

    @method
    async def ListTenants(
        self, request: tenants_pb2.ListTenantsRequest, context: Context
    ) -> tenants_pb2.ListTenantsResponse:
        authorise(Permission.TENANTS_READ, None)
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, _COLLECTION)
        async with self._database.transaction() as session:
            statement = select(*TENANT_COLUMNS).where(Tenant.id > after).order_by(Tenant.id).limit(page_size + 1)
            rows, last = cut_page((await session.execute(statement)).all(), page_size)
        return tenants_pb2.ListTenantsResponse(
            tenants=map(to_tenant, rows),
            next_page_token=encode_page_token(_COLLECTION, last.id) if last else "",
        )

    @method
    async def UpdateTenant(self, request: tenants_pb2.UpdateTenantRequest, context: Context) -> tenants_pb2.Tenant:
        tenant = parse_tenant_name(request.tenant.name)
        caller = authorise(Permission.TENANTS_MANAGE, tenant)
        display_name = _parse_display_name(request.tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[tenants_pb2.Tenant]:
            row, before = await _load_to_change(session, tenant, caller, request.tenant.etag)
            row.display_name = display_name
            return _changed(row, before, now)

        return await self._change("UpdateTenant", request, tenants_pb2.Tenant, act)

    @method
    async def DeleteTenant(self, request: tenants_pb2.DeleteTenantRequest, context: Context) -> Empty:
        tenant = parse_tenant_name(request.name)
        caller = authorise(Permission.TENANTS_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            row, before = await _load_to_change(session, tenant, caller, request.etag)
            departures = await depart(session, self._parts.key_encryption_key, tenant)
            # Takes namespaces, quota, salt policy, keys and root secrets with it (I12); the audit chain stays (I11).
            await session.delete(row)
            await forget_requests_of_tenant(session, tenant)
            return Change(
                tenant=tenant,
                resource=before.name,
                response=Empty(),
                before=before,
                witnesses=[
                    Witness(other, seen, departure.after.get(other), departure.name)
                    for departure in departures
                    for other, seen in departure.before.items()
                ],
            )

        return await self._change("DeleteTenant", request, Empty, act)

    @method
    async def SuspendTenant(self, request: tenants_pb2.SuspendTenantRequest, context: Context) -> tenants_pb2.Tenant:
        return await self._set_state("SuspendTenant", request, TenantState.SUSPENDED)

    @method
    async def ResumeTenant(self, request: tenants_pb2.ResumeTenantRequest, context: Context) -> tenants_pb2.Tenant:
        return await self._set_state("ResumeTenant", request, TenantState.ACTIVE)

    async def _set_state(
        self,
        method_name: str,
        request: tenants_pb2.SuspendTenantRequest | tenants_pb2.ResumeTenantRequest,
        state: TenantState,
    ) -> tenants_pb2.Tenant:
        """Setting the state that a tenant has is no error: whoever asks twice wanted it once."""
        tenant = parse_tenant_name(request.name)
        caller = authorise(Permission.TENANTS_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[tenants_pb2.Tenant]:
            row, before = await _load_to_change(session, tenant, caller, request.etag)
            row.state = state
            return _changed(row, before, now)

        return await self._change(method_name, request, tenants_pb2.Tenant, act)


async def _recent_namesakes(session: AsyncSession, tenant: TenantId, now: datetime) -> int:
    """How many tenants of this id were made in the last seconds.

    Raises:
        ResourceExhaustedError: NAMES_REUSED_TOO_FAST: so many that a token for the next would be ahead of the clock by
            more than verifiers allow for skew.
    """
    made = select(func.count()).where(
        AuditEvent.chain == tenant,
        AuditEvent.method == f"{TenantService.service}/CreateTenant",
        AuditEvent.outcome == AuditOutcome.SUCCESS,
        AuditEvent.event_time > now - _NAMESAKES_WINDOW,
    )
    count = await session.scalar(made) or 0
    if count >= CLOCK_SKEW_S - 1:
        raise ResourceExhaustedError(
            f"{tenant_name(tenant)} was made and deleted {count} times in {_NAMESAKES_WINDOW.seconds} s",
            reason="NAMES_REUSED_TOO_FAST",
            hint="wait a little, or choose another tenant id",
            retry_after_ms=_NAMESAKES_WINDOW.seconds * 1000,
        )
    return count


async def _load_to_change(
    session: AsyncSession, tenant: TenantId, caller: Caller, etag: str
) -> tuple[Tenant, tenants_pb2.Tenant]:
    """The locked row and the resource as it is before the change."""
    row = await load_tenant(session, tenant, caller, change=True)
    before = to_tenant(row)
    check_etag(etag, before.etag, before.name)
    return row, before


def _changed(row: Tenant, before: tenants_pb2.Tenant, now: datetime) -> Change[tenants_pb2.Tenant]:
    row.update_time = now
    row.revision += 1
    after = to_tenant(row)
    return Change(tenant=TenantId(row.id), resource=after.name, response=after, before=before, after=after)


def _parse_display_name(tenant: tenants_pb2.Tenant) -> str:
    return parse_text(tenant.display_name, "display_name", max_chars=DISPLAY_NAME_MAX_CHARS)
