"""What a replay assumes: machines, quotas, routing, targets. One value, checked once, printed in every report."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NoReturn

import msgspec

from saltern.errors import InvalidArgumentError
from saltern.replay.profiles import HardwareProfile, ModelProfile

NODES_MAX: Final = 1024
ENGINES_MAX: Final = 4096


class Routing(StrEnum):
    """How requests find an engine (a model replica with GPUs of its own)."""

    ROUND_ROBIN = "round-robin"  #: in turn
    SESSION = "session"  #: by a hash of tenant and session; of the first block where there is no session
    PREFIX = "prefix"  #: the engine whose own memory has the longest prefix, unless its queue is much longer


class Use(StrEnum):
    """What a served request does to the order of eviction on the nodes."""

    CLIENT = "client"  #: as the SDK: what is read is touched, then what was missing is put, each batch tail first
    CHAIN = "chain"  #: every block of the prompt is touched or stored, tail first: the rule of reference hit rates


class Restart(StrEnum):
    """What nodes have after the restart of the ``after-restart`` column."""

    LOST = "lost"  #: nothing: a power cut, or another machine
    KEPT = "kept"  #: what they had: an orderly restart with warm memory


class _Setup(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    pass


class TenantQuota(_Setup, frozen=True):
    """Of one tenant, over all nodes together. None: an equal share of what is there, or all of it."""

    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    weight: int = 100
    ssd_reserved_bytes: int | None = None
    ssd_limit_bytes: int | None = None


class Slo(_Setup, frozen=True):
    """A request is *within* if it meets every target that is set."""

    ttft_s: float | None = 10.0
    end_to_end_s: float | None = None

    def is_met(self, ttft_s: float, end_to_end_s: float) -> bool:
        return (self.ttft_s is None or ttft_s <= self.ttft_s) and (
            self.end_to_end_s is None or end_to_end_s <= self.end_to_end_s
        )


class ToolDelays(_Setup, frozen=True):
    """Think times of closed-loop sessions: times ``scale``, then at most ``cap_s`` (None: as they are)."""

    scale: float = 1.0
    cap_s: float | None = None

    def applied(self, think_s: float) -> float:
        scaled_s = think_s * self.scale
        return scaled_s if self.cap_s is None else min(scaled_s, self.cap_s)


class ReplaySetup(_Setup, frozen=True):
    """All of it.

    Attributes:
        nodes: cache nodes, alike.
        node_bytes: memory of each for blocks.
        node_ssd_bytes: of each, for what its memory gives up; 0 for no SSD tier.
        engines: model replicas, alike.
        engine_cache_tokens: what each holds in its own memory between requests (LRU by block); 0 for nothing.
        queue_max: requests that may wait for one engine; more are turned away.
        quotas: of tenants by name; those that are not named have no reservation and no limit but the pool's.
        eviction, reservations: as ``saltern serve node`` takes them.
        restart_s: how long nodes are away when they restart; lookups meanwhile are misses.
        loss_at: share of the requests after which nodes restart or one is lost.
        seed: of what is drawn by chance: which node is lost, and what a trace draws.
    """

    model: ModelProfile
    hardware: HardwareProfile
    nodes: int = 1
    node_bytes: int = 0
    node_ssd_bytes: int = 0
    engines: int = 1
    routing: Routing = Routing.ROUND_ROBIN
    engine_cache_tokens: int = 0
    queue_max: int = 100_000
    quotas: dict[str, TenantQuota] = {}
    eviction: str = "two-queue"
    reservations: str = "strict"
    use: Use = Use.CLIENT
    slo: Slo = Slo()
    delays: ToolDelays = ToolDelays()
    restart: Restart = Restart.LOST
    restart_s: float = 30.0
    loss_at: float = 0.5
    seed: int = 0

    @property
    def capacity_bytes(self) -> int:
        return self.nodes * self.node_bytes

    def checked(self) -> ReplaySetup:
        """Itself.

        Raises:
            InvalidArgumentError: reason INVALID_REPLAY: a number is out of range.
        """
        for name, value, low, high in (
            ("nodes", self.nodes, 1, NODES_MAX),
            ("engines", self.engines, 1, ENGINES_MAX),
            ("node bytes", self.node_bytes, 1, 2**50),
            ("node SSD bytes", self.node_ssd_bytes, 0, 2**50),
            ("engine cache tokens", self.engine_cache_tokens, 0, 2**40),
            ("queue", self.queue_max, 1, 10**7),
            ("restart seconds", self.restart_s, 0, 86_400),
            ("loss at", self.loss_at, 0, 1),
            ("delay scale", self.delays.scale, 0, 1e6),
        ):
            if not low <= value <= high:
                _refuse(f"{name} of {value:g}", f"choose {low} to {high:g}")
        for target in (self.slo.ttft_s, self.slo.end_to_end_s, self.delays.cap_s):
            if target is not None and not 0 <= target < float("inf"):
                _refuse(f"a time of {target:g} s", "times are seconds from 0 on")
        reserved_bytes = sum(quota.reserved_bytes or 0 for quota in self.quotas.values())
        ssd_reserved_bytes = sum(quota.ssd_reserved_bytes or 0 for quota in self.quotas.values())
        for reserved, capacity, what in (
            (reserved_bytes, self.capacity_bytes, "memory"),
            (ssd_reserved_bytes, self.nodes * self.node_ssd_bytes, "SSD"),
        ):
            if reserved > capacity:
                _refuse(
                    f"reservations of {reserved} bytes in {capacity} of {what}", f"reserve less, or add {what} (I5)"
                )
        if self.node_ssd_bytes and self.use is Use.CHAIN:
            _refuse("an SSD tier and the order of use of reference rates", "use `--use client`, or no SSD")
        return self


def _refuse(what: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(f"cannot replay with {what}", reason="INVALID_REPLAY", hint=hint)
