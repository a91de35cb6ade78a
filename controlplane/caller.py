"""Who is calling and from where: set by the door that has verified the token, read by every service (I1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote

from saltern.errors import PermissionDeniedError, UnauthenticatedError
from saltern.names import NodeId, TenantId
from tenants.roles import PLATFORM_ROLES, Permission, Role, require


@dataclass(frozen=True, slots=True)
class Caller:
    """A verified caller.

    Attributes:
        subject: resource name of the API key that the token was exchanged for.
        tenant: the caller's tenant, or None for a credential of the platform.
        role: goes with the tenant: a platform role without one, a tenant's role with one.
        node: the one node that a credential of the role node may serve as; None for one that is not bound.
    """

    subject: str
    tenant: TenantId | None
    role: Role
    node: NodeId | None = None

    def __post_init__(self) -> None:
        assert (self.tenant is None) == (self.role in PLATFORM_ROLES), "role and tenant do not go together"

    @property
    def is_platform(self) -> bool:
        """Whether the credential is one of the platform."""
        return self.tenant is None


_caller: ContextVar[Caller] = ContextVar("caller")
_peer: ContextVar[str] = ContextVar("peer", default="")


def current_caller() -> Caller:
    """The caller of the request in progress; raises UnauthenticatedError if no door has verified one."""
    try:
        return _caller.get()
    except LookupError:
        raise UnauthenticatedError(
            "this method needs a token", reason="TOKEN_MISSING", hint="send authorization: Bearer TOKEN"
        ) from None


@contextmanager
def calling_as(caller: Caller) -> Iterator[None]:
    """Make ``caller`` the current one inside the block."""
    reset = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(reset)


def role_of(subject: str) -> Role | None:
    """The role of ``subject`` if that is the current caller."""
    caller = _caller.get(None)
    return caller.role if caller is not None and caller.subject == subject else None


def note_peer(peer: str) -> None:
    """Remember where the call in progress comes from, for the audit trail; each call is a task with its own.

    ``peer``: as gRPC tells it, such as ``ipv4:192.0.2.7:50412`` or ``ipv6:%5B::1%5D:50412``.
    """
    kind, _, address = unquote(peer).partition(":")
    _peer.set(address if kind in ("ipv4", "ipv6") else unquote(peer))


def current_peer() -> str:
    """Where the call in progress comes from, such as ``192.0.2.7:50412``; empty for the service's own work."""
    return _peer.get()


def authorise(permission: Permission, tenant: TenantId | None) -> Caller:
    """The current caller, if it may do ``permission`` to what belongs to ``tenant`` (None: to the platform).

    Call it before looking at the database: the answer to a caller of another tenant depends only on the names in its
    request, never on what exists (I2).

    Raises:
        UnauthenticatedError: there is no verified caller.
        PermissionDeniedError: reason RESOURCE_NOT_AVAILABLE for what is another tenant's, ROLE_REQUIRED for what the
            role lacks.
    """
    caller = current_caller()
    if not caller.is_platform and tenant is not None and caller.tenant != tenant:
        raise not_available()
    require(caller.role, permission)
    if not caller.is_platform and tenant is None:
        raise not_available()
    return caller


def not_available() -> PermissionDeniedError:
    """What a tenant's caller hears of what is another's or is not there: one answer for both."""
    return PermissionDeniedError(
        "the resource does not exist or this credential may not use it",
        reason="RESOURCE_NOT_AVAILABLE",
        hint="check the resource name and whose credential this is",
    )
