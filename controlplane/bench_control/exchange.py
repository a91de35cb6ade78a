"""``python -m controlplane.bench_control.exchange``: token exchanges beside a bare call and a bare commit."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import asdict
from typing import Any, Final

import click
import grpc
import psycopg

from controlplane.bench_control.echo import METHOD
from controlplane.bench_control.measure import Rate, keep_in_flight, median
from controlplane.bench_control.stack import NAMESPACE, BenchStack, bench_stack, prepared_keys
from saltern.auth.v1 import auth_pb2

_COMMIT: Final = "UPDATE policy_state SET update_time = now()"
_EXCHANGE: Final = "/saltern.auth.v1.AuthService/ExchangeApiKey"


@click.command()
@click.option("--tenants", type=click.IntRange(1, 1000), default=16, show_default=True, help="Whose keys, in turn.")
@click.option("--in-flight", type=click.IntRange(1, 128), default=64, show_default=True, help="Calls at a time.")
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0, show_default=True, help="Of each measurement.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="In turns; the median counts.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(*, tenants: int, in_flight: int, seconds: float, rounds: int, output: str) -> None:
    """Measure token exchange, each audited, beside a bare gRPC call and a bare commit of one row."""
    with bench_stack() as stack:
        report = asyncio.run(measure(stack, tenants=tenants, in_flight=in_flight, duration_s=seconds, rounds=rounds))
    click.echo(json.dumps(report, indent=2) if output == "json" else table(report))


async def measure(stack: BenchStack, *, tenants: int, in_flight: int, duration_s: float, rounds: int) -> dict[str, Any]:
    """Everything ``rounds`` times in turns."""
    taken: dict[str, list[Rate]] = {"echo": [], "commit": [], "exchange_alone": [], "exchange": []}
    async with (
        grpc.aio.insecure_channel(stack.control) as control,
        grpc.aio.insecure_channel(stack.echo) as bare,
        await psycopg.AsyncConnection.connect(stack.database_url, autocommit=True) as connection,
        prepared_keys(stack, control, tenants) as keys,
    ):
        requests = itertools.cycle(
            auth_pb2.ExchangeApiKeyRequest(
                api_key=key, audience=auth_pb2.AUDIENCE_NODE, namespace_id=NAMESPACE
            ).SerializeToString()
            for key in keys
        )
        echo: Any = bare.unary_unary(METHOD)
        exchange: Any = control.unary_unary(_EXCHANGE)
        request_bytes = next(requests)
        await keep_in_flight(lambda: exchange(next(requests)), in_flight=in_flight, duration_s=duration_s / 3)
        for _ in range(rounds):
            for name, call, flight, pid in (
                ("echo", lambda: echo(request_bytes), in_flight, stack.echo_pid),
                ("commit", lambda: connection.execute(_COMMIT), 1, None),
                ("exchange_alone", lambda: exchange(next(requests)), 1, stack.control_pid),
                ("exchange", lambda: exchange(next(requests)), in_flight, stack.control_pid),
            ):
                rate = await keep_in_flight(call, in_flight=flight, duration_s=duration_s, server_pid=pid)
                taken[name].append(rate)
    return {
        "cpus": os.cpu_count(),
        "load_average_1_min": os.getloadavg()[0],
        "tenants": tenants,
        "in_flight": in_flight,
        "rounds": rounds,
        **{name: asdict(median(rates)) for name, rates in taken.items()},
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    what = {
        "echo": f"bare unary gRPC echo, {report['in_flight']} in flight",
        "commit": "bare commit of one row, one connection",
        "exchange_alone": "token exchange, audited, one at a time",
        "exchange": f"token exchange, audited, {report['in_flight']} in flight",
    }
    lines = [f"{'':44} {'per s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8}"]
    for name, label in what.items():
        rate = report[name]
        lines.append(
            f"{label:44} {rate['per_s']:8.0f} {rate['p50_ms']:8.2f} {rate['p99_ms']:8.2f} {rate['server_cpu_us']:8.0f}"
        )
    lines.append(f"{report['cpus']} CPUs, load {report['load_average_1_min']:.1f}, keys of {report['tenants']} tenants")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
