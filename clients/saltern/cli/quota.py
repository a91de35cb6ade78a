"""``saltern quota``: what a tenant is promised, may hold and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from saltern.cli.failure import say
from saltern.cli.parameters import SIZE, TENANT, TEXT
from saltern.cli.render import Table, enum_word, message_dict, print_json
from saltern.cli.settings import Group, settings_of
from saltern.cli.stack import connect
from saltern.cli.waiting import wait_option
from saltern.names import TenantId, quota_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.quotas_pb2 import Quota, RateLimits, Tier, TierQuota

_WEIGHT_MAX = 1000
_RATE_MAX = 2**40


@click.group(cls=Group)
def quota() -> None:
    """Show and set quotas."""


@quota.command("get")
@click.argument("tenant_id", metavar="TENANT", type=TENANT)
@click.pass_context
def get(ctx: click.Context, tenant_id: TenantId) -> None:
    """Show a tenant's quota and rate limits."""
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
@click.option(
    "--operations-per-s",
    type=click.IntRange(0, _RATE_MAX),
    help="Entries asked for, stored or removed in a second, on all nodes together; 0 for no limit.",
)
@click.option(
    "--bytes-per-s", type=SIZE, help="Bytes of entries moved in a second, e.g. 500MiB, on all nodes; 0 for no limit."
)
@click.option(
    "--ssd-write-bytes-per-s",
    type=SIZE,
    help="Bytes written to SSD in a second, on all nodes; 0 leaves each node its own --ssd-write-bytes.",
)
@click.option("--allow-below-use", is_flag=True, help="Accept a limit below what is held now; nodes evict down to it.")
@click.option("--etag", type=TEXT, default="", help="Refuse unless the quota still has this etag.")
@wait_option
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
    operations_per_s: int | None,
    bytes_per_s: int | None,
    ssd_write_bytes_per_s: int | None,
    allow_below_use: bool,
    etag: str,
) -> None:
    """Set a tenant's quota and rate limits. What is not given keeps its value.

    Each node gets a share of everything, in proportion to its capacity. A namespace lives on one node, so a tenant with
    a single namespace meets that node's share.
    """
    from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD, GetQuotaRequest, Quota, UpdateQuotaRequest
    from saltern.admin_client import new_request_id

    wanted = {TIER_DRAM: (dram_limit, dram_reserved, weight), TIER_SSD: (ssd_limit, ssd_reserved, weight)}
    wanted = {tier: values for tier, values in wanted.items() if values != (None, None, None)}
    given_rates = {
        "operations_per_s": operations_per_s,
        "bytes_per_s": bytes_per_s,
        "ssd_write_bytes_per_s": ssd_write_bytes_per_s,
    }
    wanted_rates = {rate: value for rate, value in given_rates.items() if value is not None}
    if not wanted and not wanted_rates:
        raise click.UsageError("nothing to set: give a limit, a reservation, --weight or a rate")
    admin = connect(ctx)
    name = quota_name(tenant_id)
    current = admin.call(admin.quotas.GetQuota, GetQuotaRequest(name=name))
    # Values are taken over from what was read: its etag guards them against a change in between.
    changed = Quota(
        name=name,
        tiers=_changed_tiers(current, wanted),
        rates=_changed_rates(current, wanted_rates),
        etag=etag or current.etag,
    )
    request = UpdateQuotaRequest(quota=changed, allow_below_use=allow_below_use, request_id=new_request_id())
    _print(ctx, admin.call(admin.quotas.UpdateQuota, request))


def _changed_tiers(
    current: Quota, wanted: Mapping[Tier.ValueType, tuple[int | None, int | None, int | None]]
) -> list[TierQuota]:
    """The tiers of ``wanted`` (limit, reservation, weight), with what is None there as it is now."""
    from saltern.admin.v1.quotas_pb2 import TierQuota

    held = {tier.tier: tier for tier in current.tiers}
    tiers = []
    for tier, (limit_bytes, reserved_bytes, weight) in wanted.items():
        before = held.get(tier, TierQuota(tier=tier))
        tiers.append(
            TierQuota(
                tier=tier,
                limit_bytes=before.limit_bytes if limit_bytes is None else limit_bytes,
                reserved_bytes=before.reserved_bytes if reserved_bytes is None else reserved_bytes,
                weight=before.weight if weight is None else weight,
            )
        )
    return tiers


def _changed_rates(current: Quota, wanted: Mapping[str, int]) -> RateLimits | None:
    """The rates as they are now with those of ``wanted``; None, which keeps all of them, if there are none."""
    from saltern.admin.v1.quotas_pb2 import RateLimits

    if not wanted:
        return None
    changed = RateLimits()
    changed.CopyFrom(current.rates)
    for rate, value in wanted.items():
        setattr(changed, rate, value)
    return changed


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
    rates = item.rates
    limits = Table("RATE", "LIMIT", right=("LIMIT",))
    limits.add("operations", f"{rates.operations_per_s}/s" if rates.operations_per_s else "none")
    limits.add("bytes", f"{format_size(rates.bytes_per_s)}/s" if rates.bytes_per_s else "none")
    written = rates.ssd_write_bytes_per_s
    limits.add("SSD writes", f"{format_size(written)}/s" if written else "each node's own")
    say()
    limits.print(settings)
