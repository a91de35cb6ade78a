"""Turns what an engine sees, request by request, into a :class:`ColumnResult`; the same for every engine.

Memory grows by 16 bytes for each request, for exact quantiles (32 more while they are ranked), and by nothing else.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

from saltern.replay.results import Column, ColumnResult, NodeResult, Quantiles, Series, SsdResult, TenantResult
from saltern.replay.setup import Slo

#: Bins of a series; when time runs past the last, pairs become one.
SERIES_BINS: Final = 120
_FIRST_BIN_S: Final = 0.125


class Served(NamedTuple):
    """One request that was answered; times in seconds, TTFT being queue, transfer and prefill together.

    ``ssd_hit_tokens`` are the part of ``hit_tokens`` that was on SSD.
    """

    tenant: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    engine_hit_tokens: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    decode_s: float
    ssd_hit_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.transfer_s + self.prefill_s

    @property
    def end_to_end_s(self) -> float:
        return self.ttft_s + self.decode_s


class Evictions(NamedTuple):
    """Of one tenant over all nodes: entries by cause and by whose put, and puts refused by reason."""

    by_cause: Mapping[str, int]
    by_tenant: Mapping[str, int]
    refused: Mapping[str, int]


@dataclass(slots=True)
class _Tenant:
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ssd_hit_tokens: int = 0
    within_slo: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    end_to_end_s: array[float] = field(default_factory=lambda: array("d"))


class Collector:
    """Of one column; :meth:`result` may be asked at any time.

    Args:
        occupancy: bytes on all nodes by tenant, asked at most once for each bin.
    """

    def __init__(self, column: Column, slo: Slo, occupancy: Callable[[], Mapping[str, int]]) -> None:
        self._column, self._slo = column, slo
        self._tenants: dict[str, _Tenant] = {}
        self._output_tokens = self._engine_hit_tokens = 0
        self._queue_s = self._transfer_s = self._prefill_s = 0.0
        self._end_s = 0.0
        self._series = _SeriesBins(occupancy)
        self._moved = [0, 0]

    @property
    def requests(self) -> int:
        return sum(tenant.requests for tenant in self._tenants.values())

    def served(self, request: Served) -> None:
        """Count a request that was answered; they come in any order."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant()
        ttft_s = request.queue_s + request.transfer_s + request.prefill_s
        end_to_end_s = ttft_s + request.decode_s
        tenant.requests += 1
        tenant.prompt_tokens += request.prompt_tokens
        tenant.hit_tokens += request.hit_tokens
        tenant.ssd_hit_tokens += request.ssd_hit_tokens
        tenant.within_slo += self._slo.is_met(ttft_s, end_to_end_s)
        tenant.ttft_s.append(ttft_s)
        tenant.end_to_end_s.append(end_to_end_s)
        self._output_tokens += request.output_tokens
        self._engine_hit_tokens += request.engine_hit_tokens
        self._queue_s += request.queue_s
        self._transfer_s += request.transfer_s
        self._prefill_s += request.prefill_s
        self._end_s = max(self._end_s, request.arrival_s + end_to_end_s)
        self._series.at(request.arrival_s + ttft_s).count(request.hit_tokens, request.prompt_tokens)

    def moved(self, at_s: float, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Count bytes that have left nodes, or have come to them, at ``at_s``."""
        self._moved[0] += read_bytes
        self._moved[1] += written_bytes
        self._series.at(at_s).move(read_bytes, written_bytes)

    def result(
        self,
        *,
        complete: bool,
        recorded_s: float,
        evictions: Mapping[str, Evictions],
        occupancy_bytes: Mapping[str, int],
        nodes: Mapping[str, NodeResult],
        ssd: SsdResult | None = None,
        shed: int = 0,
        written_s: float = 0.0,
        read_s: float = 0.0,
        block_accesses: int = 0,
        driver_cpu_s: float = 0.0,
    ) -> ColumnResult:
        """All of it; what compares columns (rho, slowdown, shares, cost) is left open."""
        held_bytes = sum(occupancy_bytes.values())
        names = sorted({*self._tenants, *evictions})
        tenants = {
            name: _tenant_result(
                self._tenants.get(name, _Tenant()), evictions.get(name), occupancy_bytes.get(name, 0), held_bytes
            )
            for name in names
        }
        prompt_tokens = sum(tenant.prompt_tokens for tenant in tenants.values())
        hit_tokens = sum(tenant.hit_tokens for tenant in tenants.values())
        return ColumnResult(
            column=self._column,
            complete=complete,
            requests=self.requests,
            shed=shed,
            prompt_tokens=prompt_tokens,
            output_tokens=self._output_tokens,
            hit_tokens=hit_tokens,
            engine_hit_tokens=self._engine_hit_tokens,
            hit_rate=hit_tokens / prompt_tokens if prompt_tokens else 0.0,
            duration_s=self._end_s,
            recorded_s=recorded_s,
            read_bytes=self._moved[0],
            written_bytes=self._moved[1],
            read_s=read_s,
            written_s=written_s,
            queue_s=self._queue_s,
            transfer_s=self._transfer_s,
            prefill_s=self._prefill_s,
            evictions_by_cause=_summed(tenant.evictions_by_cause for tenant in tenants.values()),
            refused_by_reason=_summed(tenant.refused_by_reason for tenant in tenants.values()),
            ttft=Quantiles.of(chain.from_iterable(tenant.ttft_s for tenant in self._tenants.values())),
            end_to_end=Quantiles.of(chain.from_iterable(tenant.end_to_end_s for tenant in self._tenants.values())),
            within_slo=sum(tenant.within_slo for tenant in tenants.values()),
            tenants=tenants,
            nodes=dict(nodes),
            series=self._series.result(),
            ssd=ssd,
            block_accesses=block_accesses,
            driver_cpu_s=driver_cpu_s,
        )


def _tenant_result(tenant: _Tenant, evictions: Evictions | None, held_bytes: int, all_bytes: int) -> TenantResult:
    return TenantResult(
        requests=tenant.requests,
        prompt_tokens=tenant.prompt_tokens,
        hit_tokens=tenant.hit_tokens,
        ssd_hit_tokens=tenant.ssd_hit_tokens,
        hit_rate=tenant.hit_tokens / tenant.prompt_tokens if tenant.prompt_tokens else 0.0,
        occupancy_bytes=held_bytes,
        occupancy_share=held_bytes / all_bytes if all_bytes else 0.0,
        evictions_by_cause={} if evictions is None else dict(evictions.by_cause),
        evicted_by={} if evictions is None else dict(evictions.by_tenant),
        refused_by_reason={} if evictions is None else dict(evictions.refused),
        within_slo=tenant.within_slo,
        ttft=Quantiles.of(tenant.ttft_s),
        end_to_end=Quantiles.of(tenant.end_to_end_s),
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return dict(sorted(total.items()))


@dataclass(slots=True)
class _Bin:
    hit_tokens: int = 0
    prompt_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    occupancy: Mapping[str, int] | None = None

    def count(self, hit_tokens: int, prompt_tokens: int) -> None:
        self.hit_tokens += hit_tokens
        self.prompt_tokens += prompt_tokens

    def move(self, read_bytes: int, written_bytes: int) -> None:
        self.read_bytes += read_bytes
        self.written_bytes += written_bytes

    def joined(self, later: _Bin) -> _Bin:
        return _Bin(
            self.hit_tokens + later.hit_tokens,
            self.prompt_tokens + later.prompt_tokens,
            self.read_bytes + later.read_bytes,
            self.written_bytes + later.written_bytes,
            self.occupancy if later.occupancy is None else later.occupancy,
        )


class _SeriesBins:
    """At most :data:`SERIES_BINS`, which double in width whenever time runs past the last."""

    def __init__(self, occupancy: Callable[[], Mapping[str, int]]) -> None:
        self._occupancy = occupancy
        self._bin_s = _FIRST_BIN_S
        self._bins = [_Bin() for _ in range(SERIES_BINS)]
        self._last = -1

    def at(self, at_s: float) -> _Bin:
        """The bin of this time; the first look at a later one than all before notes what is held."""
        number = int(at_s / self._bin_s)
        return self._bins[number] if number <= self._last else self._later(at_s)

    def _later(self, at_s: float) -> _Bin:
        while at_s >= self._bin_s * SERIES_BINS:
            halves = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [a.joined(b) for a, b in halves] + [_Bin() for _ in range(SERIES_BINS // 2)]
            self._bin_s *= 2
            self._last //= 2
        number = int(at_s / self._bin_s)
        if number > self._last:  # not where bins have just become wider
            self._last = number
            self._bins[number].occupancy = self._occupancy()
        return self._bins[number]

    def result(self) -> Series:
        bins = self._bins[: self._last + 1]
        names = sorted({name for one in bins for name in one.occupancy or ()})
        held: dict[str, list[int]] = {name: [] for name in names}
        latest: Mapping[str, int] = {}
        for one in bins:
            latest = latest if one.occupancy is None else one.occupancy
            for name, values in held.items():
                values.append(latest.get(name, 0))
        return Series(
            bin_s=self._bin_s,
            hit_rate=[one.hit_tokens / one.prompt_tokens if one.prompt_tokens else None for one in bins],
            read_bytes=[one.read_bytes for one in bins],
            written_bytes=[one.written_bytes for one in bins],
            occupancy_bytes=held,
        )
