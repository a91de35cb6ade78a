"""What every trace is made of, whatever file it came from: requests in order of time, and where they are from.

A :class:`Trace` is read from its file again each time that it is iterated, one request at a time, so that a trace of
any length takes the memory of one request (formats whose sessions overlap keep those that are open). Two requests
share a block if tenant and block id are equal: **a block id names a block together with everything before it**.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

#: Block ids of one prompt, head first, are an array("q"): 8 bytes each, 0 to 2^63 - 1. Nobody changes one in place.
BLOCK_ID_MAX: Final = 2**63 - 1
NO_BLOCKS: Final[array[int]] = array("q")


def block_ids(ids: Iterable[int]) -> array[int]:
    """Ids as the compact sequence that requests hold; raises OverflowError outside of 64 bits."""
    return array("q", ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request to a model.

    Attributes:
        arrival_s: when it was sent, in seconds from the start of the trace; never before the request that precedes it.
        input_tokens: tokens of the prompt.
        output_tokens: tokens of the answer, 0 where the trace does not say.
        block_ids: of the prompt's blocks, head first; the last may be of a partial block. Empty where the trace has
            no prefix identity, and for an empty prompt.
        tenant: who sent it, "" where the trace does not say.
        session: the conversation that it belongs to, unique in its tenant; "" where the trace does not say.
        parent_session: the session that started this one as a sub-agent, or "".
        think_s: in a closed-loop trace, from the end of its session's previous answer to this request: a tool or a
            person; None for the first request of a session, and in traces without such times.
        stop: why the answer ended, as recorded ("tool_use", "end_turn"), or "".
        api_s: recorded time from this request to the end of its answer, or None.
        ttft_s: recorded time to the first token, or None.
    """

    arrival_s: float
    input_tokens: int
    block_ids: array[int] = field(default_factory=lambda: NO_BLOCKS)
    output_tokens: int = 0
    tenant: str = ""
    session: str = ""
    parent_session: str = ""
    think_s: float | None = None
    stop: str = ""
    api_s: float | None = None
    ttft_s: float | None = None


class Arrival(StrEnum):
    """What decides when a request is sent."""

    ABSOLUTE = "absolute"  #: its own time: load does not depend on how fast answers come
    CLOSED_LOOP = "closed-loop"  #: its session's previous answer and ``think_s``; ``arrival_s`` is how it was recorded


class Identity(StrEnum):
    """Where block ids come from, and so what a hit rate over them may be called."""

    RECORDED = "recorded"  #: prefix hashes of the served system itself
    DERIVED = "derived"  #: made here from recorded content (text, chunks) by the rule in ``identity_note``
    SYNTHESISED = "synthesised"  #: invented here because somebody asked: says nothing about the recorded traffic
    NONE = "none"  #: lengths and times only


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where requests come from, complete enough to make them again; ``to_dict()`` goes into every report.

    Attributes:
        source: path of the file, or what generated them.
        format: name of the loader, or ``composed`` or ``generated``.
        sha256: of the file as it lies there; of the parts and steps for a composed trace.
        seed: of whatever was drawn by chance, None where nothing was.
        steps: what was done to the requests, in order, each as one readable text.
        parts: what a composed trace is made of.
    """

    source: str
    format: str
    sha256: str
    seed: int | None = None
    steps: tuple[str, ...] = ()
    parts: tuple[Provenance, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_step(self, step: str, *, seed: int | None = None) -> Provenance:
        return replace(self, steps=(*self.steps, step), seed=self.seed if seed is None else seed)


def composed_provenance(
    source: str, parts: Sequence[Provenance], *, steps: Sequence[str] = (), seed: int | None = None
) -> Provenance:
    """Provenance of requests made of ``parts``; its sha256 is over all that decides them: equal means equal
    requests, wherever the files lie."""
    said = json.dumps([[_content(part) for part in parts], list(steps), seed])
    digest = hashlib.sha256(said.encode()).hexdigest()
    return Provenance(
        source=source, format="composed", sha256=digest, seed=seed, steps=tuple(steps), parts=tuple(parts)
    )


def _content(part: Provenance) -> list[Any]:
    return [part.format, part.sha256, part.seed, list(part.steps), [_content(inner) for inner in part.parts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of ``arrival_s``, read anew by every iteration, with their provenance.

    Iterating raises InvalidArgumentError (reason INVALID_TRACE: file, line, what was expected) at a damaged place,
    after every request before it.

    Attributes:
        name: short, for tables.
        block_tokens: tokens in one block, the same throughout; 0 where there is no prefix identity.
        tenants: names that ``TraceRequest.tenant`` takes; empty where only reading the file would tell.
        identity_note: how ids came about, one line, printed wherever a hit rate is.
        notes: what else a reader of the figures must know (assumed lengths, caps on gaps).
        opener: gives the requests from the first one on; called once for each iteration.
    """

    name: str
    provenance: Provenance
    block_tokens: int
    arrival: Arrival
    identity: Identity
    opener: Callable[[], Iterator[TraceRequest]]
    tenants: tuple[str, ...] = ()
    identity_note: str = ""
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.opener()

    @property
    def sha256(self) -> str:
        return self.provenance.sha256
