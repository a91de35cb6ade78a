"""``saltern bench --scale``: is it as fast with 10^6 entries as with some 10^4, and with 10,000 tenants as with one?

Three nodes run side by side and are measured in turns: a small one, one with a hundred times the entries, one with the
small one's entries spread over 10,000 tenants. Their policy is fixed (``dataplane.bench_node``), because making 10,000
tenants through the control plane takes far longer than what is measured; doors, gate, tokens and core are a node's own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from saltern.bench.cases import DEADLINE_MS, MIB, SMALL_BYTES, new_keys
from saltern.bench.cpu import CpuUse, measured
from saltern.client import Client
from saltern.credentials import NodeEndpoint, StaticCredentials
from saltern.errors import InternalError, UnavailableError
from saltern.keys import BlockKey
from saltern.results import Hit, Stored

#: Entries in a call, calls in a turn.
BATCH_KEYS: Final = 500
CALLS: Final = 5
TURN_KEYS: Final = BATCH_KEYS * CALLS
#: Entries that fit beyond those that a node is measured with: the puts of a turn, and some.
SPARE_ENTRIES: Final = 2 * TURN_KEYS
SCHEMA: Final = "saltern.bench.scale/1"
TARGET: Final = 0.9
_NAMESPACE: Final = "bench"


@dataclass(frozen=True, slots=True)
class Scale:
    name: str
    entries: int
    tenants: int

    @property
    def dram_bytes(self) -> int:
        return (self.entries + SPARE_ENTRIES) * SMALL_BYTES


SCALES: Final = (
    Scale("12,500 entries, 1 tenant", 12_500, 1),
    Scale("1,000,000 entries, 1 tenant", 1_000_000, 1),
    Scale("12,500 entries, 10,000 tenants", 12_500, 10_000),
)


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """Figures of each scale by operation: thousands of entries a second, and the node's CPU microseconds for one."""

    turns: int
    rates: dict[str, dict[str, list[float]]]
    cpu_us: dict[str, dict[str, float]]

    def ratio(self, scale: str, operation: str) -> float:
        """The median, over turns, of a scale's rate as a share of the first one's in the same turn."""
        first = self.rates[SCALES[0].name][operation]
        return median(rate / base for rate, base in zip(self.rates[scale][operation], first, strict=True))

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "turns": self.turns,
            "entry_bytes": SMALL_BYTES,
            "target": TARGET,
            "scales": [
                {
                    "name": scale,
                    "operation": operation,
                    "entries_per_s": median(seen),
                    "seen": seen,
                    "ratio": self.ratio(scale, operation),
                    "node_cpu_us_per_entry": self.cpu_us[scale][operation],
                }
                for scale, operations in self.rates.items()
                for operation, seen in operations.items()
            ],
        }

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        rows = []
        for line in self.as_json()["scales"]:
            verdict = "" if line["name"] == SCALES[0].name else "met" if line["ratio"] >= TARGET else "missed"
            rate, cpu_us = f"{line['entries_per_s'] / 1e3:.1f}", f"{line['node_cpu_us_per_entry']:.1f}"
            rows.append([line["name"], line["operation"], rate, f"{line['ratio']:.2f}", verdict, cpu_us])
        return [(["scale", "operation", "thousand entries/s", "to the first", "", "node CPU us/entry"], rows)]

    def write(self, output_dir: Path) -> Path:
        """Write ``scale.json``; returns its path."""
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / "scale.json"
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        return path


@dataclass(slots=True)
class _Rig:
    """A node of one scale with a client of its first tenant, and keys of it that are there."""

    client: Client
    pid: int
    present: list[BlockKey]
    uses: dict[str, CpuUse] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, name: str, operation: Callable[[], None], *, keep: bool) -> None:
        """Run what moves ``TURN_KEYS`` entries; ``keep`` is False while warming up."""
        count, use = TURN_KEYS, CpuUse() if not keep else self.uses.setdefault(name, CpuUse())
        rate = count / measured(use, self.pid, count, operation)
        if keep:
            self.rates.setdefault(name, []).append(rate)


def run_scale(turns: int, say: Callable[[str], None]) -> ScaleReport:
    """Measure every scale in turns.

    Raises:
        SalternError: a node did not start, or a put or get of ours failed.
    """
    with ExitStack() as resources:
        rigs = {}
        for scale in SCALES:
            say(f"filling a node: {scale.name}")
            rigs[scale.name] = resources.enter_context(_rig(scale))
        order = list(rigs.values())
        for turn in range(turns + 1):
            say(f"turn {turn} of {turns}" if turn else "warming up")
            for rig in order if turn % 2 else reversed(order):
                _room_turn(rig, keep=turn > 0)
        for rig in order:
            _put(rig.client, new_keys(SPARE_ENTRIES))  # from here on each put has to evict
        for turn in range(turns + 1):
            say(f"turn {turn} of {turns}, pools full" if turn else "warming up with full pools")
            for rig in order if turn % 2 else reversed(order):
                _full_turn(rig, keep=turn > 0)
    rates = {name: rig.rates for name, rig in rigs.items()}
    cpu_us = {
        name: {operation: 1e6 * use.server_s / use.moved_bytes for operation, use in rig.uses.items()}
        for name, rig in rigs.items()
    }
    return ScaleReport(turns, rates, cpu_us)


def _room_turn(rig: _Rig, *, keep: bool) -> None:
    """Put, ask for, get and delete entries of a node that has room for them, among all the others."""
    keys = new_keys(TURN_KEYS)
    rig.measure("put", lambda: _put(rig.client, keys), keep=keep)
    rig.measure("exists", lambda: _exists(rig.client, rig.present), keep=keep)
    rig.measure("get", lambda: _get(rig.client, rig.present), keep=keep)
    rig.measure("delete", lambda: _delete(rig.client, keys), keep=keep)


def _full_turn(rig: _Rig, *, keep: bool) -> None:
    keys = new_keys(TURN_KEYS)
    rig.measure("put, pool full", lambda: _put(rig.client, keys), keep=keep)


def _fill(client: Client, count: int) -> list[BlockKey]:
    """Put ``count`` entries and return ``TURN_KEYS`` of their keys, from all over."""
    keys = new_keys(count)
    _put(client, keys)
    # Copies, so that the client reads keys that lie together, however many there were.
    return [BlockKey(bytes(bytearray(key))) for key in keys[:: count // TURN_KEYS][:TURN_KEYS]]


def _put(client: Client, keys: list[BlockKey]) -> None:
    payload = bytes(SMALL_BYTES)
    for part in _parts(keys):
        results = client.put_many([(key, payload) for key in part])
        _require(all(isinstance(result, Stored) for result in results), results)


def _exists(client: Client, keys: list[BlockKey]) -> None:
    for part in _parts(keys):
        found = client.lookup(part)
        _require(all(found.found), found.error)


def _get(client: Client, keys: list[BlockKey]) -> None:
    for part in _parts(keys):
        results = client.get_many(part)
        _require(all(isinstance(result, Hit) for result in results), results)


def _delete(client: Client, keys: list[BlockKey]) -> None:
    for part in _parts(keys):
        _require(client.delete(part).count == len(part), "entries were gone")


def _parts(keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
    return (keys[start : start + BATCH_KEYS] for start in range(0, len(keys), BATCH_KEYS))


@contextmanager
def _rig(scale: Scale) -> Iterator[_Rig]:
    """A running node, filled; entries beyond the first tenant's are spread evenly over the others."""
    with tempfile.TemporaryDirectory(prefix="saltern-scale-") as folder, ExitStack() as resources:
        command = [sys.executable, "-m", "dataplane.bench_node", folder, str(scale.dram_bytes), str(scale.tenants)]
        node = resources.enter_context(
            subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        )
        assert node.stdin is not None and node.stdout is not None
        resources.callback(node.stdin.close)
        line = node.stdout.readline()
        if not line:
            raise UnavailableError(
                f"the node for {scale.name} did not start",
                reason="BENCH_NODE",
                hint=f"it needs {scale.dram_bytes // MIB} MiB of memory and saltern-server",
            )
        endpoint = NodeEndpoint("bench-node", json.loads(line)["wire_endpoint"], "")
        tokens = Path(folder, "tokens").read_text().split()
        client = resources.enter_context(_client(endpoint, tokens[0]))
        present = _fill(client, scale.entries if scale.tenants == 1 else TURN_KEYS)
        for token in tokens[1:]:
            with _client(endpoint, token) as other:
                _put(other, new_keys((scale.entries - TURN_KEYS) // (scale.tenants - 1)))
        yield _Rig(client, node.pid, present)


def _client(endpoint: NodeEndpoint, token: str) -> Client:
    credentials = StaticCredentials(token, namespace=_NAMESPACE, nodes=(endpoint,), block_bytes=MIB)
    return Client.from_credentials(credentials, transport="tcp", deadline_ms=DEADLINE_MS)


def _require(condition: bool, what: object) -> None:
    if not condition:
        raise InternalError(f"a call of the bench failed: {str(what)[:300]}", reason="BENCH_FAILED")
