"""``python -m controlplane.bench_control``: every figure of the control plane, beside its target.

Each part runs in a private stack of its own and within its time: one that cannot be brought to an end on a machine
that is too busy is said to have failed, and the others are measured all the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import grpc

from controlplane.bench_control import audit, exchange, policy
from controlplane.bench_control.stack import bench_stack
from controlplane.bench_control.targets import judge
from controlplane.bench_control.targets import table as target_table
from saltern.errors import SalternError

_EXCHANGE_TENANTS: Final = 16
_EXCHANGES_IN_FLIGHT: Final = 64
_EXCHANGE_ROUNDS: Final = 3
_EXCHANGE_S: Final = 2.0
_AUDIT_EVENTS: Final = 50_000
_AUDIT_ROUNDS: Final = 3
_POLICY_S: Final = 120.0


@click.command()
@click.option("--tenants", type=click.IntRange(1, 100_000), default=10_000, show_default=True, help="Of the policy.")
@click.option("--nodes", "node_count", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--rounds", type=click.IntRange(2, 10_000), default=100, show_default=True, help="Quota changes, at most."
)
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(*, tenants: int, node_count: int, rounds: int, output: str) -> None:
    """Measure exchanges, changes of policy, and exports and verification of the audit trail: about four minutes."""

    def measure_exchange() -> dict[str, Any]:
        with bench_stack() as stack:
            measuring = exchange.measure(
                stack,
                tenants=_EXCHANGE_TENANTS,
                in_flight=_EXCHANGES_IN_FLIGHT,
                duration_s=_EXCHANGE_S,
                rounds=_EXCHANGE_ROUNDS,
            )
            return asyncio.run(measuring)

    def measure_policy() -> dict[str, Any]:
        with bench_stack() as stack, tempfile.TemporaryDirectory(prefix="saltern-bench-nodes-") as folder:
            measuring = policy.measure(
                stack, Path(folder), tenants=tenants, node_count=node_count, rounds=rounds, duration_s=_POLICY_S
            )
            return asyncio.run(measuring)

    def measure_audit() -> dict[str, Any]:
        with bench_stack() as stack:
            return audit.measure(stack, events=_AUDIT_EVENTS, rounds=_AUDIT_ROUNDS)

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "exchange": measure_exchange,
        "policy": measure_policy,
        "audit": measure_audit,
    }
    report: dict[str, Any] = {
        "schema": "saltern.bench.control/1",
        "cpus": os.cpu_count(),
        "load_average_1_min_before": os.getloadavg()[0],
    }
    for name, measure in parts.items():
        click.echo(f"measuring: {name}", err=True)
        report[name] = _outcome(measure)
    report["load_average_1_min_after"] = os.getloadavg()[0]
    report["targets"] = judge(report)
    if output == "json":
        click.echo(json.dumps(report, indent=2))
        return
    for name, show in (("exchange", exchange.table), ("policy", policy.table), ("audit", audit.table)):
        part = report[name]
        click.echo(f"{name}: {part['failure']}" if "failure" in part else show(part))
        click.echo()
    click.echo(target_table(report["targets"]))


def _outcome(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return measure()
    except (SalternError, grpc.aio.AioRpcError, TimeoutError) as error:
        return {"failure": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
