"""NamespaceService: one model deployment's cache each."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from google.protobuf.empty_pb2 import Empty
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import parse_integer, parse_page_size, parse_text, refused
from controlplane.admin.pages import cut_page, decode_identifier_token, encode_page_token
from controlplane.admin.resources import TIER_FROM_PROTO, to_namespace
from controlplane.admin.service import AdminServicer, Change, absent, load_tenant, method, require_room
from controlplane.caller import Caller, authorise
from controlplane.db.models import BLOCK_TOKENS_MAX, MODEL_FINGERPRINT_MAX_CHARS, Namespace
from controlplane.rpc import Context
from controlplane.sharing.groups import require_not_shared
from saltern.admin.v1 import namespaces_pb2, namespaces_pb2_grpc
from saltern.errors import AlreadyExistsError
from saltern.names import (
    NamespaceId,
    TenantId,
    namespace_name,
    parse_namespace_id,
    parse_namespace_name,
    parse_tenant_name,
    tenant_name,
)
from saltern.wire import ENTRY_MAX_BYTES
from tenants.quota import BYTES_MAX, Tier
from tenants.roles import Permission

#: Every node holds every namespace of every tenant in its policy, so their number has a limit.
NAMESPACES_PER_TENANT_MAX = 256
_LIMIT_COLUMNS = {Tier.DRAM: "dram_limit_bytes", Tier.SSD: "ssd_limit_bytes"}


class NamespaceService(AdminServicer, namespaces_pb2_grpc.NamespaceServiceServicer):
    service = "saltern.admin.v1.NamespaceService"

    @method
    async def CreateNamespace(
        self, request: namespaces_pb2.CreateNamespaceRequest, context: Context
    ) -> namespaces_pb2.Namespace:
        tenant = parse_tenant_name(request.parent)
        caller = authorise(Permission.NAMESPACES_MANAGE, tenant)
        namespace = parse_namespace_id(request.namespace_id)
        wanted = request.namespace
        columns = {
            "model_fingerprint": parse_text(
                wanted.model_fingerprint, "model_fingerprint", max_chars=MODEL_FINGERPRINT_MAX_CHARS, required=True
            ),
            "block_tokens": parse_integer(wanted.block_tokens, "block_tokens", 1, BLOCK_TOKENS_MAX),
            "block_bytes": parse_integer(wanted.block_bytes, "block_bytes", 1, ENTRY_MAX_BYTES),
            **_parse_limits(wanted.tier_limits),
        }

        async def act(session: AsyncSession, now: datetime) -> Change[namespaces_pb2.Namespace]:
            await load_tenant(session, tenant, caller, change=True)
            count = select(func.count()).select_from(Namespace).where(Namespace.tenant_id == tenant)
            require_room(await session.scalar(count) or 0, NAMESPACES_PER_TENANT_MAX, "namespaces", tenant_name(tenant))
            create = insert(Namespace).values(tenant_id=tenant, id=namespace, create_time=now, **columns)
            row = (await session.scalars(create.on_conflict_do_nothing().returning(Namespace))).one_or_none()
            if row is None:
                raise AlreadyExistsError(
                    f"{namespace_name(tenant, namespace)} exists already",
                    reason="NAMESPACE_EXISTS",
                    hint="choose another namespace id; of a namespace only its limits change after its creation",
                    metadata={"tenant": tenant, "namespace": namespace},
                )
            created = to_namespace(row)
            return Change(tenant=tenant, resource=created.name, response=created, after=created)

        return await self._change("CreateNamespace", request, namespaces_pb2.Namespace, act)

    @method
    async def GetNamespace(
        self, request: namespaces_pb2.GetNamespaceRequest, context: Context
    ) -> namespaces_pb2.Namespace:
        tenant, namespace = parse_namespace_name(request.name)
        caller = authorise(Permission.NAMESPACES_READ, tenant)
        async with self._database.transaction() as session:
            return to_namespace(await _load(session, tenant, namespace, caller))

    @method
    async def ListNamespaces(
        self, request: namespaces_pb2.ListNamespacesRequest, context: Context
    ) -> namespaces_pb2.ListNamespacesResponse:
        tenant = parse_tenant_name(request.parent)
        caller = authorise(Permission.NAMESPACES_READ, tenant)
        collection = f"{tenant_name(tenant)}/namespaces"
        page_size = parse_page_size(request.page_size)
        after = decode_identifier_token(request.page_token, collection)
        async with self._database.transaction() as session:
            await load_tenant(session, tenant, caller)
            statement = (
                select(Namespace)
                .where(Namespace.tenant_id == tenant, Namespace.id > after)
                .order_by(Namespace.id)
                .limit(page_size + 1)
            )
            rows, last = cut_page((await session.scalars(statement)).all(), page_size)
        return namespaces_pb2.ListNamespacesResponse(
            namespaces=map(to_namespace, rows),
            next_page_token=encode_page_token(collection, last.id) if last else "",
        )

    @method
    async def UpdateNamespace(
        self, request: namespaces_pb2.UpdateNamespaceRequest, context: Context
    ) -> namespaces_pb2.Namespace:
        tenant, namespace = parse_namespace_name(request.namespace.name)
        caller = authorise(Permission.NAMESPACES_MANAGE, tenant)
        paths = set(request.update_mask.paths)
        if paths - {"tier_limits"}:
            raise refused("update_mask", "names more than tier_limits", "only the limits of a namespace change")
        columns = _parse_limits(request.namespace.tier_limits)

        async def act(session: AsyncSession, now: datetime) -> Change[namespaces_pb2.Namespace]:
            await load_tenant(session, tenant, caller, change=True)
            row = await _load(session, tenant, namespace, caller)
            before = to_namespace(row)
            check_etag(request.namespace.etag, before.etag, before.name)
            for column, limit_bytes in columns.items():
                setattr(row, column, limit_bytes)
            row.revision += 1
            after = to_namespace(row)
            return Change(tenant=tenant, resource=after.name, response=after, before=before, after=after)

        return await self._change("UpdateNamespace", request, namespaces_pb2.Namespace, act)

    @method
    async def DeleteNamespace(self, request: namespaces_pb2.DeleteNamespaceRequest, context: Context) -> Empty:
        tenant, namespace = parse_namespace_name(request.name)
        caller = authorise(Permission.NAMESPACES_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            await load_tenant(session, tenant, caller, change=True)
            row = await _load(session, tenant, namespace, caller)
            before = to_namespace(row)
            check_etag(request.etag, before.etag, before.name)
            await require_not_shared(session, row)
            await session.delete(row)
            return Change(tenant=tenant, resource=before.name, response=Empty(), before=before)

        return await self._change("DeleteNamespace", request, Empty, act)


def _parse_limits(limits: Sequence[namespaces_pb2.NamespaceLimit]) -> dict[str, int | None]:
    """The columns of all limits: None for a tier that is not listed, which has none.

    Raises:
        InvalidArgumentError: a tier is unknown or listed twice, or a limit is out of range.
    """
    columns: dict[str, int | None] = dict.fromkeys(_LIMIT_COLUMNS.values())
    for limit in limits:
        tier = TIER_FROM_PROTO.get(limit.tier)
        if tier is None:
            raise refused("tier_limits.tier", f"{limit.tier} is no tier", "give TIER_DRAM or TIER_SSD")
        if columns[_LIMIT_COLUMNS[tier]] is not None:
            raise refused("tier_limits", f"lists the tier {tier.value} twice", "list each tier once")
        limit_bytes = parse_integer(limit.limit_bytes, "tier_limits.limit_bytes", 0, BYTES_MAX)
        columns[_LIMIT_COLUMNS[tier]] = limit_bytes
    return columns


async def _load(session: AsyncSession, tenant: TenantId, namespace: NamespaceId, caller: Caller) -> Namespace:
    row = await session.get(Namespace, (tenant, namespace))
    if row is None:
        raise absent(caller, namespace_name(tenant, namespace))
    return row
