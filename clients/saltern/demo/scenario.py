"""The demo from beginning to end: start, make two tenants, replay cold and warm, prove, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from saltern.admin.v1.credentials_pb2 import ROLE_WRITER, ApiKey, CreateApiKeyRequest
from saltern.admin.v1.namespaces_pb2 import CreateNamespaceRequest, Namespace
from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin.v1.tenants_pb2 import CreateTenantRequest, Tenant
from saltern.admin_client import AdminClient, new_request_id, read_api_key
from saltern.auth.v1.auth_pb2 import AUDIENCE_CONTROL
from saltern.client import Client
from saltern.credentials import Grant
from saltern.demo import proofs
from saltern.demo.plan import Plan, TenantPlan
from saltern.demo.replay import CALL_DEADLINE_MS, replay
from saltern.demo.report import Report, TenantReport
from saltern.demo.stack import Stack, running_stack
from saltern.demo.usage_watch import UsageWatch
from saltern.exchange import exchange_api_key
from saltern.names import NamespaceId, TenantId, namespace_name, quota_name, tenant_name
from saltern.traces import BLOCK_TOKENS

#: Short, so that a token that was good at the start is past its time at the end, and the SDK renews in between.
TOKEN_LIFETIME_S: Final = 15
_MODEL: Final = "demo-model@1/bf16/layout-1"
_EXCHANGE_TIMEOUT_MS: Final = 10_000
#: Entries of the neighbour that are counted before and after the flood.
_COUNTED_BLOCKS: Final = 20_000


class Progress(Protocol):
    """Where the demo says how far it is."""

    def say(self, text: str) -> None:
        """A step begins."""

    def start_pass(self, title: str, requests: int) -> Callable[[], None]:
        """A pass over ``requests`` requests begins; the answer is called after each of them."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A tenant with a client, and the grant that it had when the demo began."""

    plan: TenantPlan
    secret: str
    client: Client
    first_grant: Grant

    def exchange(self, control: str, namespace: str) -> Grant:
        return exchange_api_key(control, self.secret, NamespaceId(namespace), timeout_ms=_EXCHANGE_TIMEOUT_MS)


def run_demo(plan: Plan, progress: Progress) -> Report:
    """Run the whole demo on a private stack that is gone afterwards.

    Raises:
        SalternError: the stack did not start, or the control plane refused a step.
    """
    started_s = time.monotonic()
    progress.say("starting a private stack: Postgres, control plane, one node")
    environment = {"SALTERN_TOKEN_LIFETIME_S": str(TOKEN_LIFETIME_S)}
    with ExitStack() as resources:
        stack = resources.enter_context(running_stack(dram_bytes=plan.dram_bytes, environment=environment))
        admin = resources.enter_context(AdminClient(stack.control, read_api_key(stack.admin_api_key_file)))
        progress.say(f"making the tenants {' and '.join(tenant.tenant for tenant in plan.tenants)}")
        members = [_join(resources, stack, admin, plan, tenant) for tenant in plan.tenants]
        clients = {member.plan.tenant: member.client for member in members}
        with UsageWatch(admin, clients) as watch:
            cold = replay(plan, clients, progress.start_pass("cold", len(plan.order)))
            warm = replay(plan, clients, progress.start_pass("warm", len(plan.order)))
            usages = watch.wait_for_reports_after(time.time())
            progress.say("proving what must be refused")
            hits, refused, shown = _prove(stack, admin, plan, members)
            watch.wait_for_reports_after(time.time())
        within = all(watch.watched[t.tenant].used_bytes_max <= t.limit_bytes for t in plan.tenants)
        used = ", ".join(
            f"{t.tenant} {watch.watched[t.tenant].used_bytes_max:,} of {t.limit_bytes:,}" for t in plan.tenants
        )
        shown.append(proofs.Proof("the limit in every usage report", f"most bytes used: {used}", within))
        tenants = tuple(
            TenantReport(
                plan=tenant,
                cold=cold[tenant.tenant],
                warm=warm[tenant.tenant],
                usage=usages[tenant.tenant],
                used_bytes_max=watch.watched[tenant.tenant].used_bytes_max,
                usage_reports=watch.watched[tenant.tenant].reports,
            )
            for tenant in plan.tenants
        )
        transport = members[0].client.transport
        progress.say("stopping the stack")
    return Report(plan, tenants, hits, refused, tuple(shown), transport, time.monotonic() - started_s)


def _join(resources: ExitStack, stack: Stack, admin: AdminClient, plan: Plan, tenant: TenantPlan) -> _Member:
    """Make a tenant with quota, namespace and a writer's key, and open a client as it."""
    tenant_id, namespace_id = TenantId(tenant.tenant), NamespaceId(tenant.namespace)
    admin.call(
        admin.tenants.CreateTenant,
        CreateTenantRequest(
            tenant_id=tenant_id,
            tenant=Tenant(display_name=f"Demo tenant {tenant_id}"),
            request_id=new_request_id(),
        ),
    )
    tier = TierQuota(tier=TIER_DRAM, limit_bytes=tenant.limit_bytes, reserved_bytes=tenant.reserved_bytes)
    admin.call(
        admin.quotas.UpdateQuota,
        UpdateQuotaRequest(quota=Quota(name=quota_name(tenant_id), tiers=[tier]), request_id=new_request_id()),
    )
    admin.call(
        admin.namespaces.CreateNamespace,
        CreateNamespaceRequest(
            parent=tenant_name(tenant_id),
            namespace_id=namespace_id,
            namespace=Namespace(
                name=namespace_name(tenant_id, namespace_id),
                model_fingerprint=_MODEL,
                block_tokens=BLOCK_TOKENS,
                block_bytes=plan.block_bytes,
            ),
            request_id=new_request_id(),
        ),
    )
    created = admin.call(
        admin.credentials.CreateApiKey,
        CreateApiKeyRequest(
            parent=tenant_name(tenant_id),
            api_key_id="replay",
            api_key=ApiKey(role=ROLE_WRITER, display_name="The demo's replay"),
            request_id=new_request_id(),
        ),
    )
    client = resources.enter_context(
        Client(control=stack.control, api_key=created.secret, namespace=tenant.namespace, deadline_ms=CALL_DEADLINE_MS)
    )
    grant = exchange_api_key(stack.control, created.secret, namespace_id, timeout_ms=_EXCHANGE_TIMEOUT_MS)
    return _Member(tenant, created.secret, client, grant)


def _prove(
    stack: Stack, admin: AdminClient, plan: Plan, members: list[_Member]
) -> tuple[int, dict[str, bool], list[proofs.Proof]]:
    """Run the proofs: hits across tenants, verdicts on what must be refused, and all of them in words."""
    alpha, beta = members
    alpha_ids, beta_ids = (
        {block for request in member.plan.requests for block in request.block_ids} for member in members
    )
    grant = beta.exchange(stack.control, beta.plan.namespace)
    control_token = admin.exchange(AUDIENCE_CONTROL).access_token
    hits, cross = proofs.foreign_reads(
        alpha.client, beta.client, grant, stack.wire_endpoint, sorted(alpha_ids - beta_ids)
    )
    forged = proofs.forged_tokens(stack, grant, alpha.plan.tenant, control_token)
    namespace = proofs.foreign_namespace(
        stack, grant, alpha.plan.namespace, lambda wanted: beta.exchange(stack.control, wanted)
    )
    limit = proofs.put_past_limit(
        beta.client,
        beta.plan.limit_bytes,
        plan.block_bytes,
        neighbour=alpha.client,
        ids=sorted(alpha_ids)[:_COUNTED_BLOCKS],
    )
    oversized = proofs.oversized_put(beta.client, plan.block_bytes)
    fresh = beta.exchange(stack.control, beta.plan.namespace)
    expired = proofs.expired_token(stack, beta.first_grant, fresh)
    refused = {
        "forged_token": forged.holds,
        "expired_token": expired.holds,
        "other_tenant_namespace": namespace.holds,
    }
    return hits, refused, [cross, forged, expired, namespace, limit, oversized]
