"""One frame of ``saltern top``: from two looks at usage to rates, in an order, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from saltern.cli.failure import one_line
from saltern.cli.render import bar, enum_word, message_dict, ratio_text
from saltern.hit_rate import wanted_blocks
from saltern.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from saltern.admin.v1.usage_pb2 import Node, Usage

#: Counters of ``Usage`` whose rates are shown, and the names of those rates.
_RATES: Final = {
    "get_hits": "hitsPerS",
    "get_misses": "missesPerS",
    "get_bytes": "readBytesPerS",
    "put_bytes": "storedBytesPerS",
    "puts_stored": "putsStoredPerS",
    "puts_refused": "refusedPerS",
    "evictions": "evictedPerS",
}
#: What can be sorted by; the largest come first, names from a to z.
SORTS: Final = ("used", "hits", "read", "stored", "refused", "evicted", "tenant")
_SORT_RATES: Final = {
    "hits": "get_hits",
    "read": "get_bytes",
    "stored": "put_bytes",
    "refused": "puts_refused",
    "evicted": "evictions",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What the control plane said at ``at_s`` on the monotonic clock; ``nodes`` is None for who may not see them."""

    at_s: float
    usages: Sequence[Usage]
    nodes: Sequence[Node] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One tenant: what it holds now, and what happened per second between two looks, by the names of counters."""

    usage: Usage
    per_s: Mapping[str, float]

    @property
    def used_bytes(self) -> int:
        """On all tiers."""
        return sum(tier.used_bytes for tier in self.usage.tiers)


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown: rows in order, the nodes, and how many tenants there are besides."""

    rows: Sequence[Row]
    nodes: Sequence[Node] | None
    hidden: int = 0
    sort: str = "used"
    totals: Mapping[str, float] = field(default_factory=dict)


def make_frame(before: Look, now: Look, *, sort: str, limit: int) -> Frame:
    """Compare two looks. Counters that went back, because a node was restarted, count from 0."""
    known = {usage.tenant: usage for usage in before.usages}
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    rows = [Row(usage, _per_s(known.get(usage.tenant), usage, elapsed_s)) for usage in now.usages]
    rows.sort(key=lambda row: row.usage.tenant)
    if sort == "used":
        rows.sort(key=lambda row: row.used_bytes, reverse=True)
    elif sort != "tenant":
        rows.sort(key=lambda row: row.per_s[_SORT_RATES[sort]], reverse=True)
    totals = {name: sum(row.per_s[name] for row in rows) for name in _RATES}
    return Frame(rows[:limit], now.nodes, max(0, len(rows) - limit), sort, totals)


def to_json(frame: Frame) -> dict[str, Any]:
    """The frame for programs: usage as proto JSON with rates beside it, nodes as proto JSON."""
    tenants = [
        message_dict(row.usage) | {"rates": {name: round(row.per_s[field], 3) for field, name in _RATES.items()}}
        for row in frame.rows
    ]
    shown: dict[str, Any] = {"tenants": tenants, "hiddenTenants": frame.hidden}
    if frame.nodes is not None:
        shown["nodes"] = [message_dict(node) for node in frame.nodes]
    return shown


def to_table(frame: Frame) -> RenderableType:
    """The frame for people."""
    from rich.console import Group
    from rich.text import Text

    tables: list[RenderableType] = [_tenants_table(frame)]
    if frame.hidden:
        tables.append(Text(f"and {frame.hidden} more; --limit shows more of them"))
    if frame.nodes is not None:
        tables += [Text(""), _nodes_table(frame.nodes)]
    return Group(*tables)


def _tenants_table(frame: Frame) -> RenderableType:
    from saltern.admin.v1.quotas_pb2 import TIER_DRAM, TIER_SSD

    table = _table("TENANT", "DRAM", *_RIGHT)
    for row in frame.rows:
        tiers = {tier.tier: tier for tier in row.usage.tiers}
        dram, ssd, rate = tiers.get(TIER_DRAM), tiers.get(TIER_SSD), row.per_s
        table.add_row(
            one_line(row.usage.tenant.removeprefix("tenants/")),
            bar(dram.used_bytes, dram.limit_bytes, dram.reserved_bytes) if dram else "",
            format_size(dram.used_bytes) if dram else "-",
            format_size(dram.limit_bytes) if dram else "-",
            format_size(ssd.used_bytes) if ssd and ssd.limit_bytes else "-",
            *_rate_cells(rate),
        )
    if len(frame.rows) + frame.hidden > 1:
        used_bytes = sum(row.used_bytes for row in frame.rows)
        table.add_row("(all)", "", "" if frame.hidden else format_size(used_bytes), "", "", *_rate_cells(frame.totals))
    return table


_RIGHT: Final = ("USED", "LIMIT", "SSD", "HIT RATE", "HITS/s", "READ/s", "STORED/s", "REFUSED/s", "EVICTED/s")


def _rate_cells(per_s: Mapping[str, float]) -> tuple[str, ...]:
    hits = per_s["get_hits"]
    wanted = wanted_blocks(
        hits=hits, misses=per_s["get_misses"], stored=per_s["puts_stored"], refused=per_s["puts_refused"]
    )
    return (
        ratio_text(round(hits * 1000), round(wanted * 1000)),
        f"{hits:,.0f}",
        format_size(round(per_s["get_bytes"])),
        format_size(round(per_s["put_bytes"])),
        f"{per_s['puts_refused']:,.0f}",
        f"{per_s['evictions']:,.0f}",
    )


def _nodes_table(nodes: Sequence[Node]) -> RenderableType:
    from saltern.admin.v1.usage_pb2 import Node

    table = _table("NODE", "STATE", "ADMIN", "DRAM", "GRANTED", "POLICY")
    for node in nodes:
        table.add_row(
            one_line(node.name.removeprefix("nodes/")),
            enum_word(Node.State, node.state, "STATE_"),
            enum_word(Node.AdminState, node.admin_state, "ADMIN_STATE_"),
            format_size(node.dram_capacity_bytes),
            format_size(node.granted_bytes),
            str(node.policy_version),
        )
    return table


def _table(*headings: str) -> RichTable:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        right = heading in _RIGHT or heading in ("GRANTED", "POLICY")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table


def _per_s(before: Usage | None, now: Usage, elapsed_s: float) -> dict[str, float]:
    rates = {}
    for name in _RATES:
        count = int(getattr(now, name))
        known = 0 if before is None else int(getattr(before, name))
        increment = count - known if count >= known else count
        # A tenant that was not there at the first look: what it did before is no rate.
        rates[name] = 0.0 if before is None else increment / elapsed_s
    return rates
