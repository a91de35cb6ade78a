"""Records of hours and days: read from the control plane, as a table, as CSV or as JSON, with prices or without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from saltern.cli.failure import say
from saltern.cli.render import Table, message_dict, ratio_text
from saltern.cli.settings import Settings
from saltern.hit_rate import wanted_in
from saltern.names import TenantId, tenant_name
from saltern.sizes import format_size

if TYPE_CHECKING:
    from saltern.admin.v1.usage_pb2 import UsageRecord
    from saltern.admin_client import AdminClient
    from saltern.billing.prices import Prices

_GIB_HOUR: Final = 2**30 * 3600
_DAY: Final = timedelta(days=1)
_FROM_BY_DEFAULT: Final = {"hour": timedelta(hours=23), "day": timedelta(days=30)}
_HOURS_SHOWN: Final = 24


@dataclass(frozen=True, slots=True)
class Asked:
    """Which records: of one tenant or of all, by hour or day, from ``begin`` to before ``end``."""

    tenant: TenantId | None
    by: str
    begin: datetime | None
    end: datetime | None
    by_namespace: bool = False
    closed_only: bool = False


def read_records(admin: AdminClient, asked: Asked) -> Iterator[UsageRecord]:
    """The records, by time, then by tenant."""
    from saltern.admin.v1.usage_pb2 import ExportUsageRecordsRequest, ListUsageRecordsRequest

    granularity = (
        ListUsageRecordsRequest.GRANULARITY_DAY if asked.by == "day" else ListUsageRecordsRequest.GRANULARITY_HOUR
    )
    begin = asked.begin or datetime.now(UTC) - _FROM_BY_DEFAULT[asked.by]
    if asked.tenant is None:
        export = ExportUsageRecordsRequest(
            granularity=granularity, by_namespace=asked.by_namespace, closed_only=asked.closed_only
        )
        _set_times(export, begin, asked.end)
        for answer in admin.stream(admin.usage.ExportUsageRecords, export):
            yield from answer.usage_records
        return
    request = ListUsageRecordsRequest(
        parent=tenant_name(asked.tenant), granularity=granularity, by_namespace=asked.by_namespace
    )
    _set_times(request, begin, asked.end)
    for record in admin.iterate(admin.usage.ListUsageRecords, request, "usage_records"):
        if not (asked.closed_only and record.is_open):
            yield record


def last_day(admin: AdminClient, tenant: TenantId) -> list[UsageRecord | None]:
    """The last 24 hours of a tenant, the present one last; None for one without a record."""
    present_s = int(datetime.now(UTC).timestamp()) // 3600 * 3600
    found = {record.start_time.seconds: record for record in read_records(admin, Asked(tenant, "hour", None, None))}
    return [found.get(present_s - 3600 * ago) for ago in reversed(range(_HOURS_SHOWN))]


def print_records(settings: Settings, admin: AdminClient, asked: Asked, prices_path: Path | None) -> None:
    """Print the records as ``--output`` says, with what they cost where there is a price file."""
    from saltern.billing.prices import read_prices

    prices = None if prices_path is None else read_prices(prices_path)
    records = read_records(admin, asked)
    if settings.json:
        _print_json(records, prices)
    elif settings.output == "csv":
        _print_csv(records, prices)
    else:
        _print_table(settings, list(records), asked, prices)


def _print_csv(records: Iterator[UsageRecord], prices: Prices | None) -> None:
    from saltern.billing.columns import COLUMNS, csv_head, csv_line, to_row
    from saltern.billing.prices import COST_COLUMNS

    say(csv_head((*COLUMNS, *(COST_COLUMNS if prices else ()))), nl=False)
    for record in records:
        costs = prices.columns(record) if prices else {}
        say(csv_line({**to_row(record), **costs}), nl=False)


def _print_json(records: Iterator[UsageRecord], prices: Prices | None) -> None:
    """As they come: a year of every tenant need not fit into memory."""
    say('{"usageRecords": [', nl=False)
    separator = ""
    for record in records:
        shown = message_dict(record)
        if prices:
            shown["costs"] = _camel(prices.columns(record))
        say(f"{separator}\n{json.dumps(shown)}", nl=False)
        separator = ","
    say("\n]}")


def _print_table(settings: Settings, records: list[UsageRecord], asked: Asked, prices: Prices | None) -> None:
    numbers = ("DRAM GiB-h", "SSD GiB-h", "HIT RATE", "TOKENS SAVED", "READ", "STORED", "REFUSED", "EVICTED")
    costs = ("COST", "SAVED") if prices else ()
    names = (("TENANT",) if asked.tenant is None else ()) + (("NAMESPACE",) if asked.by_namespace else ())
    table = Table("DAY" if asked.by == "day" else "HOUR", *names, *numbers, *costs, "STATE", right=(*numbers, *costs))
    for record in records:
        cells: list[object] = [_start(record, asked.by)]
        if asked.tenant is None:
            cells.append(record.tenant.removeprefix("tenants/"))
        if asked.by_namespace:
            cells.append(record.namespace_id)
        cells += [
            gib_hours(record.dram_byte_seconds),
            gib_hours(record.ssd_byte_seconds),
            "-" if record.namespace_id else ratio_text(record.hits, wanted_in([record])),
            f"{record.tokens_saved:,}",
            format_size(record.read_bytes),
            format_size(record.stored_bytes),
            record.puts_refused,
            record.evictions,
        ]
        if prices:
            found = prices.columns(record)
            cells += [_money(found["cost"], prices), _money(found["tokens_saved_value"], prices)]
        table.add(*cells, "open" if record.is_open else "closed")
    table.print(settings)


def gib_hours(byte_seconds: str) -> str:
    """Byte-seconds for people."""
    return f"{int(byte_seconds or 0) / _GIB_HOUR:,.3f}"


def _money(amount: str, prices: Prices) -> str:
    return f"{float(amount):,.4f} {prices.currency}" if amount else "-"


def _start(record: UsageRecord, by: str) -> str:
    start = datetime.fromtimestamp(record.start_time.seconds, UTC)
    return start.strftime("%Y-%m-%d" if by == "day" else "%Y-%m-%d %H:00Z")


def _camel(costs: Mapping[str, str]) -> dict[str, str]:
    """Names as those of proto JSON."""
    return {name.split("_")[0] + "".join(part.title() for part in name.split("_")[1:]): costs[name] for name in costs}


def _set_times(request: object, begin: datetime, end: datetime | None) -> None:
    request.start_time.FromDatetime(begin)  # type: ignore[attr-defined]  # both requests have it
    if end is not None:
        request.end_time.FromDatetime(end)  # type: ignore[attr-defined]
