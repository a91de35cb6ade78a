"""``python -m controlplane.bench_control.audit``: exporting and verifying an audit trail, beside the bare limits.

In turns, so that what else the machine does falls on all of them alike: an export as JSON Lines through the service
into a file, the verification of that file, and what neither can be faster than: reading the rows as they are, and
hashing the lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from controlplane.audit.trail import EVENT_COLUMNS
from controlplane.bench_control.measure import cpu_of
from controlplane.bench_control.stack import BenchStack, bench_stack
from controlplane.bench_control.targets import EXPORT, VERIFY
from saltern.admin.v1.audit_pb2 import ExportAuditEventsRequest
from saltern.admin_client import AdminClient, ApiKey, redeem_bootstrap_token
from saltern.audit.chain import AuditRecord, ChainHead, append, genesis
from saltern.audit.checkpoints import NO_DIGEST, encode_checkpoint, sign_checkpoint
from saltern.audit.exporting import Page, TextExport
from saltern.audit.public_keys import CheckpointPublicKey
from saltern.audit.verification import Verifier

_CHAIN: Final = "bench"
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RECORD: Final = AuditRecord(
    event_time_us=0,
    actor="tenants/bench/apiKeys/serving-7",
    actor_role="writer",
    peer="192.0.2.7:50412",
    method="saltern.auth.v1.AuthService/ExchangeApiKey",
    resource="tenants/bench/apiKeys/serving-7",
    outcome="success",
    reason="",
    request_id="",
    policy_version=1234,
    before=None,
    after={"audience": "node", "namespace": "chat", "expire_time": "2026-01-01T00:10:00Z", "token_id": "0" * 32},
)


@click.command()
@click.option("--events", type=click.IntRange(1000), default=100_000, show_default=True, help="In the trail.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="In turns; the median counts.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(*, events: int, rounds: int, output: str) -> None:
    """Measure the export and the verification of an audit trail."""
    with bench_stack() as stack:
        report = measure(stack, events=events, rounds=rounds)
    if output == "json":
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(table(report))


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'':36} {'events/s':>10} {'client CPU us':>14} {'server CPU us':>14}"]
    for name, taken in report["measured"].items():
        lines.append(f"{name:36} {taken['per_s']:10,.0f} {taken['client_cpu_us']:14.2f} {taken['server_cpu_us']:14.2f}")
    lines.append(f"{report['events']} events, {report['cpus']} CPUs, load {report['load_average_1_min']:.1f}")
    return "\n".join(lines)


def measure(stack: BenchStack, *, events: int, rounds: int) -> dict[str, Any]:
    """Everything ``rounds`` times in turns, medians in events a second."""
    path = stack.state_dir / "export.jsonl"
    head = _fill(stack.database_url, events)
    token = (stack.state_dir / "bootstrap-token").read_text().strip()
    api_key = ApiKey(redeem_bootstrap_token(stack.control, token).secret)
    private_key = Ed25519PrivateKey.generate()
    public_key = CheckpointPublicKey(private_key.public_key())
    time_us = int(time.time() * 1e6)
    signed = encode_checkpoint(sign_checkpoint(private_key, _CHAIN, head, time_us=time_us, previous=NO_DIGEST))

    def export() -> None:
        path.unlink(missing_ok=True)
        with AdminClient(stack.control, api_key) as admin, closing(_opened(path)) as opened:
            request = ExportAuditEventsRequest(parent=f"tenants/{_CHAIN}")
            for answer in admin.stream(admin.audit.ExportAuditEvents, request):
                opened.write(Page(answer.lines, answer.events, answer.last_sequence))
            opened.finish()
        assert opened.events == events

    def verify() -> None:
        verifier = Verifier(_CHAIN, {public_key.id: public_key}, now_us=time_us)
        verifier.read_checkpoints([signed])
        with path.open("rb") as lines:
            verifier.read_events(lines)
        assert verifier.finish().is_intact

    def rows() -> None:
        with psycopg.connect(stack.database_url) as connection, connection.cursor(name="bench") as cursor:
            connection.execute("SELECT set_config('saltern.tenant', '*', true)")
            cursor.itersize = 1000
            cursor.execute("SELECT * FROM audit_events WHERE chain = %s ORDER BY sequence", [_CHAIN])
            assert sum(1 for _ in cursor) == events

    def hashing() -> None:
        with path.open("rb") as lines:
            for line in lines:
                hashlib.sha256(line).digest()

    works: dict[str, Callable[[], None]] = {
        EXPORT: export,
        VERIFY: verify,
        "bare: the rows through a cursor": rows,
        "bare: SHA-256 of each line": hashing,
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(_timed(work, events, stack.control_pid))
    return {
        "events": events,
        "rounds": rounds,
        "cpus": os.cpu_count(),
        "load_average_1_min": os.getloadavg()[0],
        "bytes_per_event": path.stat().st_size / events,
        "measured": {
            name: {figure: median(one[figure] for one in rounds_of) for figure in rounds_of[0]}
            for name, rounds_of in taken.items()
        },
    }


def _timed(work: Callable[[], None], events: int, server_pid: int) -> dict[str, float]:
    began_s, client_s, server_s = time.perf_counter(), time.process_time(), cpu_of(server_pid)
    work()
    return {
        "per_s": events / (time.perf_counter() - began_s),
        "client_cpu_us": 1e6 * (time.process_time() - client_s) / events,
        "server_cpu_us": 1e6 * (cpu_of(server_pid) - server_s) / events,
    }


def _opened(path: Path) -> TextExport:
    return TextExport(_CHAIN, "jsonl", output=str(path), stdout=BytesIO(), cursor_file=None)


def _fill(database_url: str, events: int) -> ChainHead:
    """Put a chain of exchanges into the database; returns its head."""
    with psycopg.connect(database_url) as connection:
        connection.execute("SELECT set_config('saltern.tenant', '*', true)")
        rows = list(_rows(events))
        values = ", ".join(f"%s::{kind}" for kind in EVENT_COLUMNS.values())
        statement = f"INSERT INTO audit_events ({', '.join(EVENT_COLUMNS)}) VALUES ({values})"  # noqa: S608 (constants)
        connection.cursor().executemany(statement, [row for row, _ in rows])
    return rows[-1][1]


def _rows(events: int) -> Iterator[tuple[list[Any], ChainHead]]:
    head = genesis(_CHAIN)
    for number in range(events):
        at = _START + timedelta(milliseconds=number)
        event = append(_CHAIN, head, replace(_RECORD, event_time_us=(at - _EPOCH) // timedelta(microseconds=1)))
        head = ChainHead(event.sequence, event.hash)
        record = event.record
        values: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
        values |= {
            "chain": _CHAIN, "sequence": event.sequence, "event_time": at, "before": None,
            "after": json.dumps(record.after), "previous_hash": event.previous_hash, "hash": event.hash,
            "hash_format": event.hash_format,
        }  # fmt: skip
        yield [values[column] for column in EVENT_COLUMNS], head


if __name__ == "__main__":
    main()
