"""SaltPolicyService: how narrowly a tenant's blocks are named, and when its salt is another one."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.etags import check_etag
from controlplane.admin.fields import refused
from controlplane.admin.resources import SCOPE_FROM_PROTO, to_salt_policy
from controlplane.admin.service import AdminServicer, Change, load_tenant, method
from controlplane.caller import Caller, authorise
from controlplane.db.models import SaltEpoch, SaltPolicy, Tenant
from controlplane.rpc import Context
from controlplane.salts.epochs import begin_epoch, load_epochs, note_change, to_epoch
from saltern.admin.v1 import salt_policies_pb2, salt_policies_pb2_grpc
from saltern.keys import SaltScope
from saltern.names import TenantId, parse_salt_policy_name
from tenants.roles import Permission
from tenants.salts import GRACE_PERIOD_MAX_S, ROTATION_PERIOD_MAX_S, ROTATION_PERIOD_MIN_S

_MASK_PATHS: Final = frozenset({"scope", "rotation_period", "grace_period"})


class SaltPolicyService(AdminServicer, salt_policies_pb2_grpc.SaltPolicyServiceServicer):
    service = "saltern.admin.v1.SaltPolicyService"

    @method
    async def GetSaltPolicy(
        self, request: salt_policies_pb2.GetSaltPolicyRequest, context: Context
    ) -> salt_policies_pb2.SaltPolicy:
        tenant = parse_salt_policy_name(request.name)
        caller = authorise(Permission.SALTS_READ, tenant)
        async with self._database.transaction() as session:
            return (await _load(session, tenant, caller)).resource

    @method
    async def UpdateSaltPolicy(
        self, request: salt_policies_pb2.UpdateSaltPolicyRequest, context: Context
    ) -> salt_policies_pb2.SaltPolicy:
        tenant = parse_salt_policy_name(request.salt_policy.name)
        caller = authorise(Permission.SALTS_MANAGE, tenant)
        wanted = _parse_changes(request)

        async def act(session: AsyncSession, now: datetime) -> Change[salt_policies_pb2.SaltPolicy]:
            loaded = await _load(session, tenant, caller, etag=request.salt_policy.etag, change=True)
            policy = loaded.policy
            if wanted.rotation_period_s is not None:
                policy.rotation_period_s = wanted.rotation_period_s
            if wanted.grace_period_s is not None:
                policy.grace_period_s = wanted.grace_period_s
            # Before anything is read again: the database takes a period only together with when it is over.
            note_change(policy, to_epoch(loaded.epochs[-1]), now)
            if wanted.scope not in (None, policy.scope):
                policy.scope = wanted.scope
                # Who holds a salt of the scope before must not go on with it: a node cannot tell one from the other.
                return await self._rotated(session, loaded, timedelta(0), now)
            return _changed(loaded, loaded.epochs)

        return await self._change("UpdateSaltPolicy", request, salt_policies_pb2.SaltPolicy, act)

    @method
    async def RotateSalt(
        self, request: salt_policies_pb2.RotateSaltRequest, context: Context
    ) -> salt_policies_pb2.SaltPolicy:
        tenant = parse_salt_policy_name(request.name)
        caller = authorise(Permission.SALTS_MANAGE, tenant)
        grace_s = _parse_grace(request.grace_period) if request.HasField("grace_period") else None

        async def act(session: AsyncSession, now: datetime) -> Change[salt_policies_pb2.SaltPolicy]:
            loaded = await _load(session, tenant, caller, etag=request.etag, change=True)
            seconds = loaded.policy.grace_period_s if grace_s is None else grace_s
            return await self._rotated(session, loaded, timedelta(seconds=seconds), now)

        return await self._change("RotateSalt", request, salt_policies_pb2.SaltPolicy, act)

    async def _rotated(
        self, session: AsyncSession, loaded: _Loaded, grace: timedelta, now: datetime
    ) -> Change[salt_policies_pb2.SaltPolicy]:
        epochs = await begin_epoch(
            session,
            self._parts.key_encryption_key,
            tenant_uid=loaded.owner.uid,
            policy=loaded.policy,
            epochs=loaded.epochs,
            grace=grace,
            now=now,
        )
        return _changed(loaded, epochs)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The rows of a policy, and ``resource``: what they were before any change."""

    owner: Tenant
    policy: SaltPolicy
    epochs: list[SaltEpoch]
    resource: salt_policies_pb2.SaltPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """What a request changes; None for what stays."""

    scope: SaltScope | None
    rotation_period_s: int | None
    grace_period_s: int | None


async def _load(
    session: AsyncSession, tenant: TenantId, caller: Caller, *, etag: str = "", change: bool = False
) -> _Loaded:
    """The rows, with that of the tenant locked for a ``change``; raises as ``load_tenant`` and ``check_etag``."""
    owner = await load_tenant(session, tenant, caller, change=change)
    policy = await session.get_one(SaltPolicy, tenant)
    epochs = await load_epochs(session, tenant)
    resource = to_salt_policy(owner, policy, epochs)
    check_etag(etag, resource.etag, resource.name)
    return _Loaded(owner, policy, epochs, resource)


def _changed(loaded: _Loaded, epochs: Sequence[SaltEpoch]) -> Change[salt_policies_pb2.SaltPolicy]:
    after = to_salt_policy(loaded.owner, loaded.policy, epochs)
    return Change(
        tenant=TenantId(loaded.owner.id), resource=after.name, response=after, before=loaded.resource, after=after
    )


def _parse_changes(request: salt_policies_pb2.UpdateSaltPolicyRequest) -> _Changes:
    policy, mask = request.salt_policy, set(request.update_mask.paths)
    if unknown := mask - _MASK_PATHS - {"*"}:
        shown = min(unknown)[:64]
        raise refused("update_mask", f"names {shown!r}", f"name any of: {', '.join(sorted(_MASK_PATHS))}")
    if "*" in mask:
        mask = set(_MASK_PATHS)
    elif not mask:
        mask = {path for path in ("rotation_period", "grace_period") if policy.HasField(path)}
        mask |= {"scope"} if policy.scope else set()
    if not mask:
        raise refused("salt_policy", "changes nothing", f"give any of: {', '.join(sorted(_MASK_PATHS))}")
    return _Changes(
        scope=_parse_scope(policy.scope) if "scope" in mask else None,
        rotation_period_s=_parse_period(policy.rotation_period) if "rotation_period" in mask else None,
        grace_period_s=_parse_grace(policy.grace_period) if "grace_period" in mask else None,
    )


def _parse_scope(value: int) -> SaltScope:
    scope = SCOPE_FROM_PROTO.get(value)  # type: ignore[call-overload]  # any integer can stand on the wire
    if not isinstance(scope, SaltScope):
        choices = ", ".join(choice.value for choice in SCOPE_FROM_PROTO.values())
        raise refused("salt_policy.scope", "is not one that a tenant can have", f"choose one of: {choices}")
    return scope


def _parse_period(value: Duration) -> int:
    if value.nanos or not (value.seconds == 0 or ROTATION_PERIOD_MIN_S <= value.seconds <= ROTATION_PERIOD_MAX_S):
        raise refused(
            "salt_policy.rotation_period",
            "is neither 0 nor an hour to 400 days",
            f"give whole seconds, {ROTATION_PERIOD_MIN_S} to {ROTATION_PERIOD_MAX_S}, or 0 for rotation on demand",
        )
    return value.seconds


def _parse_grace(value: Duration) -> int:
    if value.nanos or not 0 <= value.seconds <= GRACE_PERIOD_MAX_S:
        raise refused("grace_period", "is not 0 to 90 days", f"give whole seconds, 0 (at once) to {GRACE_PERIOD_MAX_S}")
    return value.seconds
