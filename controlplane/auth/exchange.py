"""Exchange of an API key for a short-lived token, and for the salt keys of one namespace.

Every function runs in the caller's transaction and takes the time as an argument.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.facts import ApiKeyFacts, NamespaceFacts, SaltEpochFacts, SaltPolicyFacts, TenantFacts
from controlplane.auth.signing_keys import KeyRing
from controlplane.caller import not_available
from controlplane.clock import ceiling_s
from controlplane.db import models
from controlplane.salts.roots import open_root
from controlplane.secrets import KeyEncryptionKey, api_key_matches, parse_api_key, root_secret_context
from controlplane.sharing.salts import GroupName, derive_group_salts, find_shared_group, require_wide_salt
from saltern.errors import FailedPreconditionError, UnauthenticatedError
from saltern.keys import NOT_NARROWED, Narrowing, SaltKey, derive_salt_key
from saltern.names import ApiKeyId, NamespaceId, TenantId, api_key_name, tenant_name
from tenants.policy import TenantState
from tenants.roles import Permission, require
from tenants.salts import narrow
from tenants.tokens import Audience, Claims, sign_token

TOKEN_ID_RANDOM_BYTES: Final = 8
LAST_USED_RESOLUTION: Final = timedelta(minutes=1)
#: Compared with where no key of that lookup exists, so that the answer takes as long as for a wrong secret.
_NO_SHA256: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class Credential:
    """An API key that has been verified, with its tenant (None for a key of the platform).

    Attributes:
        lookup: of the secret that was presented: a key that was rotated has two.
    """

    key: ApiKeyFacts
    tenant: TenantFacts | None
    lookup: str

    @property
    def name(self) -> str:
        return api_key_name(self.tenant_id, ApiKeyId(self.key.id))

    @property
    def tenant_id(self) -> TenantId | None:
        return TenantId(self.tenant.id) if self.tenant is not None else None

    @property
    def last_used_time(self) -> datetime | None:
        """Of the secret that was presented."""
        return self.key.last_used_time if self.lookup == self.key.lookup else self.key.previous_last_used_time


@dataclass(frozen=True, slots=True)
class NamespaceGrant:
    """What a client needs to use one namespace besides its token.

    Attributes:
        group_uid: of the sharing group whose salts these are; empty for the namespace's own.
    """

    namespace: NamespaceFacts
    salt_keys: list[tuple[int, SaltKey]] = field(repr=False)  # (epoch, key), current epoch last
    narrowing: Narrowing
    group_uid: str = ""


def narrowed_fields(grant: NamespaceGrant) -> dict[str, str]:
    """What the salts of a grant are narrowed to, by the names of the contract; empty where they are not."""
    narrowing = grant.narrowing
    named = {"project_id": narrowing.project, "user_id": narrowing.user, "session_id": narrowing.session}
    return {field: name for field, name in named.items() if name}


def verify_api_key(found: Mapping[str, Credential], secret: str, now: datetime) -> Credential:
    """The credential of an API key, of those that were ``found`` by their lookup (I1).

    Raises:
        UnauthenticatedError: API_KEY_MALFORMED, or API_KEY_INVALID where it is unknown, deleted, expired or wrong: one
            answer for all, so that nobody learns which keys exist.
    """
    lookup = parse_api_key(secret)
    credential = found.get(lookup)
    matches = api_key_matches(secret, _sha256_of(credential.key, lookup) if credential else _NO_SHA256)
    if credential is None or not matches or is_expired(credential.key, lookup, now):
        raise UnauthenticatedError(
            "the API key is not valid",
            reason="API_KEY_INVALID",
            hint="it may be mistyped, expired or deleted, or belong to another deployment; ask for a new one",
        )
    return credential


def has_lookup(lookup: str) -> ColumnElement[bool]:
    """Selects the API key that has a secret of ``lookup``: its own one, or the one before the last rotation."""
    return or_(models.ApiKey.lookup == lookup, models.ApiKey.previous_lookup == lookup)


def expire_time_of(key: ApiKeyFacts, lookup: str) -> datetime | None:
    """When the secret of ``lookup`` expires: with its key, or as the previous one at the end of the overlap."""
    times = (key.expire_time, None if lookup == key.lookup else key.previous_expire_time)
    return min((time for time in times if time is not None), default=None)


def is_expired(key: ApiKeyFacts, lookup: str, now: datetime) -> bool:
    """Whether the secret of ``lookup`` is past its time."""
    expire_time = expire_time_of(key, lookup)
    return expire_time is not None and expire_time <= now


def _sha256_of(key: ApiKeyFacts, lookup: str) -> bytes:
    return key.secret_sha256 if lookup == key.lookup else key.previous_secret_sha256 or _NO_SHA256


def require_active(tenant: TenantFacts | None) -> None:
    """Raise FailedPreconditionError (TENANT_SUSPENDED) if ``tenant`` is suspended."""
    if tenant is not None and tenant.state is TenantState.SUSPENDED:
        raise FailedPreconditionError(
            f"tenant {tenant.id} is suspended",
            reason="TENANT_SUSPENDED",
            hint="ask the platform's administrator to resume it",
            metadata={"tenant": tenant_name(TenantId(tenant.id))},
        )


@dataclass(frozen=True, slots=True)
class Salting:
    """A tenant's salt policy, and its readable epochs in ascending order, the current one last."""

    policy: SaltPolicyFacts
    epochs: Sequence[SaltEpochFacts]


async def find_salting(session: AsyncSession, tenants: Iterable[str]) -> dict[str, Salting]:
    """What the salts of these tenants are derived from, in one statement."""
    policy, epoch = models.SaltPolicy, models.SaltEpoch
    statement = (
        select(policy, epoch)
        .join(epoch, epoch.tenant_id == policy.tenant_id)
        .where(policy.tenant_id.in_(set(tenants)))
        .order_by(epoch.epoch)
    )
    found: dict[str, tuple[models.SaltPolicy, list[models.SaltEpoch]]] = {}
    for row, generation in await session.execute(statement):
        found.setdefault(row.tenant_id, (row, []))[1].append(generation)
    return {tenant: Salting(row, epochs) for tenant, (row, epochs) in found.items()}


async def grant_namespace(
    session: AsyncSession,
    key_encryption_key: KeyEncryptionKey,
    credential: Credential,
    namespace_id: NamespaceId,
    *,
    asked: Narrowing,
    saltings: Mapping[str, Salting],
    group: GroupName | None = None,
) -> NamespaceGrant:
    """Find a namespace of the credential's own tenant and :func:`derive_grant` of it.

    Args:
        saltings: from :func:`find_salting`, that of the credential's tenant among them.

    Raises:
        PermissionDeniedError, FailedPreconditionError: as that.
    """
    require(credential.key.role, Permission.ENTRIES_READ)
    assert credential.tenant is not None, "only roles of tenants read entries"
    namespace = await session.get(models.Namespace, (credential.tenant.id, namespace_id))
    salting = saltings[credential.tenant.id]
    return await derive_grant(
        session, key_encryption_key, credential, namespace, asked=asked, salting=salting, group=group
    )


async def derive_grant(
    session: AsyncSession,
    key_encryption_key: KeyEncryptionKey,
    credential: Credential,
    namespace: NamespaceFacts | None,
    *,
    asked: Narrowing,
    salting: Salting | None,
    group: GroupName | None = None,
) -> NamespaceGrant:
    """Derive the salt keys of a namespace for every epoch that may be read.

    Args:
        namespace: of the credential's own tenant; None where it has none of the name that was asked for.
        asked: what the caller wants the salts narrowed to.
        salting: of the credential's tenant; needed where ``namespace`` is given.
        group: the sharing group whose salts are asked for instead of the namespace's own.

    Raises:
        PermissionDeniedError: ROLE_REQUIRED for a role that reads no entries (the platform's administrator is one);
            RESOURCE_NOT_AVAILABLE where the tenant has no such namespace, whoever else may have one (I2), or the
            namespace is in no such group; OUTSIDE_KEY_BINDING, as :func:`tenants.salts.narrow`.
        FailedPreconditionError: SALT_SCOPE_REQUIRED, as that; SALT_SCOPE_TOO_NARROW for a group's.
    """
    require(credential.key.role, Permission.ENTRIES_READ)
    if namespace is None:
        raise not_available()
    tenant, tenant_id = credential.tenant, credential.tenant_id
    assert tenant is not None and tenant_id is not None, "only roles of tenants read entries"
    assert salting is not None, "every tenant has a salt policy and a current epoch"
    narrowing = narrow(
        asked,
        bound_project=credential.key.project_id or "",
        bound_user=credential.key.user_id or "",
        scope=salting.policy.scope,
    )
    if group is not None:
        require_wide_salt(is_narrowed=narrowing != NOT_NARROWED)
        shared = await find_shared_group(session, group, namespace.uid)
        return NamespaceGrant(
            namespace, await derive_group_salts(key_encryption_key, shared), narrowing, str(shared.uid)
        )
    scope, scope_id = narrowing.of_scope(salting.policy.scope)
    salt_keys = []
    for row in salting.epochs:
        context = root_secret_context(tenant.uid, row.epoch)
        root = await open_root(key_encryption_key, row.wrapped_root_secret, context)
        salt_key = derive_salt_key(
            root,
            tenant=tenant_id,
            namespace=NamespaceId(namespace.id),
            scope=scope,
            scope_id=scope_id,
            epoch=row.epoch,
        )
        salt_keys.append((row.epoch, salt_key))
    return NamespaceGrant(namespace, salt_keys, narrowing)


def issue_token(
    key_ring: KeyRing,
    credential: Credential,
    audience: Audience,
    namespace: NamespaceId | None,
    *,
    now: datetime,
    lifetime_s: int,
    grant: NamespaceGrant | None = None,
) -> tuple[str, Claims]:
    """Sign a token for a verified credential; expires after ``lifetime_s`` seconds, or with the API key.

    It names what the salts of ``grant`` are narrowed to, so that whoever is handed the token gets no wider ones for it.

    Its id begins with the lookup of the API key, so that the token stands for this very key and not for a later one of
    the same name. Its issue time is at least the tenant's ``min_issue_time`` in whole seconds: for a tenant that was
    made in this second that is up to one second ahead of the clock, within what verifiers allow for skew.
    """
    issued_at_s = int(now.timestamp())
    if credential.tenant is not None:
        issued_at_s = max(issued_at_s, ceiling_s(credential.tenant.min_issue_time))
    if credential.key.min_issue_time is not None:
        issued_at_s = max(issued_at_s, ceiling_s(credential.key.min_issue_time))
    expires_at_s = issued_at_s + lifetime_s
    expire_time = expire_time_of(credential.key, credential.lookup)
    if expire_time is not None:
        # Nodes see only the token, so it must not outlive the key. At least a second: an empty life is malformed.
        expires_at_s = max(min(expires_at_s, int(expire_time.timestamp())), issued_at_s + 1)
    claims = Claims(
        issuer=key_ring.key_set.issuer,
        subject=credential.name,
        audience=audience,
        tenant=credential.tenant_id,
        namespace=namespace,
        role=credential.key.role,
        issued_at_s=issued_at_s,
        expires_at_s=expires_at_s,
        token_id=credential.lookup + secrets.token_hex(TOKEN_ID_RANDOM_BYTES),
        narrowing=NOT_NARROWED if grant is None else grant.narrowing,
        group_uid="" if grant is None else grant.group_uid,
    )
    return sign_token(key_ring.private_key, key_ring.kid, claims), claims


def lookup_of(claims: Claims) -> str:
    """The lookup of the API key that a token was exchanged for."""
    return claims.token_id[: -2 * TOKEN_ID_RANDOM_BYTES]
