"""Sharing groups: nothing without both, nobody hears of what is not his, and everybody's chain knows (I2, I11)."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, select

from controlplane.admin import sharing_groups as module
from controlplane.db import models
from controlplane.node.policy_rows import read_policy_rows
from controlplane.node.snapshot import compose_policy
from controlplane.sharing import groups
from saltern.admin.v1 import namespaces_pb2, sharing_groups_pb2, tenants_pb2
from saltern.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
)
from saltern.names import NamespaceId, NodeId, TenantId
from saltern.policy_version import read_policy_version
from tenants.policy import GroupPolicy, NamespacePolicy
from tests.support.admin import PLATFORM, Admin, admin_of, namespace_request, refused

GROUP = "tenants/acme/sharingGroups/research"
CHAT = {tenant: f"tenants/{tenant}/namespaces/chat" for tenant in ("acme", "blue", "coal", "ghost")}
INVITED, ACCEPTED = (
    sharing_groups_pb2.SharingGroupMember.STATE_INVITED,
    sharing_groups_pb2.SharingGroupMember.STATE_ACCEPTED,
)


class Groups:
    """Short ways to the calls, each as the admin of the tenant that it is for."""

    def __init__(self, admin: Admin) -> None:
        self.admin = admin
        self.stub = admin.sharing_groups

    async def create(self, owner: str = "acme", group: str = "research") -> sharing_groups_pb2.SharingGroup:
        request = sharing_groups_pb2.CreateSharingGroupRequest(
            parent=f"tenants/{owner}", sharing_group_id=group, namespace=CHAT[owner]
        )
        return await self.stub.CreateSharingGroup(request, metadata=admin_of(owner))

    async def invite(self, tenant: str, namespace: str = "chat") -> sharing_groups_pb2.SharingGroup:
        request = sharing_groups_pb2.InviteMemberRequest(
            name=GROUP, namespace=f"tenants/{tenant}/namespaces/{namespace}"
        )
        return await self.stub.InviteMember(request, metadata=admin_of("acme"))

    async def accept(self, tenant: str, namespace: str = "chat", name: str = GROUP) -> sharing_groups_pb2.SharingGroup:
        request = sharing_groups_pb2.AcceptInvitationRequest(
            name=name, namespace=f"tenants/{tenant}/namespaces/{namespace}"
        )
        return await self.stub.AcceptInvitation(request, metadata=admin_of(tenant))

    async def decline(self, tenant: str) -> None:
        request = sharing_groups_pb2.DeclineInvitationRequest(name=GROUP, namespace=CHAT[tenant])
        await self.stub.DeclineInvitation(request, metadata=admin_of(tenant))

    async def leave(self, tenant: str) -> None:
        request = sharing_groups_pb2.LeaveSharingGroupRequest(name=GROUP, namespace=CHAT[tenant])
        await self.stub.LeaveSharingGroup(request, metadata=admin_of(tenant))

    async def remove(self, tenant: str) -> sharing_groups_pb2.SharingGroup:
        request = sharing_groups_pb2.RemoveMemberRequest(name=GROUP, namespace=CHAT[tenant])
        return await self.stub.RemoveMember(request, metadata=admin_of("acme"))

    async def get(self, tenant: str, name: str = GROUP) -> sharing_groups_pb2.SharingGroup:
        request = sharing_groups_pb2.GetSharingGroupRequest(name=name)
        return await self.stub.GetSharingGroup(request, metadata=admin_of(tenant))

    async def list(self, tenant: str, size: int = 0, token: str = "") -> Any:
        request = sharing_groups_pb2.ListSharingGroupsRequest(
            parent=f"tenants/{tenant}", page_size=size, page_token=token
        )
        return await self.stub.ListSharingGroups(request, metadata=admin_of(tenant))

    async def policy(self, tenant: str) -> NamespacePolicy:
        """What every node is told of a tenant's namespace."""
        policy = compose_policy(await read_policy_rows(self.admin.database), NodeId("node-1"))
        return policy.tenants[TenantId(tenant)].namespaces[NamespaceId("chat")]

    async def roots(self) -> dict[str, bytes]:
        async with self.admin.database.transaction() as session:
            rows = await session.scalars(select(models.SharingGroup))
            return {row.id: row.wrapped_root_secret for row in rows}


@pytest.fixture
async def sharing(admin: Admin) -> Groups:
    for tenant in ("acme", "blue", "coal"):
        await admin.create_tenant(tenant)
        await admin.create_namespace(tenant, "chat")
    async with admin.database.transaction() as session:  # without which a database has no issuer of tokens
        session.add(models.Bootstrap(token_sha256=bytes(32), create_time=admin.clock()))
    return Groups(admin)


def states(group: sharing_groups_pb2.SharingGroup) -> dict[str, int]:
    return {member.namespace: member.state for member in group.members}


async def test_i2_nothing_is_shared_before_both_have_accepted(sharing: Groups) -> None:
    created = await sharing.create()
    assert states(created) == {CHAT["acme"]: ACCEPTED}
    assert (created.model_fingerprint, created.block_tokens, created.block_bytes) == ("model bf16", 16, 65536)
    assert states(await sharing.invite("blue")) == {CHAT["acme"]: ACCEPTED, CHAT["blue"]: INVITED}
    uid = created.uid
    assert (await sharing.policy("acme")).groups == {uid: GroupPolicy((1,), ())}
    assert (await sharing.policy("blue")).groups == {}

    accepted = await sharing.accept("blue")

    assert states(accepted) == {CHAT["acme"]: ACCEPTED, CHAT["blue"]: ACCEPTED}
    for tenant, peer in (("acme", "blue"), ("blue", "acme")):
        (group,) = (await sharing.policy(tenant)).groups.values()
        assert group.epochs == (1,)
        assert [(one.tenant, one.namespace_uid) for one in group.peers] == [(peer, (await sharing.policy(peer)).uid)]
    assert (await sharing.policy("coal")).groups == {}


async def test_i12_whoever_leaves_takes_the_salt_along_at_once(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    roots = await sharing.roots()

    await sharing.leave("blue")

    assert (await sharing.policy("blue")).groups == {}
    (group,) = (await sharing.policy("acme")).groups.values()
    assert group == GroupPolicy((2,), ())
    assert (await sharing.roots())["research"] != roots["research"]
    # It may come back only by invitation, and then to the new salt.
    assert isinstance(await refused(sharing.accept("blue")), PermissionDeniedError)
    await sharing.invite("blue")
    assert (await sharing.accept("blue")).epoch == 2


async def test_i12_a_member_that_is_removed_takes_the_salt_along_an_invitation_does_not(sharing: Groups) -> None:
    await sharing.create()
    for tenant in ("blue", "coal"):
        await sharing.invite(tenant)
    await sharing.accept("blue")

    assert (await sharing.remove("coal")).epoch == 1
    removed = await sharing.remove("blue")

    assert removed.epoch == 2 and states(removed) == {CHAT["acme"]: ACCEPTED}
    assert (await sharing.policy("blue")).groups == {}


async def test_i2_an_invitation_says_nothing_of_the_tenant_that_is_invited(sharing: Groups) -> None:
    await sharing.create()
    there, absent = await sharing.invite("blue"), await sharing.invite("ghost")

    assert [member.state for member in absent.members] == [ACCEPTED, INVITED, INVITED]
    assert (there.epoch, len(there.members)) == (absent.epoch, len(absent.members) - 1)
    again = [str(await refused(sharing.invite(tenant))).replace(tenant, "?") for tenant in ("blue", "ghost")]
    assert again[0] == again[1]
    # A namespace that does not exist, or that could not join, is invited as well.
    other = await sharing.admin.namespaces.CreateNamespace(
        namespace_request("blue", "other-model", model_fingerprint="another"), metadata=PLATFORM
    )
    assert other.name in states(await sharing.invite("blue", "other-model"))
    assert "tenants/blue/namespaces/none" in states(await sharing.invite("blue", "none"))


async def test_i2_a_group_is_there_only_for_those_whom_it_concerns(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    await sharing.invite("ghost")

    assert states(await sharing.get("blue")) == {CHAT["acme"]: ACCEPTED, CHAT["blue"]: ACCEPTED}
    assert CHAT["ghost"] in states(await sharing.get("acme"))
    absent = "tenants/acme/sharingGroups/absent"
    heard = {
        str(error)
        for call in (
            sharing.get("coal"),
            sharing.get("coal", absent),
            sharing.accept("coal"),
            sharing.accept("coal", name=absent),
            sharing.leave("coal"),
            sharing.decline("coal"),
        )
        for error in [await refused(call)]
    }
    assert len(heard) == 1
    assert (await sharing.list("coal")).sharing_groups == []
    # Nobody acts for somebody else, nor on somebody else's group.
    request = sharing_groups_pb2.AcceptInvitationRequest(name=GROUP, namespace=CHAT["blue"])
    assert str(await refused(sharing.stub.AcceptInvitation(request, metadata=admin_of("coal")))) in heard
    invite = sharing_groups_pb2.InviteMemberRequest(name=GROUP, namespace=CHAT["coal"])
    assert str(await refused(sharing.stub.InviteMember(invite, metadata=admin_of("blue")))) in heard


async def test_i2_only_blocks_of_one_model_and_shape_are_shared(sharing: Groups) -> None:
    await sharing.create()
    for field, value in (("model_fingerprint", "model fp8"), ("block_tokens", 32), ("block_bytes", 4096)):
        namespace = field.replace("_", "-")
        await sharing.admin.namespaces.CreateNamespace(
            namespace_request("blue", namespace, **{field: value}), metadata=PLATFORM
        )
        await sharing.invite("blue", namespace)
        error = await refused(sharing.accept("blue", namespace))
        assert isinstance(error, FailedPreconditionError) and error.reason == "BLOCKS_DIFFER"
        assert error.metadata["differing"] == field


async def test_i11_every_act_is_in_the_chain_of_each_tenant_that_it_touches(sharing: Groups) -> None:
    admin = sharing.admin
    await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    await sharing.invite("coal")
    await sharing.accept("coal")
    await sharing.leave("coal")
    await sharing.invite("coal")
    await sharing.decline("coal")
    await sharing.remove("blue")

    seen = {}
    for tenant in ("acme", "blue", "coal"):
        events = [event for event in await admin.events(tenant) if "SharingGroup" in event.method]
        assert await admin.chain_faults(tenant) == []
        assert {event.resource for event in events} == {GROUP}
        # What another tenant's key is called and where it called from stays its own.
        foreign = {(event.actor, event.peer) for event in events if not event.actor.startswith(f"tenants/{tenant}/")}
        assert all(peer == "" and actor.count("/") == 1 for actor, peer in foreign)
        seen[tenant] = [event.method.partition("/")[2] for event in events]
    assert seen["acme"] == [
        "CreateSharingGroup", "InviteMember", "AcceptInvitation", "InviteMember", "AcceptInvitation",
        "LeaveSharingGroup", "InviteMember", "DeclineInvitation", "RemoveMember",
    ]  # fmt: skip
    assert seen["blue"] == [
        "InviteMember", "AcceptInvitation", "AcceptInvitation", "LeaveSharingGroup", "RemoveMember",
    ]  # fmt: skip
    assert seen["coal"] == [
        "InviteMember", "AcceptInvitation", "LeaveSharingGroup", "InviteMember", "DeclineInvitation",
    ]  # fmt: skip
    # A chain holds no more of the group than its tenant may see.
    events = [event for event in await admin.events("blue") if event.method.endswith("/LeaveSharingGroup")]
    assert [member["namespace"] for member in events[0].after["members"]] == [CHAT["acme"], CHAT["blue"]]


async def test_a_change_reaches_the_policy_of_every_member(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    base = await sharing.admin.policy_version()

    await sharing.accept("blue")

    rows = await read_policy_rows(sharing.admin.database, base)
    assert rows.changed == {"acme", "blue"}
    policy = compose_policy(rows, NodeId("node-1"))
    whole = compose_policy(await read_policy_rows(sharing.admin.database), NodeId("node-1"))
    for tenant in ("acme", "blue"):
        assert policy.tenants[TenantId(tenant)].namespaces == whole.tenants[TenantId(tenant)].namespaces


async def test_i12_a_deleted_tenant_leaves_every_group(sharing: Groups) -> None:
    await sharing.create()
    for tenant in ("blue", "coal"):
        await sharing.invite(tenant)
        await sharing.accept(tenant)
    base = await sharing.admin.policy_version()

    await sharing.admin.delete_tenant("coal")

    group = await sharing.get("acme")
    assert group.epoch == 2 and states(group) == {CHAT["acme"]: ACCEPTED, CHAT["blue"]: ACCEPTED}
    rows = await read_policy_rows(sharing.admin.database, base)
    assert rows.changed == {"acme", "blue", "coal"}
    for tenant in ("acme", "blue"):
        (last,) = [event for event in await sharing.admin.events(tenant) if event.method.endswith("/DeleteTenant")]
        assert last.resource == GROUP and last.after["epoch"] == "2"

    await sharing.admin.delete_tenant("acme")  # the owner: the group goes

    assert (await sharing.list("blue")).sharing_groups == []
    assert (await sharing.policy("blue")).groups == {}
    assert await sharing.admin.chain_faults("blue") == []


async def test_a_namespace_that_is_shared_leaves_before_it_is_deleted(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    delete_chat = namespaces_pb2.DeleteNamespaceRequest(name=CHAT["blue"])

    error = await refused(sharing.admin.namespaces.DeleteNamespace(delete_chat, metadata=admin_of("blue")))
    assert error.reason == "NAMESPACE_SHARED"

    await sharing.leave("blue")
    await sharing.admin.namespaces.DeleteNamespace(delete_chat, metadata=admin_of("blue"))


async def test_a_suspended_tenant_accepts_nothing_and_may_still_leave(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    await sharing.invite("coal")
    for tenant in ("blue", "coal"):
        await sharing.admin.tenants.SuspendTenant(
            tenants_pb2.SuspendTenantRequest(name=f"tenants/{tenant}"), metadata=PLATFORM
        )
    assert (await refused(sharing.accept("coal"))).reason == "TENANT_SUSPENDED"
    await sharing.leave("blue")
    assert (await sharing.policy("acme")).groups == {(await sharing.get("acme")).uid: GroupPolicy((2,), ())}


async def test_deleting_a_group_ends_it_for_all(sharing: Groups) -> None:
    created = await sharing.create()
    await sharing.invite("blue")
    await sharing.accept("blue")
    request = sharing_groups_pb2.DeleteSharingGroupRequest(name=GROUP, etag=created.etag)
    assert (
        await refused(sharing.stub.DeleteSharingGroup(request, metadata=admin_of("acme")))
    ).reason == "ETAG_MISMATCH"
    request.etag = (await sharing.get("acme")).etag
    await sharing.stub.DeleteSharingGroup(request, metadata=admin_of("acme"))
    for tenant in ("acme", "blue"):
        assert (await sharing.policy(tenant)).groups == {}
        assert (await sharing.list(tenant)).sharing_groups == []
    assert isinstance(await refused(sharing.stub.DeleteSharingGroup(request, metadata=PLATFORM)), NotFoundError)


async def test_groups_and_members_have_limits(sharing: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_MEMBERS_MAX", 2)
    await sharing.create()
    await sharing.invite("blue")
    assert isinstance(await refused(sharing.invite("coal")), ResourceExhaustedError)
    monkeypatch.setattr(module, "GROUPS_PER_TENANT_MAX", 1)
    assert isinstance(await refused(sharing.create(group="more")), ResourceExhaustedError)
    monkeypatch.setattr(groups, "GROUPS_PER_TENANT_MAX", 1)
    await sharing.create("blue", "own")
    error: SalternError = await refused(sharing.accept("blue"))
    assert error.reason == "TOO_MANY_RESOURCES"


async def test_a_list_has_what_is_owned_joined_and_invited_in_pages(sharing: Groups) -> None:
    await sharing.create()
    await sharing.create(group="also")
    await sharing.create("blue", "own")
    await sharing.invite("blue")
    names, token = [], ""
    while True:
        page = await sharing.list("blue", 1, token)
        names += [group.name for group in page.sharing_groups]
        token = page.next_page_token
        if not token:
            break
    assert names == [GROUP, "tenants/blue/sharingGroups/own"]
    first = await sharing.list("acme", 1)
    assert first.next_page_token
    assert (await refused(sharing.list("blue", 1, first.next_page_token))).reason == "INVALID_PAGE_TOKEN"


async def test_what_exists_already_is_said(sharing: Groups) -> None:
    await sharing.create()
    assert isinstance(await refused(sharing.create()), AlreadyExistsError)
    await sharing.invite("blue")
    assert (await refused(sharing.invite("blue"))).reason == "MEMBER_EXISTS"
    await sharing.accept("blue")
    assert (await refused(sharing.accept("blue"))).reason == "MEMBER_EXISTS"
    assert (await refused(sharing.decline("blue"))).reason == "MEMBER_ACCEPTED"


async def test_an_invitation_outlives_a_tenant_of_that_name_and_binds_none(sharing: Groups) -> None:
    await sharing.create()
    await sharing.invite("blue")
    await sharing.admin.delete_tenant("blue")
    assert states(await sharing.get("acme"))[CHAT["blue"]] == INVITED
    async with sharing.admin.database.transaction() as session:
        await session.execute(delete(models.SharingGroup))


@pytest.mark.parametrize("act", ["InviteMember", "RemoveMember"])
async def test_i2_policy_versions_do_not_tell_whether_an_invited_tenant_is_there(sharing: Groups, act: str) -> None:
    """The version that an answer names, those of one's own events, and how far it rises from one act to the next."""
    admin = sharing.admin
    await sharing.create()
    rises = {}
    for tenant in ("blue", "ghost"):
        if act == "RemoveMember":
            await sharing.invite(tenant)
        request = getattr(sharing_groups_pb2, f"{act}Request")(name=GROUP, namespace=CHAT[tenant])
        before = await admin.policy_version()
        call = getattr(sharing.stub, act)(request, metadata=admin_of("acme"))
        await call
        told = read_policy_version(await call.trailing_metadata())
        own = (await admin.events("acme"))[-1].policy_version
        rises[tenant] = (told - own, told - before)
    assert rises["blue"] == rises["ghost"]
