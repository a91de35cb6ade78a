"""What nodes count for each tenant, by their metrics pages (docs/metrics.md), summed over the lives of processes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Final, NamedTuple

from saltern.errors import UnavailableError
from saltern.replay.collector import Evictions
from saltern.replay.measured.cluster import Cluster, NodeProcess
from saltern.replay.results import NodeResult

_LINE: Final = re.compile(r"saltern_node_(\w+)\{([^}]*)\} ([0-9.e+-]+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S: Final = 10.0
#: A page is served again until twenty times what it cost has passed (docs/metrics.md): on a busy machine, seconds.
_FRESH_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.02
_OTHERS: Final = "(others)"
#: Whose puts made an entry go that was not its owner's own doing.
_NEIGHBOUR: Final = "neighbour"


class _Count(NamedTuple):
    """Of one tenant: what was counted, and the cause, reason or tier that it is told apart by."""

    tenant: str
    figure: str
    kind: str


_COUNTERS: Final = {"evictions_total": "cause", "puts_refused_total": "reason"}
_GET_BYTES: Final = "get_bytes_total"
_PUT_BYTES: Final = "put_bytes_total"


class NodeBooks:
    """Counters since :meth:`begin`, although nodes are stopped and started meanwhile, and what is held now."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: dict[str, Counter[_Count]] = {}
        self._past: dict[str, Counter[_Count]] = {}

    def begin(self) -> None:
        """Count from nothing; call it when nothing moves."""
        self._past = {node.name: Counter() for node in self._cluster.nodes}
        self._before = {node.name: _fresh(node)[0] for node in self._cluster.running}

    def close(self, node: NodeProcess) -> None:
        """Keep what a node has counted: its process is about to end, and the next one begins at nothing."""
        counts = _fresh(node)[0]
        counts.subtract(self._before.pop(node.name, Counter()))
        self._past[node.name] += counts

    def held_bytes(self) -> dict[str, int]:
        """What is charged to each tenant, by tenant id, on all nodes that run, as it was a moment ago."""
        held: Counter[str] = Counter()
        for node in self._cluster.running:
            held.update(_read(_page(node))[1])
        return dict(held)

    def sums(self) -> Sums:
        """What was counted and what is held now; call it when nothing moves."""
        counts = {name: past.copy() for name, past in self._past.items()}
        held: dict[str, Counter[str]] = {}
        for node in self._cluster.running:
            now, held_now = _fresh(node)
            now.subtract(self._before.get(node.name, Counter()))
            counts[node.name].update(now)
            held[node.name] = Counter(held_now)
        return Sums(counts, held)


@dataclass(frozen=True, slots=True)
class Sums:
    """Counters, and bytes charged to tenants, by node."""

    _counts: Mapping[str, Counter[_Count]]
    _held: Mapping[str, Counter[str]]

    def held_bytes(self) -> dict[str, int]:
        """By tenant id."""
        return dict(sum(self._held.values(), Counter()))

    def nodes(self) -> dict[str, NodeResult]:
        """Bytes of each node; how long its link was busy is not known."""

        def of(counts: Counter[_Count], figure: str) -> int:
            return sum(count for key, count in counts.items() if key.figure == figure)

        return {
            name: NodeResult(
                read_bytes=of(counts, _GET_BYTES),
                written_bytes=of(counts, _PUT_BYTES),
                resident_bytes=sum(self._held.get(name, Counter()).values()),
            )
            for name, counts in self._counts.items()
        }

    def evictions(self) -> dict[str, Evictions]:
        """By tenant id.

        Nodes count whose put an entry went for only as its owner's or another's: with two tenants the other is known,
        with more all others are one.
        """
        counts: Counter[_Count] = Counter()
        for of_node in self._counts.values():
            counts.update(of_node)
        tenants = sorted({key.tenant for key in counts})
        found = {}
        for tenant in tenants:
            causes, refused = (
                {key.kind: n for key, n in counts.items() if (key.tenant, key.figure) == (tenant, figure) and n}
                for figure in _COUNTERS
            )
            others = [other for other in tenants if other != tenant]
            taken = causes.get(_NEIGHBOUR, 0)
            takers = {tenant: sum(causes.values()) - taken, others[0] if len(others) == 1 else _OTHERS: taken}
            found[tenant] = Evictions(causes, {taker: n for taker, n in takers.items() if n}, refused)
        return found


def _read(page: str) -> tuple[Counter[_Count], dict[str, int]]:
    """(counters, bytes charged by tenant) of a page."""
    counts: Counter[_Count] = Counter()
    held: dict[str, int] = {}
    for line in page.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found[1], dict(_LABEL.findall(found[2])), int(float(found[3]))
        tenant = labels.get("tenant", "")
        if name in _COUNTERS:
            counts[_Count(tenant, name, labels[_COUNTERS[name]])] = value
        elif name in (_GET_BYTES, _PUT_BYTES):
            counts[_Count(tenant, name, "")] = value
        elif name == "used_bytes" and labels.get("tier") == "dram":
            held[tenant] = value
    return counts, held


def _fresh(node: NodeProcess) -> tuple[Counter[_Count], dict[str, int]]:
    """Of a page that was made after this was called: one that is not the same as the last. What a page cost to make
    stands on the next one, so no two are.

    Raises:
        UnavailableError: NODE_NOT_ANSWERING.
    """
    page = last = _page(node)
    deadline_s = time.monotonic() + _FRESH_TIMEOUT_S
    while page == last:
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"{node.name} gives the same page of metrics for {_FRESH_TIMEOUT_S:g} s",
                reason="NODE_NOT_ANSWERING",
                hint="the machine may be overloaded",
            )
        time.sleep(_POLL_S)
        page = _page(node)
    return _read(page)


def _page(node: NodeProcess) -> str:
    connection = HTTPConnection(node.metrics_endpoint, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except OSError as error:
        raise UnavailableError(
            f"{node.name} does not answer with its metrics ({error})",
            reason="NODE_NOT_ANSWERING",
            hint="it may have ended, or the machine is overloaded",
        ) from None
    finally:
        connection.close()
