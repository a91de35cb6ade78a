"""Salt keys of a sharing group: the same for its members, and for nobody else (I2)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from sqlalchemy import select

from controlplane.db import PlatformScope, models
from saltern.admin.v1 import credentials_pb2, salt_policies_pb2, sharing_groups_pb2, sharing_groups_pb2_grpc
from saltern.auth.v1 import auth_pb2
from saltern.rpc_errors import error_from_rpc
from tests.support.control import Control

GROUP = "tenants/acme/sharingGroups/research"


class Shared:
    """Two tenants of one group, and a third that is in none."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(control.channel)
        self.keys: dict[str, str] = {}

    async def set_up(self) -> None:
        for tenant in ("acme", "blue", "coal"):
            await self.control.add_tenant(tenant, "chat")
            self.keys[tenant] = await self.control.add_api_key(credentials_pb2.ROLE_WRITER, tenant)
        self.metadata = await self.control.bearer(self.control.admin_key)
        create = sharing_groups_pb2.CreateSharingGroupRequest(
            parent="tenants/acme", sharing_group_id="research", namespace="tenants/acme/namespaces/chat"
        )
        await self.groups.CreateSharingGroup(create, metadata=self.metadata)
        invite = sharing_groups_pb2.InviteMemberRequest(name=GROUP, namespace="tenants/blue/namespaces/chat")
        await self.groups.InviteMember(invite, metadata=self.metadata)

    async def accept(self) -> None:
        request = sharing_groups_pb2.AcceptInvitationRequest(name=GROUP, namespace="tenants/blue/namespaces/chat")
        await self.groups.AcceptInvitation(request, metadata=self.metadata)

    async def exchange(self, tenant: str, **narrowing: str) -> auth_pb2.ExchangeApiKeyResponse:
        return await self.control.exchange(self.keys[tenant], "chat", sharing_group=GROUP, **narrowing)

    async def reason(self, tenant: str, **narrowing: str) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            await self.exchange(tenant, **narrowing)
        return error_from_rpc(caught.value).reason


@pytest.fixture
async def shared(control: Control) -> Shared:
    shared = Shared(control)
    await shared.set_up()
    return shared


async def test_i2_members_get_one_salt_and_nobody_else_does(shared: Shared) -> None:
    assert await shared.reason("blue") == "RESOURCE_NOT_AVAILABLE"  # invited, and that is all
    await shared.accept()

    acme, blue = await shared.exchange("acme"), await shared.exchange("blue")

    assert acme.salt_keys == blue.salt_keys and [salt.epoch for salt in acme.salt_keys] == [1]
    assert acme.sharing_group_uid == blue.sharing_group_uid != ""
    assert (acme.tenant_id, blue.tenant_id) == ("acme", "blue")
    own = [await shared.control.exchange(shared.keys[tenant], "chat") for tenant in ("acme", "blue")]
    assert not any(one.sharing_group_uid for one in own)
    assert len({bytes(one.salt_keys[0].key) for one in (acme, *own)}) == 3
    assert await shared.reason("coal") == "RESOURCE_NOT_AVAILABLE"
    # A batch with both kinds gives each its own.
    assert await shared.exchange("acme") != own[0]


async def test_i12_after_leaving_the_salt_is_another_one(shared: Shared) -> None:
    await shared.accept()
    before = await shared.exchange("acme")

    leave = sharing_groups_pb2.LeaveSharingGroupRequest(name=GROUP, namespace="tenants/blue/namespaces/chat")
    await shared.groups.LeaveSharingGroup(leave, metadata=shared.metadata)

    assert await shared.reason("blue") == "RESOURCE_NOT_AVAILABLE"
    after = await shared.exchange("acme")
    assert [salt.epoch for salt in after.salt_keys] == [2]
    assert after.salt_keys[0].key != before.salt_keys[0].key


async def test_a_salt_that_must_be_narrower_is_no_groups(shared: Shared) -> None:
    await shared.accept()
    assert await shared.reason("blue", user_id="eve") == "SALT_SCOPE_TOO_NARROW"
    policy = salt_policies_pb2.SaltPolicy(name="tenants/blue/saltPolicy", scope=salt_policies_pb2.SaltPolicy.SCOPE_USER)
    await shared.control.salt_policies.UpdateSaltPolicy(
        salt_policies_pb2.UpdateSaltPolicyRequest(salt_policy=policy), metadata=shared.metadata
    )
    assert await shared.reason("blue") == "SALT_SCOPE_REQUIRED"
    assert await shared.reason("blue", user_id="eve") == "SALT_SCOPE_TOO_NARROW"


async def test_a_token_for_the_control_plane_is_for_no_group(shared: Shared) -> None:
    request = auth_pb2.ExchangeApiKeyRequest(
        api_key=shared.keys["acme"], audience=auth_pb2.AUDIENCE_CONTROL, sharing_group=GROUP
    )
    with pytest.raises(grpc.RpcError) as caught:
        await shared.control.auth.ExchangeApiKey(request)
    assert error_from_rpc(caught.value).reason == "SHARING_GROUP_NOT_ALLOWED"


async def test_i11_the_event_of_an_exchange_names_the_group(shared: Shared) -> None:
    await shared.exchange("acme")
    async with shared.control.database.transaction(PlatformScope()) as session:
        event = models.AuditEvent
        newest = select(event).where(event.chain == "acme").order_by(event.sequence.desc()).limit(1)
        assert (await session.scalars(newest)).one().after["sharing_group"] == GROUP
