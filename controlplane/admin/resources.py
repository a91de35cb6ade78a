"""From rows to resources of the API. None holds a secret, so each may go into an answer and the audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from sqlalchemy import Row

from controlplane.admin.etags import make_etag
from controlplane.admin.fields import to_timestamp
from controlplane.db.models import (
    PLATFORM_CHAIN,
    ApiKey,
    AuditEvent,
    AuditOutcome,
    Namespace,
    SaltEpoch,
    SaltPolicy,
    Tenant,
)
from controlplane.db.models import RateLimits as RateLimitsRow
from controlplane.db.models import TierQuota as TierQuotaRow
from saltern.admin.v1 import (
    audit_pb2,
    credentials_pb2,
    namespaces_pb2,
    quotas_pb2,
    salt_policies_pb2,
    tenants_pb2,
)
from saltern.keys import SaltScope
from saltern.names import (
    ApiKeyId,
    NamespaceId,
    TenantId,
    api_key_name,
    audit_event_name,
    namespace_name,
    quota_name,
    salt_policy_name,
    tenant_name,
)
from tenants.policy import TenantState
from tenants.quota import Tier
from tenants.roles import Role

STATE_TO_PROTO = {
    TenantState.ACTIVE: tenants_pb2.Tenant.STATE_ACTIVE,
    TenantState.SUSPENDED: tenants_pb2.Tenant.STATE_SUSPENDED,
}
TIER_TO_PROTO = {Tier.DRAM: quotas_pb2.TIER_DRAM, Tier.SSD: quotas_pb2.TIER_SSD}
TIER_FROM_PROTO = {proto: tier for tier, proto in TIER_TO_PROTO.items()}
ROLE_TO_PROTO = {
    Role.PLATFORM_ADMIN: credentials_pb2.ROLE_PLATFORM_ADMIN,
    Role.TENANT_ADMIN: credentials_pb2.ROLE_TENANT_ADMIN,
    Role.TENANT_AUDITOR: credentials_pb2.ROLE_TENANT_AUDITOR,
    Role.WRITER: credentials_pb2.ROLE_WRITER,
    Role.READER: credentials_pb2.ROLE_READER,
    Role.NODE: credentials_pb2.ROLE_NODE,
}
ROLE_FROM_PROTO = {proto: role for role, proto in ROLE_TO_PROTO.items()}
SCOPE_TO_PROTO = {
    SaltScope.TENANT: salt_policies_pb2.SaltPolicy.SCOPE_TENANT,
    SaltScope.NAMESPACE: salt_policies_pb2.SaltPolicy.SCOPE_NAMESPACE,
    SaltScope.PROJECT: salt_policies_pb2.SaltPolicy.SCOPE_PROJECT,
    SaltScope.USER: salt_policies_pb2.SaltPolicy.SCOPE_USER,
    SaltScope.SESSION: salt_policies_pb2.SaltPolicy.SCOPE_SESSION,
}
SCOPE_FROM_PROTO = {proto: scope for scope, proto in SCOPE_TO_PROTO.items()}
_OUTCOME_TO_PROTO = {
    AuditOutcome.SUCCESS: audit_pb2.AuditEvent.OUTCOME_SUCCESS,
    AuditOutcome.DENIED: audit_pb2.AuditEvent.OUTCOME_DENIED,
}


#: What :func:`to_tenant` needs: rows of columns take half the time of objects, which a list of thousands is made of.
TENANT_COLUMNS: Final = (
    Tenant.id,
    Tenant.uid,
    Tenant.display_name,
    Tenant.state,
    Tenant.create_time,
    Tenant.update_time,
    Tenant.revision,
)


def to_tenant(row: Tenant | Row[*tuple[Any, ...]]) -> tenants_pb2.Tenant:
    return tenants_pb2.Tenant(
        name=tenant_name(TenantId(row.id)),
        display_name=row.display_name,
        state=STATE_TO_PROTO[row.state],
        create_time=to_timestamp(row.create_time),
        update_time=to_timestamp(row.update_time),
        etag=make_etag(row.uid, row.revision),
    )


def to_namespace(row: Namespace) -> namespaces_pb2.Namespace:
    return namespaces_pb2.Namespace(
        name=namespace_name(TenantId(row.tenant_id), NamespaceId(row.id)),
        model_fingerprint=row.model_fingerprint,
        block_tokens=row.block_tokens,
        block_bytes=row.block_bytes,
        create_time=to_timestamp(row.create_time),
        etag=make_etag(row.uid, row.revision),
        tier_limits=[
            namespaces_pb2.NamespaceLimit(tier=TIER_TO_PROTO[tier], limit_bytes=limit_bytes)
            for tier, limit_bytes in row.tier_limits.items()
        ],
    )


def to_quota(tenant: Tenant, rows: Sequence[TierQuotaRow], rates: RateLimitsRow | None) -> quotas_pb2.Quota:
    """``rows``: every tier of the tenant, ordered by tier; ``rates``: None where they were never set."""
    parts: list[TierQuotaRow | RateLimitsRow] = [*rows, *([] if rates is None else [rates])]
    return quotas_pb2.Quota(
        name=quota_name(TenantId(tenant.id)),
        tiers=[
            quotas_pb2.TierQuota(
                tier=TIER_TO_PROTO[row.tier],
                reserved_bytes=row.reserved_bytes,
                limit_bytes=row.limit_bytes,
                weight=row.weight,
            )
            for row in rows
        ],
        rates=_to_rates(rates),
        update_time=to_timestamp(max(part.update_time for part in parts)),
        etag=make_etag(tenant.uid, *(part.revision for part in parts)),
    )


def _to_rates(row: RateLimitsRow | None) -> quotas_pb2.RateLimits:
    if row is None:
        return quotas_pb2.RateLimits()
    return quotas_pb2.RateLimits(
        operations_per_s=row.operations_per_s,
        bytes_per_s=row.bytes_per_s,
        ssd_write_bytes_per_s=row.ssd_write_bytes_per_s,
    )


def to_salt_policy(tenant: Tenant, row: SaltPolicy, epochs: Sequence[SaltEpoch]) -> salt_policies_pb2.SaltPolicy:
    """``epochs``: every epoch of the tenant, ascending. Of their roots nothing is in the resource."""
    policy = salt_policies_pb2.SaltPolicy(
        name=salt_policy_name(TenantId(tenant.id)),
        scope=SCOPE_TO_PROTO[row.scope],
        epoch=row.epoch,
        epochs=[
            salt_policies_pb2.SaltEpoch(
                epoch=epoch.epoch,
                create_time=to_timestamp(epoch.create_time),
                read_until_time=to_timestamp(epoch.read_until_time),
            )
            for epoch in epochs
        ],
        next_rotation_time=to_timestamp(row.next_rotation_time),
        update_time=to_timestamp(row.update_time),
        etag=make_etag(tenant.uid, row.revision),
    )
    policy.grace_period.FromSeconds(row.grace_period_s)
    if row.rotation_period_s:
        policy.rotation_period.FromSeconds(row.rotation_period_s)
    return policy


def to_api_key(row: ApiKey, now: datetime) -> credentials_pb2.ApiKey:
    """``now``: decides whether the secret before the last rotation is still one."""
    return credentials_pb2.ApiKey(
        name=api_key_name(TenantId(row.tenant_id) if row.tenant_id else None, ApiKeyId(row.id)),
        display_name=row.display_name,
        role=ROLE_TO_PROTO[row.role],
        create_time=to_timestamp(row.create_time),
        expire_time=to_timestamp(row.expire_time),
        last_used_time=to_timestamp(row.last_used_time),
        # The lookup is drawn anew with each rotation.
        etag=make_etag(row.uid, int(row.lookup, 16)),
        lookup=row.lookup,
        rotate_time=to_timestamp(row.rotate_time),
        previous=_to_previous(row, now),
        project_id=row.project_id or "",
        user_id=row.user_id or "",
        node_id=row.node_id or "",
    )


def _to_previous(row: ApiKey, now: datetime) -> credentials_pb2.PreviousSecret | None:
    if row.previous_lookup is None or row.previous_expire_time is None or row.previous_expire_time <= now:
        return None
    return credentials_pb2.PreviousSecret(
        lookup=row.previous_lookup,
        expire_time=to_timestamp(row.previous_expire_time),
        last_used_time=to_timestamp(row.previous_last_used_time),
    )


def to_audit_event(row: AuditEvent) -> audit_pb2.AuditEvent:
    event = audit_pb2.AuditEvent(
        name=audit_event_name(None if row.chain == PLATFORM_CHAIN else TenantId(row.chain), row.sequence),
        event_time=to_timestamp(row.event_time),
        actor=row.actor,
        method=row.method,
        resource=row.resource,
        outcome=_OUTCOME_TO_PROTO[row.outcome],
        reason=row.reason,
        request_id=row.request_id,
        hash=row.hash,
        previous_hash=row.previous_hash,
        hash_format=row.hash_format,
        actor_role=row.actor_role,
        peer=row.peer,
        policy_version=row.policy_version,
    )
    if row.before is not None:
        event.before.update(row.before)
    if row.after is not None:
        event.after.update(row.after)
    return event


def to_snapshot(resource: Message | None) -> dict[str, object] | None:
    """A resource as the audit trail keeps it: the JSON form of protobuf, in which 64-bit integers are text."""
    return None if resource is None else MessageToDict(resource, preserving_proto_field_name=True)
