"""What nodes count for each tenant, by their metrics pages (docs/metrics.md), summed over the lives of processes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
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


class _Page(NamedTuple):
    """What a page says: counters, and by tenant the bytes that are charged to it and those that it may have."""

    counts: Counter[_Count]
    held: Mapping[str, int]
    limits: Mapping[str, int]


_NOTHING: Final = _Page(Counter(), {}, {})
_COUNTERS: Final = {"evictions_total": "cause", "puts_refused_total": "reason"}
_GET_BYTES: Final = "get_bytes_total"
_PUT_BYTES: Final = "put_bytes_total"


class NodeBooks:
    """Counters since :meth:`begin`, although nodes are stopped and started meanwhile, and what is held now.

    A node that does not answer has what it last told.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: dict[str, Counter[_Count]] = {}
        self._past: dict[str, Counter[_Count]] = {}
        self._last: dict[str, _Page] = {}

    def wait_for_limits(self, limit_bytes: Mapping[str, int]) -> None:
        """Wait until nodes together go by these limits, by tenant id.

        A limit is leased to nodes: what one of them is to have grows after the change itself has arrived, once it is
        known that no other node has it any more. Until then puts would be refused that the setup has room for.

        Raises:
            UnavailableError: REPLAY_LIMITS: that has not happened within a minute; NODE_NOT_ANSWERING.
        """
        deadline_s = time.monotonic() + _FRESH_TIMEOUT_S
        while True:
            granted: Counter[str] = Counter()
            for node in self._cluster.running:
                granted.update(_read(_page(node)).limits)
            late = [tenant for tenant, wanted_bytes in limit_bytes.items() if granted[tenant] < wanted_bytes]
            if not late:
                return
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"nodes do not have the whole limit of tenant {late[0]!r} after {_FRESH_TIMEOUT_S:g} s",
                    reason="REPLAY_LIMITS",
                    hint="the machine may be overloaded; replay on fewer nodes",
                )
            time.sleep(_POLL_S)

    def begin(self) -> None:
        """Count from nothing; call it when nothing moves."""
        self._past = {node.name: Counter() for node in self._cluster.nodes}
        self._last = {node.name: _fresh(node) for node in self._cluster.running}
        self._before = {name: page.counts for name, page in self._last.items()}

    def close(self, nodes: Iterable[NodeProcess]) -> None:
        """Keep what nodes have counted: their processes are about to end, and the next ones begin at nothing.

        Raises:
            UnavailableError: NODE_NOT_ANSWERING: one does not tell; nothing is closed then.
        """
        pages = {node.name: _fresh(node) for node in nodes}
        for name, page in pages.items():
            self._past[name] = self._so_far(name, page)
            self._before.pop(name, None)
            self._last.pop(name, None)

    def held_bytes(self) -> dict[str, int]:
        """What is charged to each tenant, by tenant id, on all nodes that run, as it was a moment ago."""
        held: Counter[str] = Counter()
        for node in self._cluster.running:
            with suppress(UnavailableError):
                self._last[node.name] = _read(_page(node))
            held.update(self._last.get(node.name, _NOTHING).held)
        return dict(held)

    def sums(self) -> Sums:
        """What was counted and what is held now; call it when nothing moves."""
        counts, held = dict(self._past), {}
        error: UnavailableError | None = None
        for node in self._cluster.running:
            try:
                page = _fresh(node)
            except UnavailableError as silent:
                page, error = self._last.get(node.name, _NOTHING), silent
            counts[node.name] = self._so_far(node.name, page)
            held[node.name] = page.held
        return Sums(counts, held, error)

    def _so_far(self, name: str, page: _Page) -> Counter[_Count]:
        """What a node has counted in this life and those before."""
        counts = self._past[name].copy()
        counts.update(page.counts)
        counts.subtract(self._before.get(name, Counter()))
        return counts


@dataclass(frozen=True, slots=True)
class Sums:
    """Counters, and bytes charged to tenants, by node.

    Attributes:
        error: a node did not answer; its part is what it last told.
    """

    _counts: Mapping[str, Counter[_Count]]
    _held: Mapping[str, Mapping[str, int]]
    error: UnavailableError | None

    def held_bytes(self) -> dict[str, int]:
        """By tenant id."""
        held: Counter[str] = Counter()
        for of_node in self._held.values():
            held.update(of_node)
        return dict(held)

    def nodes(self) -> dict[str, NodeResult]:
        """Bytes of each node; how long its link was busy is not known."""

        def of(counts: Counter[_Count], figure: str) -> int:
            return sum(count for key, count in counts.items() if key.figure == figure)

        return {
            name: NodeResult(
                read_bytes=of(counts, _GET_BYTES),
                written_bytes=of(counts, _PUT_BYTES),
                resident_bytes=sum(self._held.get(name, {}).values()),
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


def _read(page: str) -> _Page:
    counts: Counter[_Count] = Counter()
    held: dict[str, int] = {}
    limits: dict[str, int] = {}
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
        elif name == "limit_bytes" and labels.get("tier") == "dram":
            limits[tenant] = value
    return _Page(counts, held, limits)


def _fresh(node: NodeProcess) -> _Page:
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
