"""What a batch of exchanges has to know, read with as few statements as there are kinds of answers.

Past SQLAlchemy and without its objects: around each statement that takes five times as long as the driver and the
database together, and an exchange is what everybody does first. What is read is the same, and so are the scope of the
transaction and the names (``controlplane.auth.facts``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.auth.exchange import LAST_USED_RESOLUTION, Credential, Salting
from controlplane.db.models import NodeAdminState
from controlplane.db.session import driver_of
from controlplane.node.registry import LOST_AFTER
from saltern.keys import SaltScope
from saltern.names import NamespaceId
from tenants.policy import TenantState
from tenants.roles import Role

#: What is asked for: the lookup of an API key, and a namespace; empty for a token of the control plane.
Wanted = tuple[str, str]

#: One row for each of them whose key is there; by the two indexes of lookups, whatever the planner thinks of an OR.
_READ: Final = """
SELECT wanted.lookup, wanted.namespace,
    key.uid, key.id, key.lookup, key.secret_sha256, key.role, key.expire_time, key.last_used_time, key.min_issue_time,
    key.previous_secret_sha256, key.previous_expire_time, key.previous_last_used_time,
    key.project_id, key.user_id, key.node_id,
    tenant.id, tenant.uid, tenant.state, tenant.min_issue_time,
    policy.scope, salt.epochs, salt.wrapped,
    namespace.uid, namespace.model_fingerprint, namespace.block_tokens, namespace.block_bytes
FROM unnest(%s::text[], %s::text[]) AS wanted (lookup, namespace)
CROSS JOIN LATERAL (
    SELECT * FROM api_keys WHERE api_keys.lookup = wanted.lookup
    UNION ALL
    SELECT * FROM api_keys WHERE api_keys.previous_lookup = wanted.lookup
) AS key
LEFT JOIN tenants AS tenant ON tenant.id = key.tenant_id
LEFT JOIN namespaces AS namespace ON namespace.tenant_id = key.tenant_id AND namespace.id = wanted.namespace
LEFT JOIN salt_policies AS policy ON policy.tenant_id = namespace.tenant_id
LEFT JOIN LATERAL (
    SELECT array_agg(epoch ORDER BY epoch) AS epochs, array_agg(wrapped_root_secret ORDER BY epoch) AS wrapped
    FROM salt_epochs WHERE salt_epochs.tenant_id = namespace.tenant_id
) AS salt ON true
"""
_NODES: Final = """
SELECT id, wire_endpoint, shm_path, grpc_endpoint, host_id, tls_server_name, admin_state
FROM nodes WHERE last_report_time > %s ORDER BY id
"""
#: Rows in the order of their uids: two control planes that note the same keys do not wait crosswise.
_NOTE_USES: Final = """
WITH due AS (
    SELECT uid FROM api_keys
    WHERE (lookup = ANY(%(lookups)s) AND (last_used_time IS NULL OR last_used_time < %(due)s))
        OR (previous_lookup = ANY(%(lookups)s)
            AND (previous_last_used_time IS NULL OR previous_last_used_time < %(due)s))
    ORDER BY uid FOR NO KEY UPDATE
)
UPDATE api_keys AS key SET
    last_used_time = CASE WHEN lookup = ANY(%(lookups)s) THEN %(now)s ELSE last_used_time END,
    previous_last_used_time =
        CASE WHEN previous_lookup = ANY(%(lookups)s) THEN %(now)s ELSE previous_last_used_time END
FROM due WHERE key.uid = due.uid
"""
_KEY_COLUMNS: Final = slice(2, 16)
_TENANT_COLUMNS: Final = slice(16, 20)


class ApiKeyRow(NamedTuple):
    """A key, as ``models.ApiKey`` has it."""

    uid: UUID
    id: str
    lookup: str
    secret_sha256: bytes
    role: Role
    expire_time: datetime | None
    last_used_time: datetime | None
    min_issue_time: datetime | None
    previous_secret_sha256: bytes | None
    previous_expire_time: datetime | None
    previous_last_used_time: datetime | None
    project_id: str | None
    user_id: str | None
    node_id: str | None

    def __repr__(self) -> str:
        return f"ApiKeyRow(id={self.id!r}, role={self.role!r})"


class TenantRow(NamedTuple):
    """A tenant, as ``models.Tenant`` has it."""

    id: str
    uid: UUID
    state: TenantState
    min_issue_time: datetime


class NamespaceRow(NamedTuple):
    """A namespace, as ``models.Namespace`` has it."""

    tenant_id: str
    id: str
    uid: UUID
    model_fingerprint: str
    block_tokens: int
    block_bytes: int


class SaltPolicyRow(NamedTuple):
    """A salt policy, as ``models.SaltPolicy`` has it."""

    scope: SaltScope


class SaltEpochRow(NamedTuple):
    """One epoch of a tenant's salt, as ``models.SaltEpoch`` has it."""

    epoch: int
    wrapped_root_secret: bytes

    def __repr__(self) -> str:
        return f"SaltEpochRow(epoch={self.epoch})"


class NodeRow(NamedTuple):
    """Where a node is, as ``models.Node`` has it."""

    id: str
    wire_endpoint: str
    shm_path: str
    grpc_endpoint: str
    host_id: str
    tls_server_name: str
    admin_state: NodeAdminState


@dataclass(frozen=True, slots=True)
class Known:
    """What was found, nothing of it verified.

    Attributes:
        credentials: by the lookup of their secret.
        namespaces: those asked for that are the credential's own tenant's.
        saltings: of the tenants of ``namespaces``.
    """

    credentials: Mapping[str, Credential] = field(repr=False)
    namespaces: Mapping[tuple[str, str], NamespaceRow]
    saltings: Mapping[str, Salting] = field(repr=False)

    def namespace(self, credential: Credential, namespace: NamespaceId) -> NamespaceRow | None:
        """The namespace of that name of the credential's own tenant."""
        return self.namespaces.get((credential.tenant_id or "", namespace))

    def salting(self, credential: Credential) -> Salting | None:
        """That of the credential's tenant."""
        return self.saltings.get(credential.tenant_id or "")


async def read_known(session: AsyncSession, wanted: Collection[Wanted]) -> Known:
    """Everything about ``wanted`` but groups, in one statement and so of one instant.

    A namespace is looked for in the tenant of the key alone (I2).
    """
    credentials: dict[str, Credential] = {}
    namespaces: dict[tuple[str, str], NamespaceRow] = {}
    saltings: dict[str, Salting] = {}
    lookups, names = [lookup for lookup, _ in wanted], [name for _, name in wanted]
    cursor = await (await driver_of(session)).execute(_READ, (lookups, names), binary=True)
    for row in await cursor.fetchall():
        lookup, name = row[0], row[1]
        if lookup not in credentials:
            credentials[lookup] = Credential(_to_key(row[_KEY_COLUMNS]), _to_tenant(row[_TENANT_COLUMNS]), lookup)
        tenant_id, (scope, epochs, wrapped, *namespace) = row[16], row[20:]
        if namespace[0] is None:
            continue
        namespaces[tenant_id, name] = NamespaceRow(tenant_id, name, *namespace)
        if tenant_id not in saltings and epochs is not None:
            rows = [SaltEpochRow(*epoch) for epoch in zip(epochs, wrapped, strict=True)]
            saltings[tenant_id] = Salting(SaltPolicyRow(SaltScope(scope)), rows)
    return Known(credentials, namespaces, saltings)


async def read_live_nodes(session: AsyncSession, now: datetime) -> list[NodeRow]:
    """As :func:`controlplane.node.registry.live_nodes`."""
    cursor = await (await driver_of(session)).execute(_NODES, (now - LOST_AFTER,))
    rows = [NodeRow._make(row) for row in await cursor.fetchall()]
    return [row._replace(admin_state=NodeAdminState(row.admin_state)) for row in rows]


async def note_uses(session: AsyncSession, credentials: Iterable[Credential], now: datetime) -> None:
    """Note when secrets were last used, at most once a minute each: exchanges are frequent, the value is for people."""
    due = now - LAST_USED_RESOLUTION
    lookups = [one.lookup for one in credentials if (used := one.last_used_time) is None or used < due]
    if lookups:
        await (await driver_of(session)).execute(_NOTE_USES, {"lookups": lookups, "due": due, "now": now})


def _to_key(columns: tuple[Any, ...]) -> ApiKeyRow:
    row = ApiKeyRow._make(columns)
    return row._replace(role=Role(row.role))


def _to_tenant(columns: tuple[Any, ...]) -> TenantRow | None:
    row = TenantRow._make(columns)
    return None if row.id is None else row._replace(state=TenantState(row.state))
