"""``python -m dataplane.bench_ssd``: the SSD tier beside its limits, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
import structlog

from dataplane.bench_ssd.limits import RawDevice, seal_on_one_thread
from dataplane.bench_ssd.recovery import measure_recovery
from dataplane.bench_ssd.report import Rounds, ratio
from dataplane.bench_ssd.tier import BenchTier
from dataplane.io.workers import READERS
from saltern.sizes import parse_size

MIB: Final = 1024 * 1024


@click.command()
@click.option(
    "--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path(), show_default=True,
    help="On the file system to measure; a folder is made in it and removed.",
)  # fmt: skip
@click.option("--block-bytes", default="1MiB", show_default=True, metavar="SIZE", help="One entry.")
@click.option("--total-bytes", default="512MiB", show_default=True, metavar="SIZE", help="Put and got in each round.")
@click.option("--dram-bytes", default="64MiB", show_default=True, metavar="SIZE", help="The node's memory.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--recovery-entries", type=click.IntRange(min=0), default=0, help="Measure a start with so many, too.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(
    *,
    folder: Path,
    block_bytes: str,
    total_bytes: str,
    dram_bytes: str,
    rounds: int,
    recovery_entries: int,
    output: str,
) -> None:
    """Measure the SSD tier, its device and its cipher in turns."""
    size = parse_size(block_bytes, what="--block-bytes")
    blocks = parse_size(total_bytes, what="--total-bytes") // size
    with tempfile.TemporaryDirectory(prefix="saltern-bench-ssd-", dir=folder) as made:
        report: dict[str, Any] = {}
        if recovery_entries:
            report["recovery"] = asdict(measure_recovery(Path(made), recovery_entries))
        report |= asyncio.run(
            measure(
                Path(made),
                block_bytes=size,
                blocks=blocks,
                dram_bytes=parse_size(dram_bytes, what="--dram-bytes"),
                rounds=rounds,
            )
        )
    click.echo(json.dumps(report, indent=2) if output == "json" else table(report))


async def measure(folder: Path, *, block_bytes: int, blocks: int, dram_bytes: int, rounds: int) -> dict[str, Any]:
    """Everything ``rounds`` times in turns; see :func:`table` for what the report holds."""
    names = ("raw_write", "put", "raw_read", "get", "seal")
    taken = {name: Rounds() for name in names}
    raw = RawDevice(folder, block_bytes=block_bytes, blocks=blocks)
    tier = BenchTier(folder, block_bytes=block_bytes, blocks=blocks, dram_bytes=dram_bytes)
    try:
        for _ in range(rounds):
            taken["raw_write"].add(raw.size_bytes, raw.write(threads=1))
            taken["put"].add(*await tier.put_all())
            taken["raw_read"].add(raw.size_bytes, raw.read(threads=READERS))
            taken["get"].add(*await tier.get_all())
            taken["seal"].add(raw.size_bytes, seal_on_one_thread(block_bytes, blocks))
            await tier.begin_anew()
        is_direct = tier.status.is_direct
    finally:
        raw.close()
        await tier.close()
    rates = {name: rounds_of.rate() for name, rounds_of in taken.items()}
    return {
        "block_bytes": block_bytes,
        "total_bytes": raw.size_bytes,
        "dram_bytes": dram_bytes,
        "is_direct": is_direct,
        "raw_read_threads": READERS,
        **{name: asdict(rate) for name, rate in rates.items()},
        "put_to_raw": ratio(rates["put"], rates["raw_write"]),
        "get_to_raw": ratio(rates["get"], rates["raw_read"]),
    }


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    what = {
        "raw_write": "device, O_DIRECT write, one thread",
        "put": "tier: put, evict, seal, write, sync",
        "raw_read": f"device, O_DIRECT read, {report['raw_read_threads']} threads",
        "get": "tier: read, open, promote",
        "seal": "AES-256-GCM, one thread",
    }
    lines = [f"{'':36} {'GB/s':>7} {'CPU s/GB':>9}"]
    for name, label in what.items():
        lines.append(f"{label:36} {report[name]['gb_per_s']:7.2f} {report[name]['cpu_s_per_gb']:9.2f}")
    lines.append(f"put / device {report['put_to_raw']:.2f}, get / device {report['get_to_raw']:.2f}")
    if recovery := report.get("recovery"):
        lines.append(
            f"recovery of {recovery['entries']} entries: {recovery['recovery_s']:.2f} s, "
            f"{recovery['index_bytes_per_entry']:.0f} bytes an entry with its key"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    main()
