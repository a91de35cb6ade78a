"""The tenants of a replay on a real control plane: made once, with other quotas and new clients for each column."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from saltern.admin.v1.credentials_pb2 import ROLE_WRITER, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
from saltern.admin_client import AdminClient, new_request_id
from saltern.breaker import BreakerPolicy
from saltern.client import Client
from saltern.credentials import ApiKeyCredentials
from saltern.deadline import Deadline
from saltern.errors import InvalidArgumentError, UnavailableError
from saltern.names import TenantId, parse_tenant_id, quota_name, tenant_name
from saltern.replay.naming import NAMESPACE, tenant_id
from saltern.replay.room import Share
from saltern.results import Pong

#: A call waits for nodes that are slow, but not for ever.
CALL_DEADLINE_MS: Final = 30_000
TENANTS_MAX: Final = 64
_CATCH_UP_S: Final = 60.0
_POLL_S: Final = 0.05
#: Nodes come and go by intent here: a client should try one again as soon as it may be back.
_BREAKER: Final = BreakerPolicy(backoff_max_s=0.2)


class Member(NamedTuple):
    """One tenant's client, and the credentials that it uses."""

    client: Client
    credentials: ApiKeyCredentials


class Cast:
    """Made by :func:`made_cast`.

    Attributes:
        members: while clients are open, by the trace's names of tenants.
    """

    def __init__(self, admin: AdminClient, secrets: Mapping[str, str], *, transport: str, sessions_max: int) -> None:
        self._admin = admin
        self._secrets = secrets
        self._transport, self._sessions_max = transport, sessions_max
        self.members: dict[str, Member] = {}

    @contextmanager
    def connected(self) -> Iterator[Mapping[str, Member]]:
        """A new client for each tenant, for the time of the block: what one column taught it is gone in the next."""
        with ExitStack() as resources:
            resources.callback(self.members.clear)
            for name, secret in self._secrets.items():
                credentials = ApiKeyCredentials(control=self._admin.endpoint, api_key=secret, namespace=NAMESPACE)
                client = Client.from_credentials(
                    credentials,
                    deadline_ms=CALL_DEADLINE_MS,
                    transport=self._transport,
                    sessions_max=self._sessions_max,
                    breaker=_BREAKER,
                )
                self.members[name] = Member(resources.enter_context(client), credentials)
            yield self.members

    def allot(self, shares: Mapping[str, Share], nodes: int, charged_bytes: int) -> dict[str, int]:
        """Give every tenant its share on each node, and wait until nodes know of it; returns limits by tenant id.

        What is reserved is given back first: together with what is reserved anew it may be more than there is (I5).
        """
        block_bytes = nodes * charged_bytes
        for name in self._secrets:
            self._update(tenant_id(name), TierQuota(tier=TIER_DRAM))
        for name, share in shares.items():
            tier = TierQuota(
                tier=TIER_DRAM,
                reserved_bytes=share.reserved_blocks * block_bytes,
                limit_bytes=share.limit_blocks * block_bytes,
                weight=share.weight,
            )
            self._update(tenant_id(name), tier)
        self._admin.wait_for_policy()
        return {tenant_id(name): share.limit_blocks * block_bytes for name, share in shares.items()}

    def _update(self, tenant: TenantId, tier: TierQuota) -> None:
        quota = Quota(name=quota_name(tenant), tiers=[tier])
        request = UpdateQuotaRequest(quota=quota, allow_below_use=True, request_id=new_request_id())
        self._admin.call(self._admin.quotas.UpdateQuota, request)

    def wait_for(self, nodes: Sequence[str]) -> None:
        """Wait until every client reaches every one of these nodes, and is sent to no other.

        Raises:
            UnavailableError: REPLAY_NODES: that has not happened within a minute.
        """
        deadline_s = time.monotonic() + _CATCH_UP_S
        wanted = set(nodes)
        for name, member in self.members.items():
            while not _is_there(member, wanted):
                if time.monotonic() > deadline_s:
                    raise UnavailableError(
                        f"the client of tenant {name or '-'!r} does not find exactly the nodes {', '.join(nodes)}",
                        reason="REPLAY_NODES",
                        hint="the machine may be overloaded; replay on fewer nodes",
                    )
                time.sleep(_POLL_S)


def _is_there(member: Member, wanted: set[str]) -> bool:
    grant = member.credentials.grant(Deadline(CALL_DEADLINE_MS))
    if {node.node_id for node in grant.nodes} != wanted:
        member.credentials.renew_soon()
        return False
    return all(isinstance(member.client.ping(node=node, deadline_ms=1000), Pong) for node in wanted)


def made_cast(
    admin: AdminClient,
    names: Sequence[str],
    *,
    block_tokens: int,
    block_bytes: int,
    transport: str,
    sessions_max: int,
) -> Cast:
    """Make a tenant with a namespace and a writer's API key for each name.

    Raises:
        InvalidArgumentError: there are too many tenants, or one has a name that none can have.
        SalternError: the control plane refused a step.
    """
    if len(names) > TENANTS_MAX:
        raise InvalidArgumentError(
            f"the trace has {len(names)} tenants, and at most {TENANTS_MAX} can be measured",
            reason="INVALID_REPLAY",
            hint="take fewer of them, or replay it simulated",
        )
    secrets = {name: _make(admin, parse_tenant_id(tenant_id(name)), block_tokens, block_bytes) for name in names}
    admin.wait_for_policy()  # a node that has not heard of a namespace yet would refuse it
    return Cast(admin, secrets, transport=transport, sessions_max=sessions_max)


def _make(admin: AdminClient, tenant: TenantId, block_tokens: int, block_bytes: int) -> str:
    """A tenant, its namespace and a writer's key; returns the secret."""
    admin.call(
        admin.tenants.CreateTenant,
        CreateTenantRequest(
            tenant_id=tenant, tenant=Tenant(display_name=f"Replay of {tenant}"), request_id=new_request_id()
        ),
    )
    namespace = Namespace(model_fingerprint="replay", block_tokens=block_tokens, block_bytes=block_bytes)
    admin.call(
        admin.namespaces.CreateNamespace,
        CreateNamespaceRequest(
            parent=tenant_name(tenant), namespace_id=NAMESPACE, namespace=namespace, request_id=new_request_id()
        ),
    )
    request = CreateApiKeyRequest(
        parent=tenant_name(tenant),
        api_key_id="replay",
        api_key=ApiKey(role=ROLE_WRITER, display_name="A replay's clients"),
        request_id=new_request_id(),
    )
    return admin.call(admin.credentials.CreateApiKey, request).secret
