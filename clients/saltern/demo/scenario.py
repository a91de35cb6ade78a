"""The demo from beginning to end: start, make two tenants, replay cold and warm, prove, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Protocol

from saltern.admin_client import AdminClient, read_api_key
from saltern.auth.v1.auth_pb2 import AUDIENCE_CONTROL
from saltern.client import Client
from saltern.demo import proofs
from saltern.demo.member import Member
from saltern.demo.plan import Plan
from saltern.demo.replay import replay
from saltern.demo.report import Report, TenantReport
from saltern.demo.stack import Stack, running_stack
from saltern.demo.usage_watch import UsageWatch

#: Short, so that a token that was good at the start is past its time at the end, and the SDK renews in between.
TOKEN_LIFETIME_S: Final = 15
#: Entries of the neighbour that are counted before and after the flood.
_COUNTED_BLOCKS: Final = 20_000


class Progress(Protocol):
    """Where the demo says how far it is."""

    def say(self, text: str) -> None:
        """A step begins."""

    def start_pass(self, title: str, requests: int) -> Callable[[], None]:
        """A pass over ``requests`` requests begins; the answer is called after each of them."""


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
        members = [
            resources.enter_context(
                Member.join(
                    admin,
                    tenant=tenant.tenant,
                    namespace=tenant.namespace,
                    limit_bytes=tenant.limit_bytes,
                    reserved_bytes=tenant.reserved_bytes,
                    block_bytes=plan.block_bytes,
                )
            )
            for tenant in plan.tenants
        ]
        clients: dict[str, Client] = {member.tenant: member.client for member in members}
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


def _prove(
    stack: Stack, admin: AdminClient, plan: Plan, members: list[Member]
) -> tuple[int, dict[str, bool], list[proofs.Proof]]:
    """Run the proofs: hits across tenants, verdicts on what must be refused, and all of them in words."""
    alpha, beta = members
    alpha_ids, beta_ids = (
        {block for request in tenant.requests for block in request.block_ids} for tenant in plan.tenants
    )
    grant = beta.exchange()
    hits, cross = proofs.foreign_reads(
        alpha.client, beta.client, grant, stack.wire_endpoint, sorted(alpha_ids - beta_ids)
    )
    control_token = admin.exchange(AUDIENCE_CONTROL).access_token
    forged = proofs.forged_tokens(stack, grant, alpha.tenant, control_token)
    namespace = proofs.foreign_namespace(stack, grant, alpha.namespace, beta.exchange)
    limit = proofs.put_past_limit(
        beta.client,
        plan.tenants[1].limit_bytes,
        plan.block_bytes,
        neighbour=alpha.client,
        ids=sorted(alpha_ids)[:_COUNTED_BLOCKS],
    )
    oversized = proofs.oversized_put(beta.client, plan.block_bytes)
    expired = proofs.expired_token(stack, beta.first_grant, beta.exchange)
    refused = {
        "forged_token": forged.holds,
        "expired_token": expired.holds,
        "other_tenant_namespace": namespace.holds,
    }
    return hits, refused, [cross, forged, expired, namespace, limit, oversized]
