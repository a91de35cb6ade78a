"""``make bench-engines``: the engines below DRAM, local and mooncake, beside Mooncake alone, in turns in one run.

What a node does is measured without its doors: core, arena, staging, seal, engine. Processor time is of every process
that takes part in moving the bytes, but for the storage process and the master, which are Mooncake's whoever calls it;
theirs is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from dataplane.bench_ssd.report import Rounds, Span, ratio, timed
from dataplane.bench_ssd.tier import BenchTier
from dataplane.io.engines.mooncake import MooncakeStore
from dataplane.io.engines.objects import ObjectEngine
from dataplane.io.ssd_disk import Disk
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import load_node_key
from tests.support.mooncake_cluster import Cluster, missing, running_cluster

MIB = 1024 * 1024
_BATCH = 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Bare:
    """Mooncake's client in this process: registered memory, batches, no seal, no budget and no tenants."""

    def __init__(self, cluster: Cluster, block_bytes: int, blocks: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", str(cluster.settings.master)) == 0
        self._memory = ctypes.create_string_buffer(os.urandom(block_bytes * _BATCH), block_bytes * _BATCH)
        self._address = ctypes.addressof(self._memory)
        assert self._store.register_buffer(self._address, len(self._memory)) == 0
        self._block_bytes = block_bytes
        self._names = [f"bare/{number}" for number in range(blocks)]

    def put_all(self) -> tuple[int, Span]:
        return self._all(self._store.batch_put_from, 0)

    def get_all(self) -> tuple[int, Span]:
        return self._all(self._store.batch_get_into, self._block_bytes)

    def _all(self, call: Callable[..., list[int]], code: int) -> tuple[int, Span]:
        with timed() as span:
            for at in range(0, len(self._names), _BATCH):
                names = self._names[at : at + _BATCH]
                places = [self._address + number * self._block_bytes for number in range(len(names))]
                assert set(call(names, places, [self._block_bytes] * len(names))) == {code}
        return self._block_bytes * len(self._names), span

    def clear(self) -> None:
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        self._store.close()


@contextmanager
def also(span_of: list[tuple[int, Span]], process_ids: list[int]) -> Iterator[None]:
    """Adds the processor time of other processes to the span that is measured inside."""
    before = sum(map(_cpu_s, process_ids))
    yield
    span_of[-1][1].cpu_s += sum(map(_cpu_s, process_ids)) - before


def _cpu_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def measure(folder: Path, cluster: Cluster, *, block_bytes: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Put everything and get it back, with each engine in turn, ``rounds`` times."""
    taken = {f"{who} {what}": Rounds() for who in ("local", "mooncake", "bare") for what in ("put", "get")}
    store = MooncakeStore(cluster.settings)
    assert store.wait_connected(30)
    assert store._child is not None
    child = store._child._process.pid
    dram_bytes = max(32 * MIB, 4 * block_bytes)
    folders = {who: folder / who for who in ("local", "mooncake")}
    for one in folders.values():
        one.mkdir()
    engine = ObjectEngine(folders["mooncake"] / "ledger", load_node_key(folders["mooncake"], Files()), store)
    disks: dict[str, Disk | None] = {"local": None, "mooncake": engine}
    tiers = {
        who: BenchTier(folders[who], block_bytes=block_bytes, blocks=blocks, dram_bytes=dram_bytes, disk=disk)
        for who, disk in disks.items()
    }
    bare = Bare(cluster, block_bytes, blocks)
    storage_s = {"mooncake": 0.0, "bare": 0.0}
    moved_bytes = {"mooncake": 0, "bare": 0}
    try:
        for _ in range(rounds):
            for who, tier in tiers.items():
                before_s = _cpu_s(cluster.storage.pid)
                for what in ("put", "get"):
                    spans = taken[f"{who} {what}"].spans
                    with also(spans, [child] if who == "mooncake" else []):
                        spans.append(await (tier.put_all() if what == "put" else tier.get_all()))
                    moved_bytes[who] = moved_bytes.get(who, 0) + spans[-1][0]
                storage_s[who] = storage_s.get(who, 0.0) + _cpu_s(cluster.storage.pid) - before_s
                await tier.begin_anew()
            before_s = _cpu_s(cluster.storage.pid)
            taken["bare put"].add(*bare.put_all())
            taken["bare get"].add(*bare.get_all())
            storage_s["bare"] += _cpu_s(cluster.storage.pid) - before_s
            moved_bytes["bare"] += 2 * block_bytes * blocks
            bare.clear()
        counts = engine.counts
    finally:
        bare.close()
        for tier in tiers.values():
            await tier.close()
    rates = {name: one.rate() for name, one in taken.items()}
    return {
        "block_bytes": block_bytes,
        "total_bytes": block_bytes * blocks,
        **{name: asdict(rate) for name, rate in rates.items()},
        "put_to_bare": ratio(rates["mooncake put"], rates["bare put"]),
        "get_to_bare": ratio(rates["mooncake get"], rates["bare get"]),
        "storage_cpu_s_per_gb": {
            who: round(storage_s[who] / (moved_bytes[who] / 1e9), 3) for who in ("mooncake", "bare")
        },
        "misses": counts.gone + counts.forged + counts.unreachable,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.bench", description=__doc__)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if why := missing():
        print(f"bench-engines: skipped: {why}", file=sys.stderr)
        return 0
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    block_bytes = options.block_kib * 1024
    with tempfile.TemporaryDirectory(prefix="saltern-bench-engines-") as made:
        folder = Path(made)
        with running_cluster(folder, 3 * options.total_mib * MIB) as cluster:
            report = asyncio.run(
                measure(
                    folder,
                    cluster,
                    block_bytes=block_bytes,
                    blocks=options.total_mib * MIB // block_bytes,
                    rounds=options.rounds,
                )
            )
    print(json.dumps(report, indent=2) if options.output == "json" else _table(report))
    return 0


def _table(report: dict[str, Any]) -> str:
    lines = [f"{'':16} {'GB/s':>7} {'CPU s/GB':>9}"]
    for who in ("local", "mooncake", "bare"):
        for what in ("put", "get"):
            rate = report[f"{who} {what}"]
            lines.append(f"{who + ' ' + what:16} {rate['gb_per_s']:7.2f} {rate['cpu_s_per_gb']:9.2f}")
    lines.append(f"mooncake / bare: put {report['put_to_bare']:.2f}, get {report['get_to_bare']:.2f}")
    lines.append(f"the storage process besides, CPU s/GB: {report['storage_cpu_s_per_gb']}")
    lines.append(f"records that did not come back: {report['misses']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
