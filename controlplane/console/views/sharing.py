"""Sharing groups as one tenant sees them: what it shares, with whom, and what it is invited to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.console.views import texts
from saltern.admin.v1.sharing_groups_pb2 import SharingGroup, SharingGroupMember
from saltern.names import TenantId, parse_namespace_name, parse_sharing_group_name


@dataclass(frozen=True, slots=True)
class MemberRow:
    """``is_own``: a namespace of the tenant that looks. ``can_leave``: it has accepted and is not the owner's."""

    tenant: str
    namespace: str
    state: str
    since: str
    is_own: bool
    is_invited: bool
    can_leave: bool


@dataclass(frozen=True, slots=True)
class GroupView:
    owner: str
    id: str
    is_owner: bool
    model: str
    block: str
    epoch: int
    created: str
    members: tuple[MemberRow, ...]
    invitations: tuple[MemberRow, ...]


def group_views(groups: Sequence[SharingGroup], tenant: TenantId) -> list[GroupView]:
    """Those with an invitation to ``tenant`` first."""
    views = [_view(group, tenant) for group in groups]
    return sorted(views, key=lambda view: (not view.invitations, view.owner, view.id))


def _view(group: SharingGroup, tenant: TenantId) -> GroupView:
    owner, group_id = parse_sharing_group_name(group.name)
    rows = tuple(_row(member, tenant, owner) for member in group.members)
    return GroupView(
        owner=owner,
        id=group_id,
        is_owner=owner == tenant,
        model=group.model_fingerprint,
        block=f"{texts.count(group.block_tokens)} tokens, up to {texts.size(group.block_bytes)}",
        epoch=group.epoch,
        created=texts.stamp(group.create_time),
        members=rows,
        invitations=tuple(row for row in rows if row.is_own and row.is_invited),
    )


def _row(member: SharingGroupMember, tenant: TenantId, owner: TenantId) -> MemberRow:
    member_tenant, namespace = parse_namespace_name(member.namespace)
    is_invited = member.state == SharingGroupMember.STATE_INVITED
    is_own = member_tenant == tenant
    since = member.invite_time if is_invited else member.accept_time
    return MemberRow(
        tenant=member_tenant,
        namespace=namespace,
        state="invited" if is_invited else "member",
        since=texts.stamp(since),
        is_own=is_own,
        is_invited=is_invited,
        can_leave=is_own and not is_invited and member_tenant != owner,
    )
