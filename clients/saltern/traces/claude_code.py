"""Recorded Claude Code sessions (the form of kv-cache-tester): one JSON object for each session, one on each line.

::

    {"id": "trace_0010", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "type": "n", "in": 17209, "out": 275, "hash_ids": [1, 2, ...], "stop": "tool_use",
       "api_time": 4.1, "think_time": 0.0},
      {"t": 100.65, "type": "subagent", "agent_id": "agent_001", "requests": [{"t": 0.0, ...}, ...]}, ...]}

Times are in seconds: ``t`` from the start of the session (of the sub-agent, for its requests), ``api_time`` from a
request to the end of its answer, ``think_time`` from there to the next request. Ids are of full blocks, and local to
the session: two sessions share nothing here, whatever they shared when they ran.

The file does not say when sessions started beside each other. Session number k is started at k times
``session_every_s``, and a gap longer than ``gap_max_s`` counts as that: a day's pause is not load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from saltern.errors import SalternError
from saltern.traces.hash_ids import Count
from saltern.traces.lines import SESSION_LINE_MAX_BYTES, Line, read_lines
from saltern.traces.options import LoadOptions, file_provenance, trace_name
from saltern.traces.request import Arrival, Identity, Trace, TraceRequest, block_ids

EXPECTED: Final = (
    'a session: {"id", "block_size", "requests": [{"t": s, "type", "in": n, "out": n, "hash_ids": [id, ...], '
    '"stop", "think_time": s, "api_time": s}, ...]}'
)
_SUBAGENT: Final = "subagent"
#: Ids are made unique by the session's number above this many bits.
_LOCAL_BITS: Final = 32
_SESSIONS_MAX: Final = 2**31

_Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**40)] | Annotated[float, msgspec.Meta(ge=0, le=2**40)]
_LocalId = Annotated[int, msgspec.Meta(ge=0, lt=2**_LOCAL_BITS)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class _Item(msgspec.Struct, rename={"input_tokens": "in", "output_tokens": "out"}):
    t: _Seconds
    type: str = ""
    input_tokens: Count | None = None
    output_tokens: Count = 0
    hash_ids: list[_LocalId] | None = None
    stop: _Name | None = ""
    think_time: _Seconds | None = None
    api_time: _Seconds | None = None
    ttft: _Seconds | None = None
    agent_id: _Name = ""
    requests: list[_Item] | None = None


class _Session(msgspec.Struct):
    id: _Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    requests: list[_Item]
    hash_id_scope: str = "local"


def looks_like(row: Any) -> bool:
    return isinstance(row, dict) and "requests" in row and "block_size" in row


def load(path: Path, options: LoadOptions) -> Trace:
    """The sessions, merged by time. Those that overlap are in memory at once: with the defaults about the number of
    minutes that one lasts."""
    for line in read_lines(path, line_max_bytes=SESSION_LINE_MAX_BYTES):
        block_tokens = line.convert(line.json(), _Session, EXPECTED).block_size
        break
    pacing = f"a session starts every {options.session_every_s:g} s, gaps capped at {options.gap_max_s:g} s"
    return Trace(
        name=trace_name(path),
        provenance=file_provenance(path, "claude-code", steps=(pacing,)),
        block_tokens=block_tokens,
        arrival=Arrival.CLOSED_LOOP,
        identity=Identity.RECORDED,
        identity_note=f"prefix hashes local to a session, full blocks of {block_tokens} tokens: none across sessions",
        notes=(pacing,),
        opener=lambda: _merge(path, block_tokens, options),
    )


def _merge(path: Path, block_tokens: int, options: LoadOptions) -> Iterator[TraceRequest]:
    """All sessions by time; of equal times the earlier session, and in it the earlier request, comes first."""
    waiting: list[tuple[float, int, int, TraceRequest]] = []
    damage: SalternError | None = None
    names: set[str] = set()
    sessions = enumerate(read_lines(path, line_max_bytes=SESSION_LINE_MAX_BYTES))
    while True:
        try:
            number, line = next(sessions)
            start_s = number * options.session_every_s
            session = _session(line, number, block_tokens, names)
            requests = _session_requests(line, session, number, options)
        except StopIteration:
            break
        except SalternError as error:
            damage = error  # what was read before it still goes out first
            break
        while waiting and waiting[0][0] < start_s:
            yield heapq.heappop(waiting)[-1]
        for order, request in enumerate(requests):
            heapq.heappush(waiting, (request.arrival_s, number, order, request))
    while waiting:
        yield heapq.heappop(waiting)[-1]
    if damage is not None:
        raise damage


def _session(line: Line, number: int, block_tokens: int, names: set[str]) -> _Session:
    session = line.convert(line.json(), _Session, EXPECTED)
    if session.block_size != block_tokens:
        line.refuse(
            f"blocks of {session.block_size} tokens in a file of blocks of {block_tokens}",
            "expected one block size in a file: split it, re-block its parts and compose them",
        )
    if session.id in names or number >= _SESSIONS_MAX:
        line.refuse(f"the session {session.id!r} is there twice", "expected another id for every session")
    names.add(session.id)
    return session


def _session_requests(line: Line, session: _Session, number: int, options: LoadOptions) -> list[TraceRequest]:
    """The session's requests and those of its sub-agents by time, on the clock of the whole trace."""
    base = number << _LOCAL_BITS if session.hash_id_scope == "local" else 0
    timed = list(_flatten(line, session.requests, session.id, "", 0.0))
    timed.sort(key=lambda item: item[0])  # stable: a sub-agent runs beside its parent
    made: list[TraceRequest] = []
    at_s, before_s = number * options.session_every_s, None
    begun: set[str] = set()
    for t_s, name, parent, item in timed:
        at_s += 0.0 if before_s is None else min(t_s - before_s, options.gap_max_s)
        before_s = t_s
        ids = _checked_ids(line, item, session.block_size)
        made.append(
            TraceRequest(
                arrival_s=at_s,
                input_tokens=item.input_tokens or 0,
                output_tokens=item.output_tokens,
                block_ids=block_ids([base + local for local in ids] if base else ids),
                session=name,
                parent_session=parent,
                think_s=item.think_time if name in begun else None,
                stop=item.stop or "",
                api_s=item.api_time,
                ttft_s=item.ttft,
            )
        )
        begun.add(name)
    return made


def _flatten(
    line: Line, items: list[_Item], session: str, parent: str, base_s: float
) -> Iterator[tuple[float, str, str, _Item]]:
    """(seconds from the session's start, session or sub-agent, its parent, request)."""
    before_s = 0.0
    for position, item in enumerate(items):
        if item.t < before_s:
            line.refuse(
                f"request {position + 1} of {session!r} is at {item.t} s, before the one before it ({before_s} s)",
                "expected requests in order of t",
            )
        before_s = item.t
        if item.type == _SUBAGENT:
            name = f"{session}/{item.agent_id or position}"
            yield from _flatten(line, item.requests or [], name, session, base_s + item.t)
        else:
            yield base_s + item.t, session, parent, item


def _checked_ids(line: Line, item: _Item, block_tokens: int) -> list[int]:
    if item.hash_ids is None or item.input_tokens is None:
        line.refuse(f"the request at {item.t} s has no hash_ids or no in", f"expected {EXPECTED}")
    full, rest = divmod(item.input_tokens, block_tokens)
    if not full <= len(item.hash_ids) <= full + bool(rest):
        line.refuse(
            f"{len(item.hash_ids)} hash_ids for {item.input_tokens} tokens",
            f"expected {full}: one for each {block_tokens} tokens (is its block size another?)",
        )
    return item.hash_ids
