"""``saltern usage``: what tenants hold, what the cache did for them, and what they used in each hour or day."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from saltern.cli.parameters import TENANT
from saltern.cli.render import message_dict, print_json
from saltern.cli.settings import OUTPUT_JSON, OUTPUT_TABLE, Command, GlobalOption, global_options, settings_of
from saltern.cli.stack import connect
from saltern.cli.times import TIME
from saltern.cli.usage_tables import print_day, print_reasons, print_usages
from saltern.names import TenantId, tenant_name

if TYPE_CHECKING:
    from saltern.admin.v1.usage_pb2 import Usage
    from saltern.admin_client import AdminClient

OUTPUT_CSV: Final = "csv"


class _UsageCommand(Command):
    """Its --output may be csv too."""

    def __init__(self, name: str | None = None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        (output,) = (option for option in global_options() if option.name == "output")
        output.type = click.Choice([OUTPUT_TABLE, OUTPUT_JSON, OUTPUT_CSV])
        output.help = "Tables for people, proto JSON for programs, CSV for billing."
        self.params = [
            output if isinstance(option, GlobalOption) and option.name == "output" else option for option in self.params
        ]


@click.command("usage", cls=_UsageCommand)
@click.argument("tenant_id", metavar="[TENANT]", type=TENANT, required=False)
@click.option("--by", type=click.Choice(["hour", "day"]), help="Records of what was used in each hour, or day (UTC).")
@click.option("--from", "begin", type=TIME, help="First hour or day. [default: 24 hours or 31 days ago]")
@click.option("--to", "end", type=TIME, help="The hour or day after the last one. [default: the present one]")
@click.option("--by-namespace", is_flag=True, help="Records of namespaces instead of whole tenants.")
@click.option("--closed", is_flag=True, help="Only records that will never change any more.")
@click.option(
    "--prices", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Add what it costs, by a price file (docs/metering.md).",
)  # fmt: skip
@click.pass_context
def usage(
    ctx: click.Context, *, tenant_id: TenantId | None, by: str | None, begin: datetime | None, end: datetime | None,
    by_namespace: bool, closed: bool, prices: Path | None,
) -> None:  # fmt: skip
    """Show usage against quota, hit rate, tokens saved, bytes moved, refusals, and evictions by whom.

    Of TENANT, or the key's own one, with the last 24 hours, the causes of evictions, the reasons of refusals and what
    SSD did; without it of every tenant (platform-admin). The tick in the bar is the reservation; what of it is not used
    is lent, what is used past it is borrowed. Counts are since each node started.

    With --by, --from, --to or --output csv: records of hours or days, for billing. They are exact over restarts of
    nodes and of the control plane, and closed ones never change.

    \b
    saltern usage acme
    saltern usage acme --by day --from 2026-11-01
    saltern usage --by hour --from 2026-11-01 --to 2026-12-01 --closed --prices prices.json -o csv > november.csv
    """
    admin, settings = connect(ctx), settings_of(ctx)
    own = tenant_id or (TenantId(admin.tenant_id) if admin.tenant_id else None)
    if by or begin or end or by_namespace or closed or prices or settings.output == OUTPUT_CSV:
        from saltern.cli.usage_records import Asked, print_records

        asked = Asked(own, by or "hour", begin, end, by_namespace=by_namespace, closed_only=closed)
        print_records(settings, admin, asked, prices)
        return
    usages = _usages(admin, own)
    if settings.json:
        print_json(message_dict(usages[0]) if tenant_id else {"usages": [message_dict(item) for item in usages]})
        return
    print_usages(settings, usages)
    if own:
        from saltern.cli.usage_records import last_day

        print_day(last_day(admin, own))
        print_reasons(settings, usages[0])


def _usages(admin: AdminClient, tenant: TenantId | None) -> list[Usage]:
    from saltern.admin.v1.usage_pb2 import GetUsageRequest, ListUsagesRequest

    if tenant is None:
        return list(admin.iterate(admin.usage.ListUsages, ListUsagesRequest(), "usages"))
    return [admin.call(admin.usage.GetUsage, GetUsageRequest(tenant=tenant_name(tenant)))]
