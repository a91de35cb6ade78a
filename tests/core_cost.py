"""What the core alone costs: memory of an entry, time of a command, and capacity lost to fragmentation.

    python -m tests.core_cost [--entries N] [--operations N] [--gib N] [--only SECTION]

Deterministic but for the clock: sizes, keys and choices come from a seed. Times are CPU time, the best of some rounds,
in a child process for each row, so that no row pays for the memory of another one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutTicket
from dataplane.core.extents import GRANULE_BYTES, round_up
from dataplane.core.ghosts import GhostTable
from dataplane.core.partition import Partition
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

KIB: Final = 1024
MIB: Final = 1024 * KIB
BLOCK_BYTES_MAX: Final = 64 * MIB
_SEED: Final = 7
_ROUNDS: Final = 5
_PUTS: Final = 4_000
_NAMESPACE: Final = NamespaceId("n")
_TICK_NS: Final = 20_000


class Core:
    """A core with tenants of equal quota, and one command at a time.

    Args:
        reserved_bytes: of each tenant.
        limit_bytes: of each tenant; the whole capacity by default.
    """

    def __init__(
        self, capacity_bytes: int, tenants: int, *, reserved_bytes: int = 0, soft_mark_percent: int = 100
    ) -> None:
        self.core = CacheCore(capacity_bytes, soft_mark_percent=soft_mark_percent)
        self.core.on_relocate(lambda moves: None)  # there is no memory here whose bytes could be copied
        rules = TenantPolicy(
            TenantState.ACTIVE,
            {Tier.DRAM: TierQuota(reserved_bytes, capacity_bytes)},
            {_NAMESPACE: NamespacePolicy("u", BLOCK_BYTES_MAX, (1,))},
        )
        names = [TenantId(f"t{number}") for number in range(tenants)]
        policy = NodePolicy(1, dict.fromkeys(names, rules))
        self.core.apply_policy(policy, 0)
        self.partitions = [
            open_partition(
                policy, claims_tenant=name, claims_namespace=_NAMESPACE, requested_namespace=_NAMESPACE, epoch=1
            )
            for name in names
        ]
        self.now_ns = 0
        self.keys = 0

    def tick(self) -> int:
        self.now_ns = (self.now_ns + _TICK_NS) >> 0  # an exact int, as clocks give: a sum takes 16 bytes more
        return self.now_ns

    def new_key(self) -> BlockKey:
        self.keys += 1
        return key_of(self.keys)

    def put(self, partition: Partition, size_bytes: int, key: BlockKey | None = None) -> bool:
        ticket = self.core.put_start(partition, key or self.new_key(), size_bytes, self.tick())
        if not isinstance(ticket, PutTicket):
            return False
        self.core.put_commit(ticket, hash(ticket.offset) * 0x9E3779B97F4A7C15 % 2**64, self.tick())
        return True


def key_of(number: int) -> BlockKey:
    """A key as even as a hash, and the same in every run."""
    mixed = number * 0x9E3779B97F4A7C15F39CC0605CEDC834F39CC0605CEDC8341082276BF3A27251 % 2**256
    return BlockKey(mixed.to_bytes(32, "big"))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()


# ---- memory


def index_bytes(entries: int, tenants: int) -> dict[str, float]:
    """Resident bytes an entry beyond its key, and of ghosts after as many evictions."""
    keys = [key_of(number) for number in range(2 * entries)]
    core = Core(entries * GRANULE_BYTES, tenants)
    partitions = core.partitions
    gc.collect()
    before_bytes = rss_bytes()
    for number in range(entries):
        core.put(partitions[number % tenants], GRANULE_BYTES - number % 100, keys[number])
    gc.collect()
    filled_bytes = rss_bytes()
    ghosts = GhostTable(entries)
    return {
        "index bytes an entry": (filled_bytes - before_bytes) / entries,
        "ghost bytes an entry": ghosts.size_bytes / entries,
    }


# ---- time


def command_times(entries: int, tenants: int) -> dict[str, float]:
    """Microseconds of one command in a cache that holds ``entries``, of ``tenants`` chosen at random."""
    rng = random.Random(_SEED)
    core = Core(2 * entries * GRANULE_BYTES, tenants)
    partitions = core.partitions
    keys = [[core.new_key() for _ in range(entries // tenants)] for _ in range(tenants)]
    for number in range(entries // tenants):
        for partition, mine in zip(partitions, keys, strict=True):
            core.put(partition, GRANULE_BYTES, mine[number])
    gc.freeze()
    chosen = [rng.randrange(tenants) for _ in range(_PUTS)]
    asked = [(partitions[at], [rng.choice(keys[at])]) for at in chosen]
    batches = [(partitions[at], [rng.choice(keys[at]) for _ in range(64)]) for at in chosen[: _PUTS // 16]]
    times = {
        "get, 1 key": _best(lambda: _get(core, asked), _PUTS),
        "get, a key of 64": _best(lambda: _get(core, batches), len(batches) * 64),
    }
    fresh = [[core.new_key() for _ in range(_PUTS)] for _ in range(_ROUNDS)]
    rounds = iter(fresh)
    times["put"] = _best(lambda: _put(core, chosen, next(rounds)), _PUTS)
    while core.core.usage(()).free_bytes:
        core.put(partitions[rng.randrange(tenants)], GRANULE_BYTES)
    gc.freeze()
    rounds = iter([[core.new_key() for _ in range(_PUTS)] for _ in range(_ROUNDS)])
    times["put that evicts"] = _best(lambda: _put(core, chosen, next(rounds)), _PUTS)
    return times


def _get(core: Core, asked: list[tuple[Partition, list[BlockKey]]]) -> None:
    start, end = core.core.get_start, core.core.get_end
    for partition, keys in asked:
        core.now_ns += _TICK_NS
        end(start(partition, keys, core.now_ns))


def _put(core: Core, chosen: list[int], keys: list[BlockKey]) -> None:
    start, commit, partitions = core.core.put_start, core.core.put_commit, core.partitions
    for at, key in zip(chosen, keys, strict=True):
        core.now_ns += _TICK_NS
        ticket = start(partitions[at], key, GRANULE_BYTES, core.now_ns)
        assert isinstance(ticket, PutTicket)
        commit(ticket, 1, core.now_ns)


def _best(work: Callable[[], None], commands: int) -> float:
    """CPU time of one command in microseconds."""
    best_ns = 0
    for _ in range(_ROUNDS):
        began_ns = time.process_time_ns()
        work()
        spent_ns = time.process_time_ns() - began_ns
        best_ns = min(best_ns or spent_ns, spent_ns)
    return best_ns / commands / 1000


def soft_mark_times(percent: int) -> dict[str, float]:
    """Microseconds of a put of 1 MiB at its limit, where evicting copies the bytes away as demotion to SSD does."""
    blocks = 256
    arena, staging = bytearray(2 * blocks * MIB), bytearray(MIB)
    arena_view = memoryview(arena)
    core = Core(2 * blocks * MIB, 1, soft_mark_percent=percent)
    rules = core.core.policy.tenants[TenantId("t0")]
    limited = TenantPolicy(rules.state, {Tier.DRAM: TierQuota(0, blocks * MIB)}, rules.namespaces)
    core.core.apply_policy(NodePolicy(2, {TenantId("t0"): limited}), core.tick())

    def demote(entry: object) -> None:
        offset = entry.offset  # type: ignore[attr-defined]
        staging[:] = arena_view[offset : offset + MIB]

    core.core.on_evict(demote)
    put_ns: list[int] = []
    for _ in range(4 * blocks):
        key = core.new_key()
        began_ns = time.process_time_ns()
        ticket = core.core.put_start(core.partitions[0], key, MIB, core.tick())
        put_ns.append(time.process_time_ns() - began_ns)
        assert isinstance(ticket, PutTicket)
        core.core.put_commit(ticket, 1, core.tick())
        while core.core.trim(core.now_ns, 8 * MIB):
            pass
    steady = sorted(put_ns[2 * blocks :])
    arena_view.release()
    return {
        "put_start, median": steady[len(steady) // 2] / 1000,
        "put_start, p99": steady[len(steady) * 99 // 100] / 1000,
    }


# ---- fragmentation


def fragmentation(operations: int, capacity_bytes: int, tenants: int, *, reserved: bool) -> dict[str, float]:
    """A mix of sizes from 4 KiB to 64 MiB, put, read and deleted: what of the arena can be used after it.

    Args:
        reserved: half of the capacity is reserved, in equal parts; else nothing is.
    """
    rng = random.Random(_SEED)
    reserved_bytes = capacity_bytes // 2 // tenants & -GRANULE_BYTES if reserved else 0
    core = Core(capacity_bytes, tenants, reserved_bytes=reserved_bytes)
    live: list[tuple[Partition, BlockKey]] = []
    refused = 0
    lengths: list[int] = []
    for _ in range(operations):
        kind = rng.random()
        if kind < 0.5 or not live:
            partition = rng.choice(core.partitions)
            size_bytes = int(2 ** rng.uniform(12, 26))
            lengths.append(size_bytes)
            key = core.new_key()
            if core.put(partition, size_bytes, key):
                live.append((partition, key))
            else:
                refused += 1
        else:
            partition, key = live[rng.randrange(len(live))] if kind < 0.9 else live.pop(rng.randrange(len(live)))
            if kind < 0.9:
                core.core.get_end(core.core.get_start(partition, [key], core.tick()))
            else:
                core.core.delete(partition, [key])
        if len(live) > 200_000:
            del live[:100_000]
    usage = core.core.usage()
    slack_bytes = sum(books.slack_bytes for books in usage.tenants.values())
    result = {
        "puts refused, %": 100 * refused / len(lengths),
        "free, %": 100 * usage.free_bytes / capacity_bytes,
        "longest free, MiB": usage.largest_free_bytes / MIB,
        "slack of granules, %": 100 * slack_bytes / capacity_bytes,
        "slack at 64 KiB granules, %": 100 * _slack_share(lengths, 64 * KIB),
    }
    result["compactions"] = usage.compactions
    result["moved, % of bytes put"] = 100 * usage.moved_bytes / max(1, sum(lengths))
    result["largest entries that fit, % of capacity"] = 100 * _fill(core, BLOCK_BYTES_MAX) / capacity_bytes
    others_bytes = sum(core.core.usage([name]).tenants[name].used_bytes for name in core.core.tenants()[1:])
    allowed_bytes = (capacity_bytes - others_bytes) // BLOCK_BYTES_MAX * BLOCK_BYTES_MAX
    result["of them budgets allow, %"] = 100 * allowed_bytes / capacity_bytes
    return result


def _slack_share(lengths: list[int], granule_bytes: int) -> float:
    rounded = sum(-(-length // granule_bytes) * granule_bytes for length in lengths)
    return 1 - sum(lengths) / rounded


def _fill(core: Core, size_bytes: int) -> int:
    """Put entries of one size by one tenant until it only displaces them; bytes of them that there are then."""
    partition = core.partitions[0]
    keys: list[BlockKey] = []
    most_bytes = 0
    for _ in range(2 * core.core.usage(()).capacity_bytes // size_bytes):
        keys.append(core.new_key())
        core.put(partition, size_bytes, keys[-1])
        found = core.core.lookup(partition, keys)[1]
        most_bytes = max(most_bytes, sum(found) * round_up(size_bytes))
    return most_bytes


# ---- the table


def _row(title: str, measure: Callable[..., dict[str, float]], *arguments: object, **named: object) -> None:
    """Measure in a process of its own and print."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        sender.send(measure(*arguments, **named))

    process = context.Process(target=child)
    process.start()
    sender.close()
    figures = receiver.recv()
    process.join()
    print(f"{title:44}" + "   ".join(f"{name} {value:.2f}" for name, value in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.core_cost", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the large rows (default 1000000)")
    parser.add_argument("--operations", type=int, default=1_000_000, help="mixed operations (default 1000000)")
    parser.add_argument("--gib", type=int, default=4, help="arena of the mixed operations (default 4)")
    parser.add_argument("--only", choices=["memory", "time", "mark", "fragmentation"], default=None)
    wanted = parser.parse_args()
    many = wanted.entries
    if wanted.only in (None, "memory"):
        print("memory, resident")
        for tenants in (1, 10_000):
            _row(f"  {many:,} entries, {tenants:,} tenants", index_bytes, many, tenants)
    if wanted.only in (None, "time"):
        print("CPU time, microseconds")
        for entries, tenants in ((10_000, 1), (many, 1), (10_000, 100), (many, 100), (many, 1_000), (many, 10_000)):
            _row(f"  {entries:,} entries, {tenants:,} tenants", command_times, entries, tenants)
    if wanted.only in (None, "mark"):
        print("CPU time, microseconds, of a put of 1 MiB at its limit with a copy for each eviction")
        for percent in (100, 98):
            _row(f"  soft mark {percent}%", soft_mark_times, percent)
    if wanted.only in (None, "fragmentation"):
        print(f"after {wanted.operations:,} mixed operations, 4 KiB to 64 MiB")
        for tenants, reserved in ((1, False), (8, False), (8, True)):
            title = f"  {wanted.gib} GiB, {tenants} tenants, {'half' if reserved else 'nothing'} reserved"
            _row(title, fragmentation, wanted.operations, wanted.gib * 1024 * MIB, tenants, reserved=reserved)


if __name__ == "__main__":
    main()
