"""Dashboards for whoever runs the deployment: the fleet, its objectives, its tiers."""

from __future__ import annotations

from panels import Dashboard, Panel, by, quantile

HIT_RATIO = "sum(rate(saltern_node_get_hits_total[5m])) / sum(tenant:saltern_node_wanted_blocks:rate5m)"

FLEET = Dashboard(
    "saltern-fleet",
    "Saltern: fleet",
    "Whether everything is there and well, and what it does. First look of whoever is on call.",
    (
        Panel(
            "Control planes",
            (('sum(saltern_control_health_state{state=~"ready|degraded"})', "take calls"),),
            "Control planes that are ready or degraded; both take calls. Below two: no more may go.",
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Nodes",
            (("max by (state) (saltern_control_nodes)", "{{state}}"),),
            "Registered nodes. Lost: has not reported for six seconds.",
            kind="stat",
            width=5,
            height=4,
        ),
        Panel(
            "Not quite well",
            (
                ('sum(saltern_node_health_state{state="degraded"})', "nodes"),
                ('sum(saltern_control_health_state{state="degraded"})', "control planes"),
            ),
            "Degraded: they serve, and their /readyz says what is amiss.",
            kind="stat",
            width=5,
            height=4,
            high=1,
        ),
        Panel("Hit rate", ((HIT_RATIO, ""),), "Keys found of those asked for.", "percentunit", "stat", 5, 4),
        Panel(
            "Nodes behind the policy",
            (("max(saltern_control_nodes_behind)", ""),),
            "Stays above 0: a change is not in force everywhere; see the policy panel.",
            kind="stat",
            width=5,
            height=4,
            high=1,
        ),
        Panel(
            "Keys asked for",
            (
                ("sum(rate(saltern_node_get_hits_total[$__rate_interval]))", "hits"),
                ("sum(rate(saltern_node_get_misses_total[$__rate_interval]))", "misses"),
            ),
            "Traffic of all tenants.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Bytes moved",
            (
                ("sum(rate(saltern_node_get_bytes_total[$__rate_interval]))", "read"),
                ("sum(rate(saltern_node_put_bytes_total[$__rate_interval]))", "stored"),
            ),
            "Lengths of hits and of entries stored.",
            "Bps",
        ),
        Panel(
            "Requests of nodes, p99",
            ((quantile(0.99, "saltern_node_request_duration_seconds", "operation"), "{{operation}}"),),
            "From a request's header to its last byte handed to the kernel; a slow client is in it.",
            "s",
        ),
        Panel(
            "Event loops, p99 of being late",
            ((quantile(0.99, "saltern_node_event_loop_lag_seconds", "instance"), "{{instance}}"),),
            "Above 10 ms all requests of the node wait: look for other programs on its CPU.",
            "s",
            high=0.01,
        ),
        Panel(
            "Calls of the control plane",
            ((by("saltern_control_requests_total", "code"), "{{code}}"),),
            "INTERNAL and UNKNOWN are faults of ours; UNAUTHENTICATED are wrong keys.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Calls of the control plane, p99",
            ((quantile(0.99, "saltern_control_request_duration_seconds", "method"), "{{method}}"),),
            "Slow everywhere: the database.",
            "s",
        ),
        Panel(
            "Policy versions behind",
            (("max by (node) (saltern_control_node_policy_lag)", "{{node}}"),),
            "A node that stays behind is slow or refuses the policy; its log says which.",
        ),
        Panel(
            "Since the last report",
            (("max by (node) (saltern_control_node_report_age_seconds)", "{{node}}"),),
            "Above 6 s: the node is frozen, cut off or gone.",
            "s",
            high=6,
        ),
        Panel(
            "Sessions",
            (("sum by (transport) (saltern_node_sessions)", "{{transport}}"),),
            "Open sessions of the wire protocol; a node has places for 1,024.",
            stacked=True,
        ),
        Panel(
            "Turned away",
            ((by("saltern_node_connections_turned_away_total", "reason"), "{{reason}}"),),
            "Connections that ended without a session. Token reasons: wrong credentials. TOO_MANY_SESSIONS: a flood.",
            "reqps",
        ),
        Panel(
            "Database",
            (
                ("min by (instance) (saltern_control_database_up)", "up at {{instance}}"),
                ("max by (instance) (saltern_control_database_connections_in_use)", "in use at {{instance}}"),
            ),
            "In use at 10 for long: the database is slow.",
        ),
        Panel(
            "Memory of processes",
            (('sum by (instance) (process_resident_memory_bytes{job=~"saltern-.*"})', "{{instance}}"),),
            "Of each process. Flat after warming up.",
            "bytes",
        ),
        Panel(
            "Console: requests",
            ((by("saltern_control_console_requests_total", "outcome"), "{{outcome}}"),),
            "Of browsers. Refused is the browser's doing, failed is ours, gone: nobody waited for the answer.",
            "reqps",
            stacked=True,
        ),
        Panel(
            "Console: slowest pages, p99",
            ((quantile(0.99, "saltern_control_console_request_duration_seconds", "pages"), "{{pages}}"),),
            "To the last byte of the answer; audit may take long, an export is one answer.",
            "s",
        ),
        Panel(
            "Console: log-ins",
            ((by("saltern_control_console_requests_total", "outcome", of='{pages="login"}'), "{{outcome}}"),),
            "Refused ones above the line for ten minutes: somebody tries credentials.",
            "reqps",
            high=0.2,
        ),
        Panel(
            "Console: sessions",
            (("max(saltern_control_console_sessions)", ""),),
            "Of the whole deployment; each ends 15 minutes after its last page.",
        ),
    ),
)


def _burn(title: str, metric: str, objective: float, what: str) -> tuple[Panel, ...]:
    windows = ("5m", "30m", "1h", "6h", "3d")
    return (
        Panel(
            f"{title}: burn rate",
            tuple((f"{metric}:ratio_rate{window} / {objective}", window) for window in windows),
            f"{what} as multiples of what the objective allows. 1: the budget lasts exactly 30 days. Paged at 14.4 "
            "over 5m and 1h, or 6 over 30m and 6h.",
            width=18,
            high=1,
        ),
        Panel(
            f"{title}: share over 3 days",
            ((f"{metric}:ratio_rate3d", ""),),
            f"The objective allows {objective:.1%}.",
            "percentunit",
            "stat",
            6,
            high=objective,
        ),
    )


SLO = Dashboard(
    "saltern-slo",
    "Saltern: objectives",
    "How fast the budgets of the two objectives burn: 99.9% of control-plane calls without a fault of ours, "
    "99% of gets within 50 ms.",
    (
        *_burn("Failed calls", "job:saltern_control_call_errors", 0.001, "Calls that ended by a fault of the service"),
        *_burn("Slow gets", "job:saltern_node_slow_gets", 0.01, "Gets that took more than 50 ms"),
        Panel(
            "Faults by method and code",
            (
                (
                    by(
                        "saltern_control_requests_total",
                        "method, code",
                        of='{code=~"INTERNAL|UNKNOWN|UNAVAILABLE|DEADLINE_EXCEEDED|DATA_LOSS"}',
                    ),
                    "{{method}} {{code}}",
                ),
            ),
            "Which calls fail. UNAVAILABLE for a moment is a control plane that drains.",
            "reqps",
        ),
        Panel(
            "Gets by transport, p50 and p99",
            (
                (
                    quantile(0.5, "saltern_node_request_duration_seconds", "transport", of='{operation="get"}'),
                    "p50 {{transport}}",
                ),
                (
                    quantile(0.99, "saltern_node_request_duration_seconds", "transport", of='{operation="get"}'),
                    "p99 {{transport}}",
                ),
            ),
            "A transport that is slower than it was: its network, or its clients.",
            "s",
        ),
        Panel(
            "Gets by node, p99",
            (
                (
                    quantile(0.99, "saltern_node_request_duration_seconds", "instance", of='{operation="get"}'),
                    "{{instance}}",
                ),
            ),
            "One node alone: its CPU, its SSD, or one tenant's chain that everybody reads.",
            "s",
            width=24,
        ),
    ),
)

TIERS = Dashboard(
    "saltern-tiers",
    "Saltern: tiers",
    "How full and how healthy DRAM and SSD of each node are.",
    (
        Panel(
            "DRAM in use",
            (("1 - saltern_node_arena_free_bytes / saltern_node_arena_bytes", "{{instance}}"),),
            "Full is normal for a cache.",
            "percentunit",
        ),
        Panel(
            "Fragmentation of free DRAM",
            (("1 - saltern_node_arena_largest_free_bytes / (saltern_node_arena_free_bytes > 0)", "{{instance}}"),),
            "Near 1 with bytes moved beside puts: blocks of very different sizes share the node.",
            "percentunit",
        ),
        Panel(
            "Bytes moved to make room",
            (("rate(saltern_node_moved_bytes_total[$__rate_interval])", "{{instance}}"),),
            "Near what is put: every large put moves as much. It costs time of the event loop.",
            "Bps",
        ),
        Panel(
            "Held by transfers",
            (("sum by (instance) (saltern_node_held_bytes)", "{{instance}}"),),
            "Cannot be evicted now. Near what is used: slow readers.",
            "bytes",
        ),
        Panel(
            "State of SSD",
            (("saltern_node_ssd_state == 1", "{{instance}} {{state}}"),),
            "Anything but ok: see /readyz and the runbook.",
            kind="table",
        ),
        Panel(
            "SSD in use",
            (
                (
                    'sum by (instance) (saltern_node_used_bytes{tier="ssd"})'
                    " / sum by (instance) (saltern_node_ssd_capacity_bytes > 0)",
                    "{{instance}}",
                ),
            ),
            "Files of all tenants against what they may have together.",
            "percentunit",
        ),
        Panel(
            "Readable share of SSD files",
            (
                (
                    "sum by (instance) (saltern_node_ssd_live_bytes)"
                    ' / (sum by (instance) (saltern_node_used_bytes{tier="ssd"}) > 0)',
                    "{{instance}}",
                ),
            ),
            "Low: much of the files is dead, and reclaim will come.",
            "percentunit",
        ),
        Panel(
            "Written to SSD",
            ((by("saltern_node_ssd_written_bytes_total", "instance"), "{{instance}}"),),
            "Wear: compare with what the device is rated for.",
            "Bps",
        ),
        Panel(
            "Read back from SSD",
            ((by("saltern_node_ssd_read_bytes_total", "instance"), "{{instance}}"),),
            "What the tier is for.",
            "Bps",
        ),
        Panel(
            "Not taken by SSD",
            ((by("saltern_node_ssd_dropped_total", "reason"), "{{reason}}"),),
            "no-staging: the device is too slow. no-room: limits. write-budget: the write rate.",
            "short",
        ),
        Panel(
            "Lost on SSD",
            (
                ("sum by (instance) (increase(saltern_node_ssd_read_failures_total[1h]))", "not readable {{instance}}"),
                ("sum by (instance) (increase(saltern_node_ssd_lost_total[1h]))", "not durable {{instance}}"),
            ),
            "Above 0: look at the device. Each was a miss, none was a wrong byte (I7).",
            "short",
        ),
        Panel(
            "Moved within SSD, of what was demoted",
            (
                (
                    f"{by('saltern_node_ssd_relocations_total', 'instance')}"
                    f" / ({by('saltern_node_ssd_demotions_total', 'instance')} > 0)",
                    "{{instance}}",
                ),
            ),
            "High: SSD is too small for what is hot.",
            "percentunit",
        ),
    ),
)
