"""Requests with the prefix hashes of their prompts: the Mooncake form and what grew from it.

::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

``timestamp`` is in milliseconds. ``hash_ids`` name the prompt's blocks in order; equal ids mean the same block after
the same prefix. The last block may be partial, or left out. ``output_length`` may be missing; ``tenant`` and
``session_id`` may be there, and in what :func:`encode_request` writes ``parent_session``, ``think_time``, ``api_time``,
``ttft`` (seconds) and ``stop``: a file with think times is a closed-loop trace. (Published with the Mooncake paper,
FAST '25, in blocks of 512 tokens; the hash traces of vLLM and LMCache agents have the same form in blocks of 64.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from saltern.errors import SalternError
from saltern.traces.lines import Line, read_lines
from saltern.traces.options import LoadOptions, Timed, file_provenance, in_order, trace_name
from saltern.traces.request import Arrival, Identity, Trace, TraceRequest, block_ids

EXPECTED: Final = (
    '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}, none negative, '
    '"tenant" and "session_id" where known'
)
#: The published block size, assumed where a file of short prompts fits several.
BLOCK_TOKENS: Final = 512
#: A trace that was written here has its provenance beside it, in a file of its name and this.
PROVENANCE_ENDING: Final = ".provenance.json"
_BLOCK_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
_LOOKED_AT_LINES: Final = 200

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[int, msgspec.Meta(ge=0, le=2**53)] | Annotated[float, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class _Row(msgspec.Struct, omit_defaults=True):
    timestamp: Time
    input_length: Count
    hash_ids: list[BlockId]
    output_length: Count = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""
    session_id: Name | int = ""
    parent_session: Name = ""
    think_time: Time | None = None
    api_time: Time | None = None
    ttft: Time | None = None
    stop: Name = ""


def looks_like(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("hash_ids", ()), list) and "input_length" in row


class _Beside(msgspec.Struct, rename="camel"):
    """What a file of provenance says of the trace beside it."""

    sha256: str
    identity: Identity
    identity_note: str
    block_tokens: Annotated[int, msgspec.Meta(ge=0)]
    notes: list[str] = []


def load(path: Path, options: LoadOptions) -> Trace:
    """The trace. Its block size is what ``options`` says or what the first requests fit.

    One that was written here keeps its labels, by the file of provenance beside it.
    """
    provenance = file_provenance(path, "hash-ids")
    beside = _beside(path, provenance.sha256)
    first = list(_first_rows(read_lines(path)))
    known_tokens = beside.block_tokens if beside else 0
    block_tokens = options.block_tokens or known_tokens or _find_block_tokens(first)
    lengths_only = beside is not None and beside.identity is Identity.NONE
    closed_loop = any(row.think_time is not None for row in first)
    return Trace(
        name=trace_name(path),
        provenance=provenance,
        block_tokens=0 if lengths_only else block_tokens,
        arrival=Arrival.CLOSED_LOOP if closed_loop else Arrival.ABSOLUTE,
        identity=beside.identity if beside else Identity.RECORDED,
        identity_note=beside.identity_note
        if beside
        else f"prefix hashes as the file has them, {block_tokens} tokens a block",
        notes=tuple(beside.notes) if beside else (),
        opener=lambda: in_order(lambda: _read(path, block_tokens, lengths_only), options, rebase=False),
    )


def _beside(path: Path, sha256: str) -> _Beside | None:
    """The labels of a trace that was written here; None where there are none, or they are another file's."""
    try:
        said = msgspec.json.decode((path.parent / (path.name + PROVENANCE_ENDING)).read_bytes(), type=_Beside)
    except (OSError, msgspec.DecodeError):
        return None
    return said if said.sha256 == sha256 else None


def encode_request(request: TraceRequest) -> bytes:
    """One line of this form; times are kept to the microsecond."""
    row = _Row(
        timestamp=round(request.arrival_s * 1000, 3),
        input_length=request.input_tokens,
        hash_ids=request.block_ids.tolist(),
        output_length=request.output_tokens,
        tenant=request.tenant,
        session_id=request.session,
        parent_session=request.parent_session,
        think_time=request.think_s,
        api_time=request.api_s,
        ttft=request.ttft_s,
        stop=request.stop,
    )
    return msgspec.json.encode(row) + b"\n"


def _read(path: Path, block_tokens: int, lengths_only: bool) -> Iterator[Timed]:
    for line in read_lines(path):
        row = line.convert(line.json(), _Row, EXPECTED)
        blocks = len(row.hash_ids)
        full, rest = divmod(row.input_length, block_tokens)
        if not full <= blocks <= full + bool(rest) and not (lengths_only and not blocks):
            line.refuse(
                f"{blocks} hash_ids for {row.input_length} tokens",
                f"expected {full + bool(rest)}: one for each {block_tokens} tokens (is its block size another?)",
            )
        request = TraceRequest(
            arrival_s=0.0,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            block_ids=block_ids(row.hash_ids),
            tenant=row.tenant,
            session=str(row.session_id),
            parent_session=row.parent_session,
            think_s=row.think_time,
            stop=row.stop,
            api_s=row.api_time,
            ttft_s=row.ttft,
        )
        yield line, row.timestamp / 1000, request


def _find_block_tokens(first: Iterable[_Row]) -> int:
    """The size that most of the first requests leave possible; what does not fit it is refused when it is read."""
    sizes = set(_BLOCK_SIZES)
    for row in first:
        fitting = {
            size for size in sizes if row.input_length // size <= len(row.hash_ids) <= -(-row.input_length // size)
        }
        if not fitting:
            break
        sizes = fitting
    return BLOCK_TOKENS if BLOCK_TOKENS in sizes else max(sizes)


def _first_rows(lines: Iterable[Line]) -> Iterator[_Row]:
    """The first sound rows; damage is told by whoever reads the trace, not here."""
    try:
        for line, _ in zip(lines, range(_LOOKED_AT_LINES), strict=False):
            yield line.convert(line.json(), _Row, EXPECTED)
    except SalternError:
        return
