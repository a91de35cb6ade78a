"""SharingGroupService: namespaces of several tenants that read each other's blocks, with everybody's consent (I2).

Every act goes into the chains of all tenants that it touches, each with what that tenant may see, and changes the
policy of each.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Set
from datetime import datetime
from typing import TypeAlias, TypeVar
from uuid import uuid4

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import parse_page_size
from controlplane.admin.pages import cut_page, decode_name_token, encode_page_token
from controlplane.admin.service import AdminServicer, Change, Witness, absent, load_tenant, method, require_room
from controlplane.caller import Caller, authorise, current_caller, not_available
from controlplane.db.models import Namespace, SharingGroup, SharingGroupMember, Tenant
from controlplane.rpc import Context
from controlplane.sharing.groups import (
    Group,
    load_group,
    load_groups_of,
    make_group,
    require_place,
    rotate,
    scope_for,
    view,
    views,
)
from saltern.admin.v1 import sharing_groups_pb2, sharing_groups_pb2_grpc
from saltern.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
from saltern.names import (
    NamespaceId,
    SharingGroupId,
    TenantId,
    namespace_name,
    parse_identifier,
    parse_namespace_name,
    parse_sharing_group_name,
    parse_tenant_name,
    sharing_group_name,
    tenant_name,
)
from tenants.roles import Permission
from tenants.sharing import GROUP_MEMBERS_MAX, GROUPS_PER_TENANT_MAX

_Group: TypeAlias = sharing_groups_pb2.SharingGroup
_ResponseT = TypeVar("_ResponseT", bound=Message)


class SharingGroupService(AdminServicer, sharing_groups_pb2_grpc.SharingGroupServiceServicer):
    service = "saltern.admin.v1.SharingGroupService"

    @method
    async def CreateSharingGroup(
        self, request: sharing_groups_pb2.CreateSharingGroupRequest, context: Context
    ) -> _Group:
        owner = parse_tenant_name(request.parent)
        caller = authorise(Permission.SHARING_MANAGE, owner)
        group_id = SharingGroupId(parse_identifier(request.sharing_group_id, what="sharing group"))
        tenant, namespace_id = parse_namespace_name(request.namespace)
        if tenant != owner:
            raise InvalidArgumentError(
                "the first member of a sharing group is a namespace of its owner",
                reason="FOREIGN_NAMESPACE",
                hint="create the group with a namespace of your own, then invite others",
            )

        async def act(session: AsyncSession, now: datetime) -> Change[_Group]:
            await load_tenant(session, owner, caller, change=True)
            count = select(func.count()).select_from(SharingGroup).where(SharingGroup.tenant_id == owner)
            require_room(await session.scalar(count) or 0, GROUPS_PER_TENANT_MAX, "sharing groups", tenant_name(owner))
            await require_place(session, owner)
            if await load_group(session, owner, group_id) is not None:
                raise AlreadyExistsError(
                    f"{sharing_group_name(owner, group_id)} exists already",
                    reason="SHARING_GROUP_EXISTS",
                    hint="choose another id for the sharing group",
                    metadata={"tenant": owner, "sharing_group": group_id},
                )
            namespace = await session.get(Namespace, (owner, namespace_id), with_for_update={"key_share": True})
            if namespace is None:
                raise absent(caller, request.namespace)
            uid = uuid4()
            group = await make_group(
                self._parts.key_encryption_key,
                SharingGroup(
                    uid=uid,
                    tenant_id=owner,
                    id=group_id,
                    model_fingerprint=namespace.model_fingerprint,
                    block_tokens=namespace.block_tokens,
                    block_bytes=namespace.block_bytes,
                    create_time=now,
                    revision=1,
                ),
                SharingGroupMember(
                    group_uid=uid,
                    tenant_id=owner,
                    namespace_id=namespace_id,
                    namespace_uid=namespace.uid,
                    invite_time=now,
                    accept_time=now,
                ),
            )
            session.add(group.row)
            await session.flush()
            session.add_all(group.members)
            created = _seen(group, owner)
            return Change(tenant=owner, resource=group.name, response=created, after=created)

        return await self._change("CreateSharingGroup", request, _Group, act, scope=scope_for(owner))

    @method
    async def GetSharingGroup(self, request: sharing_groups_pb2.GetSharingGroupRequest, context: Context) -> _Group:
        owner, group_id = parse_sharing_group_name(request.name)
        viewer = parse_tenant_name(request.member) if request.member else current_caller().tenant or owner
        caller = authorise(Permission.SHARING_READ, viewer)
        async with self._database.transaction(scope_for(viewer)) as session:
            group = await load_group(session, owner, group_id)
        seen = None if group is None else view(group, viewer)
        if seen is None:
            raise absent(caller, request.name)
        return seen

    @method
    async def ListSharingGroups(
        self, request: sharing_groups_pb2.ListSharingGroupsRequest, context: Context
    ) -> sharing_groups_pb2.ListSharingGroupsResponse:
        tenant = parse_tenant_name(request.parent)
        caller = authorise(Permission.SHARING_READ, tenant)
        collection = f"{tenant_name(tenant)}/sharingGroups"
        page_size = parse_page_size(request.page_size)
        after = decode_name_token(request.page_token, collection, parse_sharing_group_name)
        async with self._database.transaction(scope_for(tenant)) as session:
            await load_tenant(session, tenant, caller)
            groups = [group for group in await load_groups_of(session, tenant) if group.name > after]
        page, last = cut_page(sorted(groups, key=lambda group: group.name)[: page_size + 1], page_size)
        return sharing_groups_pb2.ListSharingGroupsResponse(
            sharing_groups=[_seen(group, tenant) for group in page],
            next_page_token=encode_page_token(collection, last.name) if last else "",
        )

    @method
    async def InviteMember(self, request: sharing_groups_pb2.InviteMemberRequest, context: Context) -> _Group:
        owner, group_id = parse_sharing_group_name(request.name)
        caller = authorise(Permission.SHARING_MANAGE, owner)
        tenant, namespace_id = parse_namespace_name(request.namespace)

        async def act(session: AsyncSession, now: datetime) -> Change[_Group]:
            await load_tenant(session, owner, caller, change=True)
            group = await _load(session, owner, group_id, caller)
            before = _seen(group, owner)
            require_room(len(group.members), GROUP_MEMBERS_MAX, "members and invitations", group.name)
            if group.find(tenant, namespace_id) is not None:
                raise AlreadyExistsError(
                    f"{request.namespace} is invited to {group.name} already, or a member",
                    reason="MEMBER_EXISTS",
                    hint="list the group to see who has accepted",
                )
            invitation = SharingGroupMember(
                group_uid=group.row.uid, tenant_id=tenant, namespace_id=namespace_id, invite_time=now
            )
            session.add(invitation)
            group.members.append(invitation)
            group.row.revision += 1
            # I2: nothing in the answer, and no refusal, depends on whether the tenant is there. Its own chain does.
            witnesses = []
            if tenant != owner:
                is_there = await session.get(Tenant, tenant) is not None
                witnesses.append(Witness(tenant, None, view(group, tenant), is_there=is_there))
            after = _seen(group, owner)
            return Change(
                tenant=owner,
                resource=group.name,
                response=after,
                before=before,
                after=after,
                witnesses=witnesses,
            )

        return await self._change("InviteMember", request, _Group, act, scope=scope_for(owner))

    @method
    async def AcceptInvitation(self, request: sharing_groups_pb2.AcceptInvitationRequest, context: Context) -> _Group:
        owner, group_id = parse_sharing_group_name(request.name)
        tenant, namespace_id = parse_namespace_name(request.namespace)
        caller = authorise(Permission.SHARING_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[_Group]:
            await load_tenant(session, tenant, caller, change=True)
            group = await _load_for(session, owner, group_id, tenant, caller)
            before, touched = views(group, group.touched | {tenant}), group.touched | {tenant}
            invitation = group.find(tenant, namespace_id)
            if invitation is None:
                raise absent(caller, request.name)
            if invitation.accept_time is not None:
                raise AlreadyExistsError(
                    f"{request.namespace} is a member of {group.name} already",
                    reason="MEMBER_EXISTS",
                    hint="nothing is left to do",
                )
            await require_place(session, tenant)
            namespace = await session.get(Namespace, (tenant, namespace_id), with_for_update={"key_share": True})
            if namespace is None:
                raise absent(caller, request.namespace)
            _require_same_blocks(group, namespace)
            invitation.accept_time, invitation.namespace_uid = now, namespace.uid
            group.row.revision += 1
            return _change_of(group, tenant, before, touched, response=_seen(group, tenant))

        return await self._change("AcceptInvitation", request, _Group, act, scope=scope_for(tenant))

    @method
    async def DeclineInvitation(self, request: sharing_groups_pb2.DeclineInvitationRequest, context: Context) -> Empty:
        owner, group_id = parse_sharing_group_name(request.name)
        tenant, namespace_id = parse_namespace_name(request.namespace)
        caller = authorise(Permission.SHARING_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            await load_tenant(session, tenant, caller, change=True)
            group = await _load_for(session, owner, group_id, tenant, caller)
            touched = {group.owner, tenant}
            before = views(group, touched)
            invitation = group.find(tenant, namespace_id)
            if invitation is None:
                raise absent(caller, request.name)
            if invitation.accept_time is not None:
                raise FailedPreconditionError(
                    f"{request.namespace} has accepted the invitation already",
                    reason="MEMBER_ACCEPTED",
                    hint="leave the group instead: saltern share leave",
                )
            await _take_out(session, group, invitation)
            group.row.revision += 1
            return _change_of(group, tenant, before, touched, response=Empty())

        return await self._change("DeclineInvitation", request, Empty, act, scope=scope_for(tenant))

    @method
    async def LeaveSharingGroup(self, request: sharing_groups_pb2.LeaveSharingGroupRequest, context: Context) -> Empty:
        owner, group_id = parse_sharing_group_name(request.name)
        tenant, namespace_id = parse_namespace_name(request.namespace)
        caller = authorise(Permission.SHARING_MANAGE, tenant)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            # No check for suspension: whoever must stop sharing may always do so.
            group = await _load_for(session, owner, group_id, tenant, caller)
            before, touched = views(group, group.touched), group.touched
            member = group.find(tenant, namespace_id)
            if member is None or member.accept_time is None:
                raise absent(caller, request.name)
            await _take_out(session, group, member)
            await rotate(self._parts.key_encryption_key, group)
            return _change_of(group, tenant, before, touched, response=Empty())

        return await self._change("LeaveSharingGroup", request, Empty, act, scope=scope_for(tenant))

    @method
    async def RemoveMember(self, request: sharing_groups_pb2.RemoveMemberRequest, context: Context) -> _Group:
        owner, group_id = parse_sharing_group_name(request.name)
        caller = authorise(Permission.SHARING_MANAGE, owner)
        tenant, namespace_id = parse_namespace_name(request.namespace)

        async def act(session: AsyncSession, now: datetime) -> Change[_Group]:
            await load_tenant(session, owner, caller, change=True)
            group = await _load(session, owner, group_id, caller)
            touched = set(group.touched)
            member = group.find(tenant, namespace_id)
            if member is None:
                raise absent(caller, request.namespace)
            is_there = await session.get(Tenant, tenant) is not None
            touched.add(tenant)
            before = views(group, touched)
            was_member = member.accept_time is not None
            await _take_out(session, group, member)
            if was_member:
                await rotate(self._parts.key_encryption_key, group)
            else:
                group.row.revision += 1
                touched = {owner, tenant} & touched  # an invitation was nobody else's business
            absent_tenants = set() if is_there else {tenant}
            return _change_of(group, owner, before, touched, absent_tenants, response=_seen(group, owner))

        return await self._change("RemoveMember", request, _Group, act, scope=scope_for(owner))

    @method
    async def DeleteSharingGroup(
        self, request: sharing_groups_pb2.DeleteSharingGroupRequest, context: Context
    ) -> Empty:
        owner, group_id = parse_sharing_group_name(request.name)
        caller = authorise(Permission.SHARING_MANAGE, owner)

        async def act(session: AsyncSession, now: datetime) -> Change[Empty]:
            await load_tenant(session, owner, caller, change=True)
            group = await _load(session, owner, group_id, caller)
            before = views(group, group.touched)
            check_etag(request.etag, before[owner].etag, group.name)
            await session.delete(group.row)
            return Change(
                tenant=owner,
                resource=group.name,
                response=Empty(),
                before=before.pop(owner),
                witnesses=[Witness(tenant, seen) for tenant, seen in before.items()],
            )

        return await self._change("DeleteSharingGroup", request, Empty, act, scope=scope_for(owner))


async def _load(session: AsyncSession, owner: TenantId, group_id: SharingGroupId, caller: Caller) -> Group:
    """A group of the caller's own, locked."""
    group = await load_group(session, owner, group_id, change=True)
    if group is None:
        raise absent(caller, sharing_group_name(owner, group_id))
    return group


async def _load_for(
    session: AsyncSession, owner: TenantId, group_id: SharingGroupId, tenant: TenantId, caller: Caller
) -> Group:
    """A group that ``tenant`` may see, locked; absent and forbidden get the same answer (I2)."""
    group = await load_group(session, owner, group_id, change=True)
    if group is None or view(group, tenant) is None:
        raise absent(caller, sharing_group_name(owner, group_id))
    return group


async def _take_out(session: AsyncSession, group: Group, member: SharingGroupMember) -> None:
    group.members.remove(member)
    await session.delete(member)


def _require_same_blocks(group: Group, namespace: Namespace) -> None:
    """Raise FailedPreconditionError (BLOCKS_DIFFER) unless a block of one is a block of the other."""
    row = group.row
    differing = [
        name
        for name, here, there in (
            ("model_fingerprint", namespace.model_fingerprint, row.model_fingerprint),
            ("block_tokens", namespace.block_tokens, row.block_tokens),
            ("block_bytes", namespace.block_bytes, row.block_bytes),
        )
        if here != there
    ]
    if differing:
        own_name = namespace_name(TenantId(namespace.tenant_id), NamespaceId(namespace.id))
        raise FailedPreconditionError(
            f"{own_name} differs from {group.name} in {', '.join(differing)}",
            reason="BLOCKS_DIFFER",
            hint="only blocks of one model and one shape can be shared: create a namespace with the group's values",
            metadata={"differing": ",".join(differing)},
        )


def _seen(group: Group, tenant: TenantId) -> _Group:
    """The group as a tenant sees it that does."""
    seen = view(group, tenant)
    if seen is None:
        raise not_available()
    return seen


def _change_of(
    group: Group,
    tenant: TenantId,
    before: dict[TenantId, _Group],
    touched: set[TenantId],
    absent_tenants: Set[TenantId] = frozenset(),
    *,
    response: _ResponseT,
) -> Change[_ResponseT]:
    """The change of a group that ``tenant`` made: what each tenant that it touches saw before and sees now.

    ``absent_tenants``: those of ``touched`` that are not there.
    """
    after = views(group, touched)
    return Change(
        tenant=tenant,
        resource=group.name,
        response=response,
        before=before.get(tenant),
        after=after.get(tenant),
        witnesses=[
            Witness(one, before.get(one), after.get(one), is_there=one not in absent_tenants)
            for one in sorted(touched - {tenant})
        ],
    )
