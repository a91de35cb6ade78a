"""``saltern share``: sharing groups, in which namespaces of several tenants read each other's blocks on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from saltern.cli.confirmation import confirm, yes_option
from saltern.cli.failure import say
from saltern.cli.parameters import GROUP, MEMBER, NAMESPACE, TENANT
from saltern.cli.render import Table, enum_word, local_time, print_json, print_message, print_messages
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import NamespaceId, TenantId, namespace_name, parse_sharing_group_name, tenant_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.sharing_groups_pb2 import SharingGroup

_ENDS: Final = "What was shared in it is dropped on every node, and the group's salt is another one at once."
_group = click.argument("group", metavar="OWNER/GROUP", type=GROUP)
_member = click.argument("member", metavar="TENANT/NAMESPACE", type=MEMBER)


@click.group(cls=Group)
def share() -> None:
    """Share blocks with other tenants, with everybody's consent.

    \b
    saltern share create acme/research --namespace chat
    saltern share invite acme/research blue/chat       # the owner invites
    saltern share accept acme/research blue/chat       # the other side accepts, for itself
    saltern share leave acme/research blue/chat --wait # and may leave at once
    """


@share.command("create")
@_group
@click.option("--namespace", "namespace_id", type=NAMESPACE, required=True, help="The owner's first member.")
@wait_option
@click.pass_context
def create(ctx: click.Context, *, group: str, namespace_id: NamespaceId) -> None:
    """Make a group with a namespace of its owner; nothing is shared until another one accepts."""
    from saltern.admin.v1.sharing_groups_pb2 import CreateSharingGroupRequest
    from saltern.admin_client import new_request_id

    owner, group_id = parse_sharing_group_name(group)
    request = CreateSharingGroupRequest(
        parent=tenant_name(owner),
        sharing_group_id=group_id,
        namespace=namespace_name(owner, namespace_id),
        request_id=new_request_id(),
    )
    admin = connect(ctx)
    _print(ctx, admin.call(admin.sharing_groups.CreateSharingGroup, request))


@share.command("list")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def list_groups(ctx: click.Context, tenant_id: TenantId) -> None:
    """List the groups that a tenant owns, is a member of or is invited to."""
    from saltern.admin.v1.sharing_groups_pb2 import ListSharingGroupsRequest, SharingGroupMember

    admin = connect(ctx)
    request = ListSharingGroupsRequest(parent=tenant_name(tenant_id))
    groups: list[SharingGroup] = list(admin.iterate(admin.sharing_groups.ListSharingGroups, request, "sharing_groups"))
    table = Table("GROUP", "ROLE", "MEMBERS", "INVITED", "MODEL", "CREATED", right=("MEMBERS", "INVITED"))
    for item in groups:
        accepted = sum(member.state == SharingGroupMember.STATE_ACCEPTED for member in item.members)
        table.add(
            _short(item.name),
            _role(item, tenant_id),
            accepted,
            len(item.members) - accepted,
            item.model_fingerprint,
            local_time(item.create_time),
        )
    print_messages(settings_of(ctx), "sharing_groups", groups, table)


@share.command("get")
@_group
@click.option("--as", "viewer", type=TENANT, help="See it as this tenant does; only the platform sees as others do.")
@click.pass_context
def get(ctx: click.Context, *, group: str, viewer: TenantId | None) -> None:
    """Show one group and its members."""
    from saltern.admin.v1.sharing_groups_pb2 import GetSharingGroupRequest

    admin = connect(ctx)
    request = GetSharingGroupRequest(name=group, member=tenant_name(viewer) if viewer else "")
    _print(ctx, admin.call(admin.sharing_groups.GetSharingGroup, request))


@share.command("invite")
@_group
@_member
@click.pass_context
def invite(ctx: click.Context, *, group: str, member: str) -> None:
    """Invite another tenant's namespace; it is told the same whether that exists or not."""
    from saltern.admin.v1.sharing_groups_pb2 import InviteMemberRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = InviteMemberRequest(name=group, namespace=member, request_id=new_request_id())
    _print(ctx, admin.call(admin.sharing_groups.InviteMember, request))


@share.command("accept")
@_group
@_member
@yes_option
@wait_option
@click.pass_context
def accept(ctx: click.Context, *, group: str, member: str, yes: bool) -> None:
    """Accept an invitation, for a namespace of one's own."""
    from saltern.admin.v1.sharing_groups_pb2 import AcceptInvitationRequest
    from saltern.admin_client import new_request_id

    confirm(yes, f"Let every member of {_short(group)} read what {member} stores in the group?")
    admin = connect(ctx)
    request = AcceptInvitationRequest(name=group, namespace=member, request_id=new_request_id())
    _print(ctx, admin.call(admin.sharing_groups.AcceptInvitation, request))


@share.command("decline")
@_group
@_member
@click.pass_context
def decline(ctx: click.Context, *, group: str, member: str) -> None:
    """Decline an invitation."""
    from saltern.admin.v1.sharing_groups_pb2 import DeclineInvitationRequest
    from saltern.admin_client import new_request_id

    admin = connect(ctx)
    request = DeclineInvitationRequest(name=group, namespace=member, request_id=new_request_id())
    admin.call(admin.sharing_groups.DeclineInvitation, request)
    _say(ctx, f"{member} has declined {group}")


@share.command("leave")
@_group
@_member
@yes_option
@wait_option
@click.pass_context
def leave(ctx: click.Context, *, group: str, member: str, yes: bool) -> None:
    """Leave a group at once; with --wait it returns when no node shares any more."""
    from saltern.admin.v1.sharing_groups_pb2 import LeaveSharingGroupRequest
    from saltern.admin_client import new_request_id

    confirm(yes, f"Let {member} leave {_short(group)}? {_ENDS}")
    admin = connect(ctx)
    request = LeaveSharingGroupRequest(name=group, namespace=member, request_id=new_request_id())
    admin.call(admin.sharing_groups.LeaveSharingGroup, request)
    _say(ctx, f"{member} has left {group}")


@share.command("remove")
@_group
@_member
@yes_option
@wait_option
@click.pass_context
def remove(ctx: click.Context, *, group: str, member: str, yes: bool) -> None:
    """Remove a member, or take an invitation back."""
    from saltern.admin.v1.sharing_groups_pb2 import RemoveMemberRequest
    from saltern.admin_client import new_request_id

    confirm(yes, f"Remove {member} from {_short(group)}? If it is a member: {_ENDS}")
    admin = connect(ctx)
    request = RemoveMemberRequest(name=group, namespace=member, request_id=new_request_id())
    _print(ctx, admin.call(admin.sharing_groups.RemoveMember, request))


@share.command("delete")
@_group
@yes_option
@wait_option
@click.pass_context
def delete(ctx: click.Context, *, group: str, yes: bool) -> None:
    """Delete a group for all its members."""
    from saltern.admin.v1.sharing_groups_pb2 import DeleteSharingGroupRequest
    from saltern.admin_client import new_request_id

    confirm(yes, f"Delete {_short(group)} for all its members? {_ENDS}")
    admin = connect(ctx)
    request = DeleteSharingGroupRequest(name=group, request_id=new_request_id())
    admin.call(admin.sharing_groups.DeleteSharingGroup, request)
    _say(ctx, f"deleted {group}")


def _say(ctx: click.Context, text: str) -> None:
    if settings_of(ctx).json:
        print_json({})
    else:
        say(text)


def _short(name: str) -> str:
    return "/".join(parse_sharing_group_name(name))


def _role(group: SharingGroup, tenant: TenantId) -> str:
    """What a tenant is to a group: its owner, or else a member or invited, by its own rows."""
    from saltern.admin.v1.sharing_groups_pb2 import SharingGroupMember

    if parse_sharing_group_name(group.name)[0] == tenant:
        return "owner"
    own = [member for member in group.members if member.namespace.startswith(f"{tenant_name(tenant)}/")]
    return "member" if any(member.state == SharingGroupMember.STATE_ACCEPTED for member in own) else "invited"


def _print(ctx: click.Context, group: SharingGroup) -> None:
    from saltern.admin.v1.sharing_groups_pb2 import SharingGroupMember

    members = [
        (
            f"member {position}",
            f"{member.namespace} ({enum_word(SharingGroupMember.State, member.state, 'STATE_')} since "
            f"{local_time(member.accept_time if member.HasField('accept_time') else member.invite_time)})",
        )
        for position, member in enumerate(group.members, 1)
    ]
    rows = [
        ("group", _short(group.name)),
        *members,
        ("model", group.model_fingerprint),
        ("block tokens", group.block_tokens),
        ("block bytes", format_size(group.block_bytes)),
        ("epoch", group.epoch),
        ("created", local_time(group.create_time)),
        ("etag", group.etag),
    ]
    print_message(settings_of(ctx), group, rows)
