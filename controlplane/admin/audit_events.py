"""AuditService: reading the audit trail, newest first."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import parse_page_size, parse_parent
from controlplane.admin.pages import cut_page, decode_sequence_token, encode_page_token
from controlplane.admin.resources import to_audit_event
from controlplane.admin.service import AdminServicer, absent, load_tenant, method
from controlplane.caller import Caller, authorise
from controlplane.db.models import PLATFORM_CHAIN, AuditEvent, Tenant
from controlplane.rpc import Context
from saltern.admin.v1 import audit_pb2, audit_pb2_grpc
from saltern.names import TenantId, tenant_name
from tenants.roles import Permission


class AuditService(AdminServicer, audit_pb2_grpc.AuditServiceServicer):
    service = "saltern.admin.v1.AuditService"

    @method
    async def ListAuditEvents(
        self, request: audit_pb2.ListAuditEventsRequest, context: Context
    ) -> audit_pb2.ListAuditEventsResponse:
        tenant = parse_parent(request.parent)
        caller = authorise(Permission.AUDIT_READ, tenant)
        collection = f"{request.parent}/auditEvents"
        page_size = parse_page_size(request.page_size)
        below = decode_sequence_token(request.page_token, collection)
        async with self._database.transaction() as session:
            from_sequence = await _first_readable(session, tenant, caller) if tenant else 1
            statement = (
                select(AuditEvent)
                .where(AuditEvent.chain == (tenant or PLATFORM_CHAIN), AuditEvent.sequence >= from_sequence)
                .order_by(AuditEvent.sequence.desc())
                .limit(page_size + 1)
            )
            if below is not None:
                statement = statement.where(AuditEvent.sequence < below)
            rows, last = cut_page((await session.scalars(statement)).all(), page_size)
        return audit_pb2.ListAuditEventsResponse(
            audit_events=map(to_audit_event, rows),
            next_page_token=encode_page_token(collection, last.sequence) if last else "",
        )


async def _first_readable(session: AsyncSession, tenant: TenantId, caller: Caller) -> int:
    """The sequence from which ``caller`` may read: a tenant sees nothing of an earlier one of the same id (I2).

    The platform sees the whole chain, also after the tenant is gone.
    """
    if not caller.is_platform:
        return (await load_tenant(session, tenant, caller)).first_audit_sequence
    known = select(exists().where(Tenant.id == tenant) | exists().where(AuditEvent.chain == tenant))
    if not await session.scalar(known):
        raise absent(caller, tenant_name(tenant))
    return 1
