"""``saltern usage``: what tenants hold and what the cache did for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from saltern.cli.parameters import TENANT
from saltern.cli.render import (
    message_dict,
    print_json,
)
from saltern.cli.settings import Command, settings_of
from saltern.cli.stack import connect
from saltern.cli.usage_tables import print_reasons, print_usages
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from saltern.admin_client import AdminClient


@click.command("usage", cls=Command)
@click.argument("tenant_id", metavar="[TENANT]", type=TENANT, required=False)
@click.pass_context
def usage(ctx: click.Context, tenant_id: TenantId | None) -> None:
    """Show usage against quota, hit rate, bytes moved, refusals, and evictions by whom.

    Of TENANT, with the causes of evictions, the reasons of refusals and what SSD did; without it of every tenant
    (platform-admin) or of the key's own. The tick in the bar is the reservation; what of it is not used is lent, what
    is used past it is borrowed. Counts are since each node started.
    """
    from saltern.admin.v1.usage_pb2 import GetUsageRequest

    admin, settings = connect(ctx), settings_of(ctx)
    names = [tenant_name(tenant_id)] if tenant_id else _visible_tenants(admin)
    usages = [admin.call(admin.usage.GetUsage, GetUsageRequest(tenant=name)) for name in names]
    if not settings.json:
        print_usages(settings, usages)
        if tenant_id:
            print_reasons(settings, usages[0])
    elif tenant_id:
        print_json(message_dict(usages[0]))
    else:
        print_json({"usages": [message_dict(item) for item in usages]})


def _visible_tenants(admin: AdminClient) -> list[str]:
    from saltern.admin.v1.tenants_pb2 import ListTenantsRequest

    if admin.tenant_id:
        return [tenant_name(TenantId(admin.tenant_id))]
    return [item.name for item in admin.iterate(admin.tenants.ListTenants, ListTenantsRequest(), "tenants")]
