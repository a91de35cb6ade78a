"""Carries out the steps of a plan, one call each.

A call that gets no answer is sent again as it was, under the same request id, so that it happens once (AIP-155). Every
change of something that was read carries the etag that was read then, or the one that an earlier step of this run was
answered with: what somebody else has changed meanwhile is refused, never overwritten (AIP-154).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from saltern.admin.v1 import (
    credentials_pb2,
    namespaces_pb2,
    quotas_pb2,
    salt_policies_pb2,
    sharing_groups_pb2,
    tenants_pb2,
)
from saltern.admin_client import AdminClient
from saltern.apply.planner import Action, Step
from saltern.apply.resources import ACTIVE, TIERS, Kind, Resource
from saltern.errors import DeadlineExceededError, UnavailableError
from saltern.names import quota_name, tenant_name

_TRIES: Final = 3
_PAUSE_S: Final = 0.5
_RequestT = TypeVar("_RequestT", bound=Message)
_ResponseT = TypeVar("_ResponseT", bound=Message)


class Executor:
    """Carries out the steps of one plan.

    Args:
        allow_below_use: accept limits below what a tenant holds; nodes then evict down to them.
        run: names this run in its request ids. Another run is another number: a tenant that was deleted since, and is
            declared again, must not get the answer of its first creation.
    """

    def __init__(self, admin: AdminClient, *, allow_below_use: bool = False, run: uuid.UUID | None = None) -> None:
        self._admin = admin
        self._allow_below_use = allow_below_use
        self._run = run or uuid.uuid4()
        self._etags: dict[str, str] = {}

    def apply(self, step: Step) -> str:
        """Carry out ``step``; returns the secret of a key that it made, else an empty string.

        Raises:
            SalternError: what the control plane refused, or that it cannot be reached after three tries. The step
                is then not done, or (UnavailableError, DeadlineExceededError) perhaps is.
        """
        secret = _HANDLERS[step.resource.kind](self, step)
        if step.resource.kind in (Kind.INVITATION, Kind.MEMBERSHIP):
            # Who comes and goes changes the group; a later step of ours must not be refused for that.
            self._etags[str(step.resource.fields["group"])] = ""
        return secret

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
    ) -> _ResponseT:
        # The content makes the id too: two steps of a run that ask for the same are the same.
        content = request.SerializeToString(deterministic=True).hex()
        request.request_id = str(uuid.uuid5(self._run, f"{request.DESCRIPTOR.full_name}:{content}"))  # type: ignore[attr-defined]
        for attempt in range(_TRIES):
            try:
                return self._admin.call(method, request)
            except (UnavailableError, DeadlineExceededError) as error:
                if attempt + 1 == _TRIES:
                    raise
                time.sleep(_PAUSE_S if error.retry_after_ms is None else min(5.0, error.retry_after_ms / 1000))
        raise AssertionError("every try returns or raises")

    def _etag(self, name: str, resource: Resource) -> str:
        return self._etags.get(name, resource.etag)

    def _tenant(self, step: Step) -> str:
        resource, stub = step.resource, self._admin.tenants
        name, display_name = resource.name, str(resource.fields.get("display_name", ""))
        if step.action is Action.CREATE:
            create = tenants_pb2.CreateTenantRequest(
                tenant_id=resource.tenant, tenant=tenants_pb2.Tenant(display_name=display_name)
            )
            self._etags[name] = self._call(stub.CreateTenant, create).etag
        elif step.action is Action.CHANGE:
            changed = tenants_pb2.Tenant(name=name, display_name=display_name, etag=self._etag(name, resource))
            request = tenants_pb2.UpdateTenantRequest(tenant=changed)
            self._etags[name] = self._call(stub.UpdateTenant, request).etag
        else:
            self._call(stub.DeleteTenant, tenants_pb2.DeleteTenantRequest(name=name, etag=self._etag(name, resource)))
        return ""

    def _state(self, step: Step) -> str:
        name, stub = tenant_name(step.resource.tenant), self._admin.tenants
        etag = self._etag(name, step.resource)
        if step.resource.fields["state"] == ACTIVE:
            answer = self._call(stub.ResumeTenant, tenants_pb2.ResumeTenantRequest(name=name, etag=etag))
        else:
            answer = self._call(stub.SuspendTenant, tenants_pb2.SuspendTenantRequest(name=name, etag=etag))
        self._etags[name] = answer.etag
        return ""

    def _quota(self, step: Step) -> str:
        fields = step.resource.fields
        tier = quotas_pb2.TierQuota(
            tier=_tier(str(fields["tier"])),
            reserved_bytes=_number(fields, "reserved_bytes"),
            limit_bytes=_number(fields, "limit_bytes"),
            weight=_number(fields, "weight"),
        )
        return self._update_quota(step, quotas_pb2.Quota(tiers=[tier]))

    def _rates(self, step: Step) -> str:
        fields = step.resource.fields
        rates = quotas_pb2.RateLimits(
            operations_per_s=_number(fields, "operations_per_s"),
            bytes_per_s=_number(fields, "bytes_per_s"),
            ssd_write_bytes_per_s=_number(fields, "ssd_write_bytes_per_s"),
        )
        return self._update_quota(step, quotas_pb2.Quota(rates=rates))

    def _update_quota(self, step: Step, quota: quotas_pb2.Quota) -> str:
        quota.name = quota_name(step.resource.tenant)
        quota.etag = self._etag(quota.name, step.resource)
        request = quotas_pb2.UpdateQuotaRequest(quota=quota, allow_below_use=self._allow_below_use)
        self._etags[quota.name] = self._call(self._admin.quotas.UpdateQuota, request).etag
        return ""

    def _salt(self, step: Step) -> str:
        name, fields = step.resource.name, step.resource.fields
        policy = salt_policies_pb2.SaltPolicy(name=name, etag=self._etag(name, step.resource))
        request = salt_policies_pb2.UpdateSaltPolicyRequest(salt_policy=policy)
        for change in step.changes:
            request.update_mask.paths.append(change.field.removesuffix("_s"))  # the service has durations
        if "scope" in fields:
            request.salt_policy.scope = salt_policies_pb2.SaltPolicy.Scope.Value(
                f"SCOPE_{str(fields['scope']).upper()}"
            )
        request.salt_policy.rotation_period.FromSeconds(_number(fields, "rotation_period_s"))
        request.salt_policy.grace_period.FromSeconds(_number(fields, "grace_period_s"))
        self._etags[name] = self._call(self._admin.salt_policies.UpdateSaltPolicy, request).etag
        return ""

    def _namespace(self, step: Step) -> str:
        resource, stub = step.resource, self._admin.namespaces
        etag, fields = self._etag(resource.name, resource), resource.fields
        if step.action is Action.DELETE:
            self._call(stub.DeleteNamespace, namespaces_pb2.DeleteNamespaceRequest(name=resource.name, etag=etag))
            return ""
        wanted = namespaces_pb2.Namespace(tier_limits=_limits(fields))
        if step.action is Action.CREATE:
            wanted.model_fingerprint = str(fields["model_fingerprint"])
            wanted.block_tokens = _number(fields, "block_tokens")
            wanted.block_bytes = _number(fields, "block_bytes")
            create = namespaces_pb2.CreateNamespaceRequest(
                parent=resource.parent, namespace_id=_last(resource.name), namespace=wanted
            )
            self._etags[resource.name] = self._call(stub.CreateNamespace, create).etag
        else:
            wanted.name, wanted.etag = resource.name, etag
            request = namespaces_pb2.UpdateNamespaceRequest(namespace=wanted)
            self._etags[resource.name] = self._call(stub.UpdateNamespace, request).etag
        return ""

    def _key(self, step: Step) -> str:
        resource, stub = step.resource, self._admin.credentials
        if step.action is Action.DELETE:
            self._call(stub.DeleteApiKey, credentials_pb2.DeleteApiKeyRequest(name=resource.name, etag=resource.etag))
            return ""
        fields = resource.fields
        key = credentials_pb2.ApiKey(
            display_name=str(fields.get("display_name", "")),
            role=credentials_pb2.Role.Value("ROLE_" + str(fields["role"]).upper().replace("-", "_")),
            project_id=str(fields.get("project", "")),
            user_id=str(fields.get("user", "")),
        )
        if fields.get("expire_time_s") is not None:
            key.expire_time.FromSeconds(_number(fields, "expire_time_s"))
        create = credentials_pb2.CreateApiKeyRequest(
            parent=resource.parent, api_key_id=_last(resource.name), api_key=key
        )
        made = self._call(stub.CreateApiKey, create)
        return made.secret or self._secret_in_place_of_a_lost_one(made.api_key)

    def _secret_in_place_of_a_lost_one(self, key: credentials_pb2.ApiKey) -> str:
        """A secret is answered once; where that answer was lost nobody has it, and it is ended for another."""
        for _ in range(_TRIES):
            rotate = credentials_pb2.RotateApiKeyRequest(name=key.name, end_previous=True, etag=key.etag)
            rotate.overlap.FromSeconds(0)
            rotated = self._call(self._admin.credentials.RotateApiKey, rotate)
            if rotated.secret:
                return rotated.secret
            key = rotated.api_key
        raise UnavailableError(
            f"{key.name} is made, and every answer with its secret was lost",
            reason="SECRET_LOST",
            hint=f"make another when the network is better: saltern key rotate {_last(key.name)} --no-overlap",
        )

    def _group(self, step: Step) -> str:
        resource, stub = step.resource, self._admin.sharing_groups
        if step.action is Action.DELETE:
            etag = self._etag(resource.name, resource)
            self._call(
                stub.DeleteSharingGroup, sharing_groups_pb2.DeleteSharingGroupRequest(name=resource.name, etag=etag)
            )
        else:
            create = sharing_groups_pb2.CreateSharingGroupRequest(
                parent=resource.parent,
                sharing_group_id=_last(resource.name),
                namespace=str(resource.fields["namespace"]),
            )
            self._call(stub.CreateSharingGroup, create)
        return ""

    def _invitation(self, step: Step) -> str:
        stub = self._admin.sharing_groups
        group, namespace = str(step.resource.fields["group"]), str(step.resource.fields["namespace"])
        if step.action is Action.DELETE:
            self._call(stub.RemoveMember, sharing_groups_pb2.RemoveMemberRequest(name=group, namespace=namespace))
        else:
            self._call(stub.InviteMember, sharing_groups_pb2.InviteMemberRequest(name=group, namespace=namespace))
        return ""

    def _membership(self, step: Step) -> str:
        stub = self._admin.sharing_groups
        group, namespace = str(step.resource.fields["group"]), str(step.resource.fields["namespace"])
        if step.action is Action.DELETE:
            leave = sharing_groups_pb2.LeaveSharingGroupRequest(name=group, namespace=namespace)
            self._call(stub.LeaveSharingGroup, leave)
        else:
            accept = sharing_groups_pb2.AcceptInvitationRequest(name=group, namespace=namespace)
            self._call(stub.AcceptInvitation, accept)
        return ""


_HANDLERS: Final[Mapping[Kind, Callable[[Executor, Step], str]]] = {
    Kind.TENANT: Executor._tenant,
    Kind.STATE: Executor._state,
    Kind.QUOTA: Executor._quota,
    Kind.RATES: Executor._rates,
    Kind.SALT: Executor._salt,
    Kind.NAMESPACE: Executor._namespace,
    Kind.KEY: Executor._key,
    Kind.GROUP: Executor._group,
    Kind.INVITATION: Executor._invitation,
    Kind.MEMBERSHIP: Executor._membership,
}


def _limits(fields: Mapping[str, object]) -> list[namespaces_pb2.NamespaceLimit]:
    limits = ((tier, fields.get(f"{tier}_limit_bytes")) for tier in TIERS)
    return [
        namespaces_pb2.NamespaceLimit(tier=_tier(tier), limit_bytes=limit)
        for tier, limit in limits
        if isinstance(limit, int)
    ]


def _tier(tier: str) -> quotas_pb2.Tier.ValueType:
    return quotas_pb2.Tier.Value(f"TIER_{tier.upper()}")


def _number(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def _last(name: str) -> str:
    return name.rpartition("/")[2]
