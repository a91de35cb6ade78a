"""A sharing group with its members, and what each tenant may see of it.

Its rows belong to several tenants, so it is read in a scope of its own (``ServiceTask.SHARING``). Whatever leaves this
module for a tenant goes through :func:`view`: the owner sees everything, a member the other members, who is invited the
members and its own invitation, and anybody else nothing (I2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import make_etag
from controlplane.admin.fields import to_timestamp
from controlplane.caller import not_available
from controlplane.db import PlatformScope, ServiceScope, ServiceTask, TenantScope, models
from controlplane.db.row_security import scope_of_current_caller
from controlplane.salts.roots import new_root
from controlplane.secrets import KeyEncryptionKey
from controlplane.secrets.wrapping import group_root_context
from saltern.admin.v1 import sharing_groups_pb2
from saltern.errors import FailedPreconditionError, ResourceExhaustedError
from saltern.names import NamespaceId, SharingGroupId, TenantId, namespace_name, sharing_group_name, tenant_name
from tenants.sharing import GROUPS_PER_TENANT_MAX

_SCOPE: Final = ServiceScope(ServiceTask.SHARING)
_FIRST_EPOCH: Final = 1


def scope_for(tenant: TenantId) -> ServiceScope:
    """The scope of a transaction about groups in the name of ``tenant``.

    It takes in rows of every tenant, so row-level security is no second wall behind ``authorise`` here. This is: what a
    transaction of the caller's own could not touch is not acted for (I2).

    Raises:
        PermissionDeniedError: RESOURCE_NOT_AVAILABLE: the caller is neither of ``tenant`` nor of the platform.
    """
    own = scope_of_current_caller()
    if not isinstance(own, PlatformScope) and own != TenantScope(tenant):
        raise not_available()
    return _SCOPE


@dataclass(slots=True)
class Group:
    """A group and everybody in it or invited to it, members first, in the order in which they came."""

    row: models.SharingGroup
    members: list[models.SharingGroupMember]

    @property
    def owner(self) -> TenantId:
        return TenantId(self.row.tenant_id)

    @property
    def name(self) -> str:
        return sharing_group_name(self.owner, SharingGroupId(self.row.id))

    def find(self, tenant: TenantId, namespace: NamespaceId) -> models.SharingGroupMember | None:
        """The member or invitation of a namespace."""
        return next((one for one in self.members if (one.tenant_id, one.namespace_id) == (tenant, namespace)), None)

    @property
    def accepted(self) -> list[models.SharingGroupMember]:
        return [one for one in self.members if one.accept_time is not None]

    @property
    def touched(self) -> set[TenantId]:
        """The tenants that every act on the group concerns: the owner and those who have accepted."""
        return {self.owner, *(TenantId(one.tenant_id) for one in self.accepted)}


async def make_group(
    key_encryption_key: KeyEncryptionKey, group: models.SharingGroup, first: models.SharingGroupMember
) -> Group:
    """Give a new group its first root secret; nothing is stored yet."""
    group.epoch = _FIRST_EPOCH
    group.wrapped_root_secret = await new_root(key_encryption_key, group_root_context(group.uid, group.epoch))
    return Group(group, [first])


async def load_group(
    session: AsyncSession, owner: TenantId, group: SharingGroupId, *, change: bool = False
) -> Group | None:
    """A group by name, locked if it is to be changed; None if there is none."""
    statement = select(models.SharingGroup).where(
        models.SharingGroup.tenant_id == owner, models.SharingGroup.id == group
    )
    row = await session.scalar(statement.with_for_update() if change else statement)
    return None if row is None else (await _with_members(session, [row]))[0]


async def load_groups_of(session: AsyncSession, tenant: TenantId, *, change: bool = False) -> list[Group]:
    """Every group that a tenant owns, is a member of or is invited to, by name."""
    row, member = models.SharingGroup, models.SharingGroupMember
    has_it = select(member.group_uid).where(member.tenant_id == tenant)
    statement = select(row).where(or_(row.tenant_id == tenant, row.uid.in_(has_it))).order_by(row.tenant_id, row.id)
    rows = (await session.scalars(statement.with_for_update() if change else statement)).all()
    return await _with_members(session, rows)


async def _with_members(session: AsyncSession, rows: Sequence[models.SharingGroup]) -> list[Group]:
    member = models.SharingGroupMember
    statement = (
        select(member)
        .where(member.group_uid.in_([row.uid for row in rows]))
        .order_by(member.accept_time.nulls_last(), member.invite_time, member.tenant_id, member.namespace_id)
    )
    groups = {row.uid: Group(row, []) for row in rows}
    for one in await session.scalars(statement):
        groups[one.group_uid].members.append(one)
    return list(groups.values())


async def require_place(session: AsyncSession, tenant: TenantId) -> None:
    """Raise ResourceExhaustedError (TOO_MANY_RESOURCES) if ``tenant`` is in as many groups as it may be."""
    member = models.SharingGroupMember
    count = select(func.count(member.group_uid.distinct())).where(
        member.tenant_id == tenant, member.accept_time.is_not(None)
    )
    if (await session.scalar(count) or 0) >= GROUPS_PER_TENANT_MAX:
        raise ResourceExhaustedError(
            f"{tenant_name(tenant)} is in {GROUPS_PER_TENANT_MAX} sharing groups, and that is the limit",
            reason="TOO_MANY_RESOURCES",
            hint="leave or delete sharing groups that are not needed any more",
            metadata={"limit": str(GROUPS_PER_TENANT_MAX)},
        )


async def require_not_shared(session: AsyncSession, namespace: models.Namespace) -> None:
    """Raise FailedPreconditionError (NAMESPACE_SHARED) if ``namespace`` is a member of a sharing group.

    Leaving rotates the group's salt and is told to the others; a namespace that just went would do neither.
    """
    member = models.SharingGroupMember
    shared = select(member.group_uid).where(
        member.tenant_id == namespace.tenant_id, member.namespace_uid == namespace.uid
    )
    if await session.scalar(shared.limit(1)) is not None:
        raise FailedPreconditionError(
            f"{namespace_name(TenantId(namespace.tenant_id), NamespaceId(namespace.id))} is in a sharing group",
            reason="NAMESPACE_SHARED",
            hint="leave its sharing groups first: saltern share list, then saltern share leave",
        )


async def rotate(key_encryption_key: KeyEncryptionKey, group: Group) -> None:
    """Begin a new epoch and destroy the root secret of the one before: nothing shared until now is found again (I12).

    Whoever has left knows the salt of that epoch; with it gone from the policy, it opens nothing.
    """
    row = group.row
    row.epoch += 1
    row.revision += 1
    row.wrapped_root_secret = await new_root(key_encryption_key, group_root_context(row.uid, row.epoch))


@dataclass(frozen=True, slots=True)
class Departure:
    """What a tenant that goes leaves behind in a group, for each of the others in it: what it saw, and sees now."""

    name: str
    before: dict[TenantId, sharing_groups_pb2.SharingGroup]
    after: dict[TenantId, sharing_groups_pb2.SharingGroup]


async def depart(session: AsyncSession, key_encryption_key: KeyEncryptionKey, tenant: TenantId) -> list[Departure]:
    """A tenant is deleted: take it out of every group before its rows go, and rotate the salts that it knew.

    What it owns goes with it; what it is only invited to stays, so that nobody learns from a list that it is gone (I2).
    """
    departures = []
    for group in await load_groups_of(session, tenant, change=True):
        others = group.touched - {tenant}
        before = views(group, others)
        if group.owner == tenant:
            departures.append(Departure(group.name, before, {}))
            continue
        mine = [one for one in group.accepted if one.tenant_id == tenant]
        if not mine:
            continue
        for member in mine:
            group.members.remove(member)
            await session.delete(member)
        await rotate(key_encryption_key, group)
        departures.append(Departure(group.name, before, views(group, others)))
    return departures


def views(group: Group, tenants: Iterable[TenantId]) -> dict[TenantId, sharing_groups_pb2.SharingGroup]:
    """The group as each of ``tenants`` may see it; those whom it does not concern are left out."""
    return {tenant: seen for tenant in sorted(tenants) if (seen := view(group, tenant)) is not None}


def view(group: Group, tenant: TenantId) -> sharing_groups_pb2.SharingGroup | None:
    """The group as ``tenant`` may see it; None if it is none of its business."""
    if tenant == group.owner:
        visible: Iterable[models.SharingGroupMember] = group.members
    elif any(one.tenant_id == tenant for one in group.members):
        visible = (one for one in group.members if one.accept_time is not None or one.tenant_id == tenant)
    else:
        return None
    row = group.row
    return sharing_groups_pb2.SharingGroup(
        name=group.name,
        uid=str(row.uid),
        model_fingerprint=row.model_fingerprint,
        block_tokens=row.block_tokens,
        block_bytes=row.block_bytes,
        epoch=row.epoch,
        members=map(_to_member, visible),
        create_time=to_timestamp(row.create_time),
        etag=make_etag(row.uid, row.revision),
    )


def _to_member(row: models.SharingGroupMember) -> sharing_groups_pb2.SharingGroupMember:
    has_accepted = row.accept_time is not None
    states = sharing_groups_pb2.SharingGroupMember
    return sharing_groups_pb2.SharingGroupMember(
        namespace=namespace_name(TenantId(row.tenant_id), NamespaceId(row.namespace_id)),
        state=states.STATE_ACCEPTED if has_accepted else states.STATE_INVITED,
        invite_time=to_timestamp(row.invite_time),
        accept_time=to_timestamp(row.accept_time),
    )
