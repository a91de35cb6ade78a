"""``saltern quota``: what a tenant is promised and may hold; ``saltern salt``: how its blocks are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.parameters import SIZE, TENANT, TEXT
from saltern.cli.render import Table, enum_word, local_time, message_dict, print_json, print_message
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.names import TenantId, quota_name, salt_policy_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.quotas_pb2 import Quota

_WEIGHT_MAX = 1000


@click.group(cls=Group)
def quota() -> None:
    """Show and set quotas."""


@quota.command("get")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def get(ctx: click.Context, tenant_id: TenantId) -> None:
    """Show a tenant's quota."""
    from saltern.admin.v1.quotas_pb2 import GetQuotaRequest

    admin = connect(ctx)
    _print(ctx, admin.call(admin.quotas.GetQuota, GetQuotaRequest(name=quota_name(tenant_id))))


@quota.command("set")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.option("--dram-limit", type=SIZE, help="Never passed, e.g. 256MiB (I4).")
@click.option("--dram-reserved", type=SIZE, help="Taken by no other tenant (I5); at most the limit.")
@click.option("--ssd-limit", type=SIZE, help="The same for the nodes' SSD tier; 0 there by default.")
@click.option("--ssd-reserved", type=SIZE, help="The same for the nodes' SSD tier.")
@click.option(
    "--weight",
    type=click.IntRange(1, _WEIGHT_MAX),
    help="Claim to what is not reserved, on both tiers; 100 by default.",
)
@click.option("--allow-below-use", is_flag=True, help="Accept a limit below what is held now; nodes evict down to it.")
@click.option("--etag", type=TEXT, default="", help="Refuse unless the quota still has this etag.")
@click.pass_context
def set_quota(
    ctx: click.Context,
    *,
    tenant_id: TenantId,
    dram_limit: int | None,
    dram_reserved: int | None,
    ssd_limit: int | None,
    ssd_reserved: int | None,
    weight: int | None,
    allow_below_use: bool,
    etag: str,
) -> None:
    """Set a tenant's quota. What is not given keeps its value."""
    from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD, GetQuotaRequest, Quota, TierQuota, UpdateQuotaRequest
    from saltern.admin_client import new_request_id

    wanted = {TIER_DRAM: (dram_limit, dram_reserved, weight), TIER_SSD: (ssd_limit, ssd_reserved, weight)}
    wanted = {tier: values for tier, values in wanted.items() if values != (None, None, None)}
    if not wanted:
        raise click.UsageError("nothing to set: give a limit, a reservation or --weight")
    admin = connect(ctx)
    name = quota_name(tenant_id)
    current = admin.call(admin.quotas.GetQuota, GetQuotaRequest(name=name))
    held = {tier.tier: tier for tier in current.tiers}
    tiers = []
    for tier, (limit_bytes, reserved_bytes, tier_weight) in wanted.items():
        before = held.get(tier, TierQuota(tier=tier))
        tiers.append(
            TierQuota(
                tier=tier,
                limit_bytes=before.limit_bytes if limit_bytes is None else limit_bytes,
                reserved_bytes=before.reserved_bytes if reserved_bytes is None else reserved_bytes,
                weight=before.weight if tier_weight is None else tier_weight,
            )
        )
    # Values were taken over from what was read: its etag guards them against a change in between.
    changed = Quota(name=name, tiers=tiers, etag=etag or current.etag)
    request = UpdateQuotaRequest(quota=changed, allow_below_use=allow_below_use, request_id=new_request_id())
    _print(ctx, admin.call(admin.quotas.UpdateQuota, request))


def _print(ctx: click.Context, item: Quota) -> None:
    from saltern.admin.v1.quotas_pb2 import Tier

    settings = settings_of(ctx)
    if settings.json:
        print_json(message_dict(item))
        return
    table = Table("TIER", "RESERVED", "LIMIT", "WEIGHT", right=("RESERVED", "LIMIT", "WEIGHT"))
    for tier in item.tiers:
        table.add(
            enum_word(Tier, tier.tier, "TIER_"),
            format_size(tier.reserved_bytes),
            format_size(tier.limit_bytes),
            tier.weight,
        )
    table.print(settings)


@click.group(cls=Group)
def salt() -> None:
    """Show salt policies."""


@salt.command("show")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def show(ctx: click.Context, tenant_id: TenantId) -> None:
    """Show how a tenant's blocks are named: scope and epoch, never the salt itself."""
    from saltern.admin.v1.salt_policies_pb2 import GetSaltPolicyRequest

    admin = connect(ctx)
    policy = admin.call(admin.salt_policies.GetSaltPolicy, GetSaltPolicyRequest(name=salt_policy_name(tenant_id)))
    rows = [
        ("tenant", tenant_id),
        ("scope", enum_word(policy.Scope, policy.scope, "SCOPE_")),
        ("epoch", policy.epoch),
        ("updated", local_time(policy.update_time)),
    ]
    print_message(settings_of(ctx), policy, rows)
