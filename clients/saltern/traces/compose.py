"""Traces made of traces: pure functions from one :class:`Trace` to another, each recorded in its provenance.

All of them are lazy: requests pass through one at a time, in order of time, and iterating twice gives the same twice.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, NoReturn

from saltern.errors import InvalidArgumentError
from saltern.traces.request import (
    BLOCK_ID_MAX,
    NO_BLOCKS,
    Arrival,
    Identity,
    Provenance,
    Trace,
    TraceRequest,
    block_ids,
    composed_provenance,
)

_WEAKEST_LAST: Final = (Identity.RECORDED, Identity.DERIVED, Identity.SYNTHESISED)
_FIRST_FRESH_ID: Final = 2**48


def shift(trace: Trace, by_s: float) -> Trace:
    """All of it ``by_s`` seconds later (0 or more)."""
    _check(by_s >= 0, f"shift by {by_s} s", "shift by 0 or more seconds, or clip")
    return _mapped(trace, f"shifted by {by_s:g} s", lambda r: replace(r, arrival_s=r.arrival_s + by_s))


def scale_time(trace: Trace, factor: float) -> Trace:
    """Time between requests times ``factor``, think times too: 0.5 is twice the load. Recorded answers keep theirs."""
    _check(factor > 0, f"scale time by {factor}", "choose a factor above 0")

    def scaled(request: TraceRequest) -> TraceRequest:
        think_s = None if request.think_s is None else request.think_s * factor
        return replace(request, arrival_s=request.arrival_s * factor, think_s=think_s)

    return _mapped(trace, f"time scaled by {factor:g}", scaled)


def limit_think(trace: Trace, *, scale: float = 1.0, cap_s: float = math.inf) -> Trace:
    """Think times times ``scale``, then at most ``cap_s``. The cap is in the notes: it swings results."""
    _check(scale >= 0 and cap_s >= 0, f"scale think times by {scale} up to {cap_s} s", "choose 0 or more")
    step = f"think times scaled by {scale:g}, capped at {cap_s:g} s"

    def limited(request: TraceRequest) -> TraceRequest:
        return request if request.think_s is None else replace(request, think_s=min(request.think_s * scale, cap_s))

    made = _mapped(trace, step, limited)
    return replace(made, notes=(*made.notes, step))


def clip(trace: Trace, *, start_s: float = 0.0, end_s: float = math.inf, requests: int | None = None) -> Trace:
    """What arrives from ``start_s`` until before ``end_s``, counted from ``start_s``; of it the first ``requests``."""
    _check(0 <= start_s < end_s, f"clip to {start_s} s..{end_s} s", "choose an end after the start")
    _check(requests is None or requests > 0, f"clip to {requests} requests", "keep at least one")

    def clipped() -> Iterator[TraceRequest]:
        begun: set[tuple[str, str]] = set()
        kept = 0
        for request in trace:
            if request.arrival_s >= end_s or kept == requests:
                return
            if request.arrival_s < start_s:
                continue
            kept += 1
            conversation = request.tenant, request.session
            # The answer that this request waited for was cut off: it starts its session here.
            think_s = request.think_s if conversation in begun else None
            begun.add(conversation)
            yield replace(request, arrival_s=request.arrival_s - start_s, think_s=think_s)

    count = "" if requests is None else f", {requests} requests"
    return _changed(trace, f"clipped to {start_s:g} s..{end_s:g} s{count}", clipped)


def burst(trace: Trace, *, every_s: float, length_s: float) -> Trace:
    """What arrives within each ``every_s`` seconds, squeezed into the first ``length_s`` of them."""
    _check(0 < length_s <= every_s, f"bursts of {length_s} s every {every_s} s", "choose 0 < length <= every")

    def squeezed(request: TraceRequest) -> TraceRequest:
        window, at_s = divmod(request.arrival_s, every_s)
        return replace(request, arrival_s=window * every_s + at_s * length_s / every_s)

    return _mapped(trace, f"squeezed into bursts of {length_s:g} s every {every_s:g} s", squeezed)


def reblock(trace: Trace, block_tokens: int) -> Trace:
    """The same prompts in blocks of ``block_tokens``.

    A larger multiple is exact: a block's id stands for all before it, so the last of those it is made of names it.
    Otherwise blocks are first split, and two that differ are then taken to differ from their first token on, since the
    trace does not say more: hit rates are a lower bound (``identity_note`` says so).

    Raises:
        InvalidArgumentError: the trace has no prefix identity; while iterating, ids too large to be split.
    """
    _check(block_tokens > 0, f"blocks of {block_tokens} tokens", "choose 1 or more")
    _check(trace.identity is not Identity.NONE, f"re-block {trace.name!r}", "it has no prefix identity to keep")
    if block_tokens == trace.block_tokens:
        return trace
    exact = block_tokens % trace.block_tokens == 0
    note = f"re-blocked to {block_tokens} tokens, " + ("exact" if exact else "a lower bound: blocks were split")

    def reblocked(request: TraceRequest) -> TraceRequest:
        return replace(request, block_ids=reblock_ids(request, trace.block_tokens, block_tokens))

    made = _mapped(trace, note, reblocked)
    return replace(made, block_tokens=block_tokens, identity_note=f"{trace.identity_note}; {note}")


def reblock_ids(request: TraceRequest, old_tokens: int, new_tokens: int) -> array[int]:
    """Ids of a request's blocks of ``new_tokens``: each is named by its last token's old block and place in it."""
    unit = math.gcd(old_tokens, new_tokens)
    pieces = old_tokens // unit
    old = request.block_ids
    covered = min(request.input_tokens, len(old) * old_tokens)
    ends = [min(start + new_tokens, covered) - 1 for start in range(0, covered, new_tokens)]
    ids = [old[end // old_tokens] * pieces + end % old_tokens // unit for end in ends]
    if ids and max(ids) > BLOCK_ID_MAX:
        _refuse(
            f"split blocks of {old_tokens} tokens into ones of {new_tokens}",
            "its ids are too large to be split: read it in that size, or choose a multiple of its own",
        )
    return block_ids(ids)


def as_tenant(trace: Trace, tenant: str) -> Trace:
    """All of it as ``tenant``'s; a trace with tenants of its own keeps them apart as ``tenant-name``."""
    _check(bool(tenant), "name a tenant with no letters", "give it a name")

    def named(request: TraceRequest) -> TraceRequest:
        return replace(request, tenant=f"{tenant}-{request.tenant}" if request.tenant else tenant)

    made = _mapped(trace, f"as tenant {tenant}", named)
    return replace(made, tenants=tuple(f"{tenant}-{name}" for name in trace.tenants) or (tenant,))


def interleave(parts: Mapping[str, Trace], *, name: str = "composed") -> Trace:
    """Several traces as several tenants, by time; of equal times the earlier part comes first.

    Raises:
        InvalidArgumentError: no part, block sizes that differ, names that could meet, or parts of which only some
            have prefix identity.
    """
    _check(bool(parts), "compose no traces", "name at least one")
    sizes = {part.block_tokens for part in parts.values()}
    if len(sizes) > 1:
        listed = ", ".join(f"{tenant} {part.block_tokens or 'none'}" for tenant, part in parts.items())
        _refuse(
            f"compose traces of different block sizes ({listed})",
            "re-block them to one size; a trace without prefix identity (none) goes only with others of its kind, "
            "or gets ids synthesised",
        )
    for tenant in parts:
        if any(other.startswith(f"{tenant}-") for other in parts):
            _refuse(
                f"compose a tenant {tenant!r} beside one called {tenant}-...", "choose names that do not begin alike"
            )
    named = [as_tenant(part, tenant) for tenant, part in parts.items()]
    identities = [part.identity for part in named]
    weakest = identities[0] if sizes == {0} else max(identities, key=_WEAKEST_LAST.index)
    loops = {part.arrival for part in named}
    return Trace(
        name=name,
        provenance=composed_provenance(name, [part.provenance for part in named]),
        block_tokens=sizes.pop(),
        arrival=Arrival.CLOSED_LOOP if Arrival.CLOSED_LOOP in loops else Arrival.ABSOLUTE,
        identity=weakest,
        identity_note="; ".join(f"{tenant}: {part.identity_note}" for tenant, part in parts.items()),
        notes=tuple(f"{tenant}: {note}" for tenant, part in parts.items() for note in part.notes),
        tenants=tuple(tenant for part in named for tenant in part.tenants),
        opener=lambda: heapq.merge(*named, key=lambda request: request.arrival_s),
    )


def scan(*, rate_per_s: float, duration_s: float, input_tokens: int, block_tokens: int, seed: int = 0) -> Trace:
    """A tenant that never asks for anything twice: prompts of ``input_tokens`` at random times (Poisson)."""
    _check(
        rate_per_s > 0 and 0 < duration_s < math.inf and input_tokens > 0 and block_tokens > 0,
        f"scan with {rate_per_s} requests/s of {input_tokens} tokens for {duration_s} s",
        "choose numbers above 0",
    )
    blocks = -(-input_tokens // block_tokens)

    def scanned() -> Iterator[TraceRequest]:
        chance = random.Random(seed)  # noqa: S311 - traffic, not a secret
        at_s, first_id = chance.expovariate(rate_per_s), 0
        while at_s < duration_s:
            yield TraceRequest(
                arrival_s=at_s, input_tokens=input_tokens, block_ids=block_ids(range(first_id, first_id + blocks))
            )
            at_s += chance.expovariate(rate_per_s)
            first_id += blocks

    said = f"{rate_per_s:g} requests/s of {input_tokens} tokens for {duration_s:g} s, none twice, seed {seed}"
    return Trace(
        name="scan",
        provenance=_generated("scan", said, seed),
        block_tokens=block_tokens,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.SYNTHESISED,
        identity_note=f"a generated scan: {said}",
        opener=scanned,
    )


def synthesise_ids(trace: Trace, *, block_tokens: int, shared_tokens: int, groups: int = 1, seed: int = 0) -> Trace:
    """Ids for a trace that has none: each prompt begins with one of ``groups`` prompts of ``shared_tokens``, and
    nothing else is shared. **Invented**: says nothing about the recorded traffic, and is labelled so.

    Raises:
        InvalidArgumentError: the trace has prefix identity already, or the numbers make no sense.
    """
    _check(trace.identity is Identity.NONE, f"synthesise ids for {trace.name!r}", "it has prefix identity of its own")
    _check(
        block_tokens > 0 and shared_tokens >= 0 and groups > 0,
        f"synthesise {groups} shared prompts of {shared_tokens} tokens in blocks of {block_tokens}",
        "choose numbers above 0",
    )
    shared_blocks = shared_tokens // block_tokens

    def synthesised() -> Iterator[TraceRequest]:
        chance = random.Random(seed)  # noqa: S311 - traffic, not a secret
        fresh = _FIRST_FRESH_ID
        for request in trace:
            full, rest = divmod(request.input_tokens, block_tokens)
            shared = min(full, shared_blocks)
            first_id = chance.randrange(groups) * max(1, shared_blocks)
            own = full + bool(rest) - shared
            ids = block_ids([*range(first_id, first_id + shared), *range(fresh, fresh + own)])
            fresh += own
            yield replace(request, block_ids=ids or NO_BLOCKS)

    note = f"SYNTHESISED: {groups} shared beginnings of {shared_blocks * block_tokens} tokens, seed {seed}"
    made = _changed(trace, note, synthesised, seed=seed)
    return replace(made, block_tokens=block_tokens, identity=Identity.SYNTHESISED, identity_note=note)


def take(trace: Trace, requests: int) -> Trace:
    """The first ``requests`` requests, with their times as they are."""
    _check(requests > 0, f"take {requests} requests", "take at least one")
    return _changed(trace, f"first {requests} requests", lambda: islice(iter(trace), requests))


def _mapped(trace: Trace, step: str, change: Callable[[TraceRequest], TraceRequest]) -> Trace:
    return _changed(trace, step, lambda: map(change, trace))


def _changed(
    trace: Trace, step: str, opener: Callable[[], Iterator[TraceRequest]], *, seed: int | None = None
) -> Trace:
    return replace(trace, provenance=trace.provenance.with_step(step, seed=seed), opener=opener)


def _generated(name: str, said: str, seed: int) -> Provenance:
    return replace(composed_provenance(name, [], steps=[said], seed=seed), format="generated")


def _check(sound: bool, what: str, hint: str) -> None:
    if not sound:
        _refuse(what, hint)


def _refuse(what: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(f"cannot {what}", reason="INVALID_COMPOSITION", hint=hint)
