"""Dashboards about tenants: one of them, and all beside each other."""

from __future__ import annotations

from panels import Dashboard, Panel, by

_TENANT = '{tenant="$tenant"}'
TENANT = Dashboard(
    "saltern-tenant",
    "Saltern: one tenant",
    "What one tenant holds, gets and is refused. Tenants beyond --metrics-tenants-max of a node are in _other.",
    (
        Panel(
            "Hit rate",
            (('tenant:saltern_node_get_hit_ratio:rate5m{tenant="$tenant"}', ""),),
            "Keys found of those asked for.",
            "percentunit",
            "stat",
            6,
            4,
        ),
        Panel(
            "Of its limit",
            (('tenant:saltern_node_used_ratio:max{tenant="$tenant"}', "{{tier}}"),),
            "On its fullest node. At 100% its puts evict its own entries.",
            "percentunit",
            "stat",
            6,
            4,
        ),
        Panel(
            "Entries",
            ((f"sum by (tier) (saltern_node_entries{_TENANT})", "{{tier}}"),),
            "That can be read.",
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Sessions",
            ((f"sum(saltern_node_tenant_sessions{_TENANT})", ""),),
            "At 256 on a node new ones are refused.",
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "DRAM: use, limit, reservation",
            (
                ('sum(saltern_node_used_bytes{tenant="$tenant",tier="dram"})', "used"),
                ('sum(saltern_node_limit_bytes{tenant="$tenant",tier="dram"})', "limit"),
                ('sum(saltern_node_reserved_bytes{tenant="$tenant",tier="dram"})', "reserved"),
            ),
            "Use between reservation and limit is borrowed: others may take it back.",
            "bytes",
        ),
        Panel(
            "SSD: use, limit, reservation",
            (
                ('sum(saltern_node_used_bytes{tenant="$tenant",tier="ssd"})', "used"),
                ('sum(saltern_node_limit_bytes{tenant="$tenant",tier="ssd"})', "limit"),
                ('sum(saltern_node_reserved_bytes{tenant="$tenant",tier="ssd"})', "reserved"),
            ),
            "Bytes of files, dead ones included until they are reclaimed.",
            "bytes",
        ),
        Panel(
            "Hits and misses",
            (
                (f"sum(rate(saltern_node_get_hits_total{_TENANT}[$__rate_interval]))", "hits"),
                (f"sum(rate(saltern_node_peer_hits_total{_TENANT}[$__rate_interval]))", "of those, from peers"),
                (f"sum(rate(saltern_node_get_misses_total{_TENANT}[$__rate_interval]))", "misses"),
            ),
            "Misses that rise against hits: evictions, a rotated salt, or new prompts.",
            "reqps",
        ),
        Panel(
            "Evictions by cause",
            ((by("saltern_node_evicted_bytes_total", "cause", of=_TENANT), "{{cause}}"),),
            "own-limit: raise the limit. neighbour: reserve more. quota: a limit was lowered.",
            "Bps",
            stacked=True,
        ),
        Panel(
            "Puts refused",
            ((by("saltern_node_puts_refused_total", "reason", of=_TENANT), "{{reason}}"),),
            "QUOTA_EXCEEDED: raise the limit. NODE_FULL: add memory. ENTRY_TOO_LARGE: wrong block size.",
            "reqps",
        ),
        Panel(
            "Mean time of a request",
            (
                (
                    f"{by('saltern_node_tenant_request_seconds_total', 'operation', of=_TENANT)}"
                    f" / {by('saltern_node_tenant_requests_total', 'operation', of=_TENANT)}",
                    "{{operation}}",
                ),
            ),
            "The tenant's own pace is in it.",
            "s",
        ),
        Panel(
            "Rates",
            (
                (f"sum(rate(saltern_node_rate_delayed_requests_total{_TENANT}[$__rate_interval]))", "delayed"),
                (f"sum(rate(saltern_node_rate_refused_requests_total{_TENANT}[$__rate_interval]))", "refused"),
                (f"sum(saltern_node_waiting_requests{_TENANT})", "waiting now"),
            ),
            "Refused: far above its rates (quota set --operations-per-s, --bytes-per-s).",
            "short",
        ),
        Panel(
            "Bytes served",
            ((f"sum(rate(saltern_node_served_bytes_total{_TENANT}[$__rate_interval]))", "served"),),
            "Entries moved to and from its clients.",
            "Bps",
        ),
    ),
    (("tenant", "label_values(saltern_node_limit_bytes, tenant)"),),
)


_NEIGHBOUR = '{cause="neighbour"}'
FAIRNESS = Dashboard(
    "saltern-fairness",
    "Saltern: fairness",
    "Who evicts whom, who lives on what others lend, and who waits for whom.",
    (
        Panel(
            "Who evicts whom",
            (("topk(20, sum by (tenant, by) (increase(saltern_node_displaced_bytes_total[$__range])))", ""),),
            "Bytes of a tenant's entries (tenant) that puts of another (by) displaced, in the time shown. Of each node "
            "the 200 pairs to which it happened last. What is reserved is never among them (I5).",
            "bytes",
            "table",
            height=10,
        ),
        Panel(
            "Pairs over time",
            (
                (
                    "topk(10, sum by (tenant, by) (rate(saltern_node_displaced_bytes_total[$__rate_interval])))",
                    "{{by}} takes from {{tenant}}",
                ),
            ),
            "Steady: whoever loses needs a reservation. A burst: somebody's batch.",
            "Bps",
            height=10,
        ),
        Panel(
            "Who takes",
            ((f"topk(10, {by('saltern_node_taken_bytes_total', 'tenant')})", "{{tenant}}"),),
            "Lengths of the entries of others that a tenant's puts evicted: exact for every tenant with a label.",
            "Bps",
        ),
        Panel(
            "Who loses",
            (
                (
                    f"topk(10, {by('saltern_node_evicted_bytes_total', 'tenant', of=_NEIGHBOUR)})",
                    "{{tenant}}",
                ),
            ),
            "Entries lost to others while their owner was above what is protected of its reservation.",
            "Bps",
        ),
        Panel(
            "Borrowed",
            (('topk(10, sum by (tenant) (saltern_node_borrowed_bytes{tier="dram"}))', "{{tenant}}"),),
            "Used beyond the reservation. It is taken back when its owner needs it.",
            "bytes",
            stacked=True,
        ),
        Panel(
            "Lent",
            (('topk(10, sum by (tenant) (saltern_node_lent_bytes{tier="dram"}))', "{{tenant}}"),),
            "Reserved and not used. High for weeks: the reservation is larger than the need.",
            "bytes",
            stacked=True,
        ),
        Panel(
            "Protected of what is reserved",
            (
                (
                    "sum by (tenant) (saltern_node_protected_bytes)"
                    ' / (sum by (tenant) (saltern_node_reserved_bytes{tier="dram"}) > 0)',
                    "{{tenant}}",
                ),
            ),
            "Below 1 only under --reservations earning: what earns no hits is lent.",
            "percentunit",
        ),
        Panel(
            "Share of the nodes' time",
            (
                (
                    f"topk(10, {by('saltern_node_tenant_request_seconds_total', 'tenant')})",
                    "{{tenant}}",
                ),
            ),
            "Seconds that requests took, in each second, their clients' pace included. Turns are given by weight.",
            "short",
            stacked=True,
        ),
        Panel(
            "Waiting",
            (("topk(10, sum by (tenant) (saltern_node_waiting_requests))", "{{tenant}}"),),
            "Requests that wait for their own tenant's rates or transfers; other tenants do not wait for them.",
        ),
        Panel(
            "Refused although within quota",
            ((by("saltern_node_puts_refused_total", "tenant", of='{reason="NODE_FULL"}'), "{{tenant}}"),),
            "Reservations of others are in use: add memory, or reserve less.",
            "reqps",
        ),
    ),
)
