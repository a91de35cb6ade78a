"""Whose rows a transaction may touch: row-level security, forced on every table that holds what is a tenant's (I2).

PostgreSQL itself compares the tenant of each row with the setting ``saltern.tenant`` of the transaction, so that a
forgotten ``WHERE`` or a forgotten ``authorise`` finds nothing instead of everything. Nothing set is nobody's: no row is
read and none is written (I10). The policies are made by ``migrations.row_security``.

::

    TenantScope(tenant)    rows of one tenant      a tenant's caller, whatever it asks for
    PlatformScope()        every row               a caller of the platform: its administrator, a node
    ServiceScope(task)     every row               the service's own work; ``ServiceTask`` names all of it
    none                   no row of any tenant    everything else: tables without tenants are open to it

What it does not defend against: whoever can run statements of their own choice as the application role can also set
``saltern.tenant``. It is a second wall behind ``authorise``, not a replacement of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from controlplane.caller import Caller, current_caller
from saltern.errors import UnauthenticatedError
from saltern.names import TenantId

#: The setting that the policies compare with: a tenant's id, or ``EVERY_TENANT``.
TENANT_SETTING: Final = "saltern.tenant"
#: No identifier looks like this, so no tenant can be named so.
EVERY_TENANT: Final = "*"


class ServiceTask(StrEnum):
    """All work of the service's own that needs rows of more than one tenant, and why no narrower scope does.

    A test holds the list and the places that use it to be the same.
    """

    #: The tenant of an API key is what its lookup finds out.
    CREDENTIAL_LOOKUP = "credential lookup"
    #: A token's salts may be those of a sharing group, which is another tenant's. Outside of any they are its own
    #: tenant's, and so is the scope.
    GROUP_TOKEN_EXCHANGE = "exchange of a sharing group's token"  # noqa: S105  # says what it is for
    #: The first administrator's key and its audit event are the platform's, and nobody has called before.
    BOOTSTRAP = "bootstrap"
    #: Attempts of callers that belong to no tenant go into the platform's chain.
    DENIAL = "denial of a caller without a tenant"
    #: Its audit events are the platform's, and revocations of every tenant are forgotten when nothing is left of them.
    KEY_ROTATION = "rotation of the signing keys"
    #: Secrets of every tenant are wrapped anew, and the audit events of that are the platform's.
    KEY_ENCRYPTION = "rotation of the key-encryption keys"
    #: Every chain is signed, those of tenants that are gone too.
    AUDIT_CHECKPOINT = "checkpoints of audit chains"
    #: A node serves every tenant.
    POLICY_SNAPSHOT = "policy snapshot"
    #: Which tenants' salts are due for rotation or purge; each is then done in its own tenant's scope.
    SALT_ROTATION = "rotation of salts"
    #: Quotas of every tenant are spread over the nodes.
    LEASES = "leases"
    #: Hours are closed for every tenant, those of tenants that are gone too.
    METERING = "metering"
    #: Two tenants act on one group; what each of them sees of it is less than the rows (``controlplane.sharing``).
    SHARING = "sharing groups"
    #: After a restore of the database every tenant's tokens end.
    RESTORE = "restore of the database"
    #: Whose a session of the console is, is what its cookie finds out.
    CONSOLE_SESSION = "session of the console"


@dataclass(frozen=True, slots=True)
class TenantScope:
    """The rows of one tenant."""

    tenant: TenantId


@dataclass(frozen=True, slots=True)
class PlatformScope:
    """Every row, because a caller of the platform has asked; made by ``scope_of`` alone."""


@dataclass(frozen=True, slots=True)
class ServiceScope:
    """Every row, for a task of the service's own."""

    task: ServiceTask


Scope: TypeAlias = TenantScope | PlatformScope | ServiceScope


def scope_of(caller: Caller) -> Scope:
    """What a transaction on behalf of ``caller`` may touch."""
    return PlatformScope() if caller.tenant is None else TenantScope(caller.tenant)


def scope_of_current_caller() -> Scope | None:
    """The scope of the call in progress; None, and so no row, where no door has verified a caller."""
    try:
        return scope_of(current_caller())
    except UnauthenticatedError:
        return None


def setting_of(scope: Scope | None) -> str:
    """The value of ``TENANT_SETTING`` for ``scope``; empty is no tenant's id."""
    match scope:
        case None:
            return ""
        case TenantScope(tenant):
            return tenant
        case PlatformScope() | ServiceScope():
            return EVERY_TENANT
