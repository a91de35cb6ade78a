"""SaltPolicyService: how a tenant's blocks are named."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from controlplane.admin.resources import to_salt_policy
from controlplane.admin.service import AdminServicer, load_tenant, method
from controlplane.caller import authorise
from controlplane.db.models import SaltPolicy
from controlplane.rpc import Context
from saltern.admin.v1 import salt_policies_pb2, salt_policies_pb2_grpc
from saltern.names import parse_salt_policy_name
from tenants.roles import Permission


class SaltPolicyService(AdminServicer, salt_policies_pb2_grpc.SaltPolicyServiceServicer):
    service = "saltern.admin.v1.SaltPolicyService"

    @method
    async def GetSaltPolicy(
        self, request: salt_policies_pb2.GetSaltPolicyRequest, context: Context
    ) -> salt_policies_pb2.SaltPolicy:
        tenant = parse_salt_policy_name(request.name)
        caller = authorise(Permission.SALTS_READ, tenant)
        async with self._database.transaction() as session:
            row = await load_tenant(session, tenant, caller)
            return to_salt_policy(row, await session.get_one(SaltPolicy, tenant))
