"""What all administrative services share: how a method is guarded, and what a change is.

A change is one transaction: the act, its audit row, the new policy version, the answer under its request id. All of it
happens or none of it (I11).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane import rpc
from controlplane.admin.fields import parse_request_id
from controlplane.admin.requests import claim_request, store_response
from controlplane.admin.resources import to_snapshot
from controlplane.audit import DenialLog, record
from controlplane.caller import Caller, current_caller, not_available
from controlplane.clock import Clock, utc_now
from controlplane.db import Database, Scope, bump_policy_version
from controlplane.db.locks import lock_audit_chains
from controlplane.db.models import Concern, Tenant
from controlplane.db.policy import note_policy_version, raised_policy_version
from controlplane.key_encryption.encryption_keys import EncryptionKeys
from controlplane.node.policy_feed import PolicyFeed
from controlplane.secrets import KeyEncryptionKey
from saltern.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SalternError,
)
from saltern.names import TenantId, tenant_name
from saltern.policy_version import POLICY_VERSION_KEY
from tenants.policy import TenantState

#: Collections of the platform's of which nodes are told nothing, or no more than the signing keys.
_UNTOLD: Final = frozenset({"apiKeys", "checkpointKeys", "keyEncryptionKeys", "platform", "signingKeys"})

_RequestT = TypeVar("_RequestT", bound=Message)
_ResponseT = TypeVar("_ResponseT", bound=Message)
_ServicerT = TypeVar("_ServicerT", bound="AdminServicer")


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What the services are made of.

    Attributes:
        feed: tells when nodes answer.
        node_lost_after: a node that has not reported for so long is lost.
        encryption_keys: what rotates ``key_encryption_key``.
        allow_unbound_node_keys: make keys of the role node that are good for every node.
    """

    database: Database
    key_encryption_key: KeyEncryptionKey
    denials: DenialLog
    feed: PolicyFeed
    clock: Clock = utc_now
    node_lost_after: timedelta = timedelta(seconds=15)
    encryption_keys: EncryptionKeys | None = None
    allow_unbound_node_keys: bool = False


@dataclass(frozen=True, slots=True)
class Witness:
    """Another tenant that a change touches: it goes into that one's chain too, as much as that one may see of it.

    Attributes:
        before, after: the resource as that tenant sees it.
        resource: its name, where that is not the one acted upon.
        is_there: there is such a tenant, with a chain. Who acts must not learn whether there is (I2), and is told the
            policy version, so that rises for a tenant that is not there as well.
    """

    tenant: TenantId
    before: Message | None = None
    after: Message | None = None
    resource: str = ""
    is_there: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[_ResponseT]):
    """What an act did.

    Attributes:
        tenant: whose audit chain it belongs to; None for the platform's.
        resource: name of the resource acted upon.
        response: the answer.
        replay: the answer to a repetition, where it differs: a secret is shown once.
        before, after: the resource; None where it was not there.
        witnesses: the other tenants whose chain and policy it changes; then ``tenant`` is a tenant.
        concern: of an act on a resource of the platform, whom the policy concerns that comes of it; by default what
            its collection says (:data:`_UNTOLD`), otherwise it may be any tenant.
    """

    tenant: TenantId | None
    resource: str
    response: _ResponseT
    replay: _ResponseT | None = None
    before: Message | None = None
    after: Message | None = None
    witnesses: Sequence[Witness] = ()
    concern: Concern | None = None


class _ChangeRequest(Protocol):
    @property
    def request_id(self) -> str: ...


class AdminServicer:
    """Base of the services. ``service``: the full name of the gRPC service."""

    service: ClassVar[str]

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._database = parts.database

    async def _change(
        self,
        method: str,
        request: _ChangeRequest,
        response_type: type[_ResponseT],
        act: Callable[[AsyncSession, datetime], Awaitable[Change[_ResponseT]]],
        *,
        scope: Scope | None = None,
    ) -> _ResponseT:
        """Run ``act`` as one audited change; the caller is authorised already.

        Args:
            scope: of its transaction; by default the caller's.
        """
        caller = current_caller()
        full_method = f"{self.service}/{method}"
        request_id = parse_request_id(request.request_id)
        now = self._parts.clock()
        async with self._database.transaction(scope) as session:
            if request_id is not None:
                stored = await claim_request(
                    session,
                    actor=caller.subject,
                    method=full_method,
                    request_id=request_id,
                    request=cast(Message, request),
                    now=now,
                )
                if stored is not None:
                    await note_policy_version(session)
                    return response_type.FromString(stored)
            change = await act(session, now)
            await session.flush()
            if change.witnesses:  # every chain before the policy version, as ``controlplane.db.locks`` has it
                await lock_audit_chains(
                    session, [str(change.tenant), *(one.tenant for one in change.witnesses if one.is_there)]
                )
            changed = change.tenant if change.witnesses else _tenant_of(change.resource)
            await record(
                session,
                tenant=change.tenant,
                actor=caller.subject,
                method=full_method,
                resource=change.resource,
                request_id=str(request_id or ""),
                before=to_snapshot(change.before),
                after=to_snapshot(change.after),
                now=now,
                bump_policy=lambda: bump_policy_version(session, now, changed, concern=_concern_of(change)),
            )
            for witness in change.witnesses:
                if witness.is_there:
                    await _record_for(
                        session, witness, resource=change.resource, method=full_method, caller=caller, now=now
                    )
                else:
                    await bump_policy_version(session, now, change.tenant)
            if request_id is not None:
                await store_response(
                    session,
                    actor=caller.subject,
                    method=full_method,
                    request_id=request_id,
                    response=change.replay or change.response,
                )
        return change.response


async def _record_for(
    session: AsyncSession, witness: Witness, *, resource: str, method: str, caller: Caller, now: datetime
) -> None:
    """Record another tenant's act; which of its keys acted, from where and under which request id stays its own."""
    await record(
        session,
        tenant=witness.tenant,
        actor=caller.subject if caller.tenant in (None, witness.tenant) else tenant_name(caller.tenant),
        role=caller.role,
        peer="",
        method=method,
        resource=witness.resource or resource,
        before=to_snapshot(witness.before),
        after=to_snapshot(witness.after),
        now=now,
        bump_policy=lambda: bump_policy_version(session, now, witness.tenant),
    )


def _tenant_of(resource: str) -> TenantId | None:
    """The tenant that a resource hangs off; None for one of the platform."""
    collection, _, rest = resource.partition("/")
    return TenantId(rest.partition("/")[0]) if collection == "tenants" and rest else None


def _concern_of(change: Change[_ResponseT]) -> Concern | None:
    is_untold = change.tenant is None and change.resource.partition("/")[0] in _UNTOLD
    return Concern.NOBODY if change.concern is None and is_untold else change.concern


def method(
    function: Callable[[_ServicerT, _RequestT, rpc.Context], Awaitable[_ResponseT]],
) -> Callable[[_ServicerT, _RequestT, rpc.Context], Awaitable[_ResponseT]]:
    """Decorate a servicer method: denied attempts are audited, errors leave as well-formed statuses.

    What it changed is answered with the consistency token, ``POLICY_VERSION_KEY`` in the trailing metadata.
    """

    @wraps(function)
    async def audited(servicer: _ServicerT, request: _RequestT, context: rpc.Context) -> _ResponseT:
        try:
            response = await function(servicer, request, context)
        except PermissionDeniedError as error:
            await _record_denied(servicer, function.__name__, request, error)
            raise
        version = raised_policy_version()
        if version:
            context.set_trailing_metadata(((POLICY_VERSION_KEY, str(version)),))
        return response

    return rpc.unary(audited)


def streaming_method(
    function: Callable[[_ServicerT, _RequestT, rpc.Context], AsyncIterator[_ResponseT]],
) -> Callable[[_ServicerT, _RequestT, rpc.Context], AsyncIterator[_ResponseT]]:
    """As :func:`method`, for one that answers with a stream."""

    @wraps(function)
    async def audited(servicer: _ServicerT, request: _RequestT, context: rpc.Context) -> AsyncIterator[_ResponseT]:
        try:
            async for response in function(servicer, request, context):
                yield response
        except PermissionDeniedError as error:
            await _record_denied(servicer, function.__name__, request, error)
            raise

    return rpc.server_stream(audited)


async def _record_denied(servicer: AdminServicer, method_name: str, request: Any, error: PermissionDeniedError) -> None:
    caller = current_caller()
    await servicer._parts.denials.record_denied(
        error,
        method=f"{servicer.service}/{method_name}",
        resource=_resource_of(request),
        tenant=caller.tenant,
        actor=caller.subject,
        request_id=getattr(request, "request_id", ""),
    )


async def load_tenant(session: AsyncSession, tenant: TenantId, caller: Caller, *, change: bool = False) -> Tenant:
    """The row of a tenant.

    Args:
        change: lock the row, because it or what hangs off it is to be changed.

    Raises:
        NotFoundError, PermissionDeniedError: it is not there; see ``absent``.
        FailedPreconditionError: reason TENANT_SUSPENDED: a suspended tenant changes nothing by itself.
    """
    row = await session.get(Tenant, tenant, with_for_update={"key_share": True} if change else None)
    if row is None:
        raise absent(caller, tenant_name(tenant))
    if change and not caller.is_platform and row.state is TenantState.SUSPENDED:
        raise FailedPreconditionError(
            f"{tenant_name(tenant)} is suspended",
            reason="TENANT_SUSPENDED",
            hint="ask the operator of this deployment to resume it",
            metadata={"tenant": tenant},
        )
    return row


def absent(caller: Caller, name: str) -> SalternError:
    """What ``caller`` hears of a resource that is not there: outside the platform the same as of a forbidden one."""
    if not caller.is_platform:
        return not_available()
    return NotFoundError(f"{name} does not exist", hint="check the name; list its parent", metadata={"resource": name})


def require_room(count: int, limit: int, what: str, owner: str) -> None:
    """Raise ResourceExhaustedError (TOO_MANY_RESOURCES) if ``owner`` has ``limit`` of ``what`` already."""
    if count >= limit:
        raise ResourceExhaustedError(
            f"{owner} has {count} {what}, and {limit} is the limit",
            reason="TOO_MANY_RESOURCES",
            hint=f"delete {what} that are not needed any more",
            metadata={"limit": str(limit)},
        )


def _resource_of(request: Any) -> str:
    """What a request is about, for the record of a denied attempt."""
    bodies = (value for _, value in request.ListFields() if isinstance(value, Message))
    for value in (
        *(getattr(request, name, "") for name in ("name", "parent")),
        *(getattr(body, "name", "") for body in bodies),  # of what an update changes
        getattr(request, "tenant", ""),
    ):
        if isinstance(value, str) and value:
            return value
    tenant_id = getattr(request, "tenant_id", "")  # of one that was to be made
    return tenant_name(TenantId(tenant_id)) if tenant_id else ""
