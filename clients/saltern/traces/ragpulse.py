"""RAGPulse: requests of a university's question answering, as the chunks of content that prompts were made of.

::

    {"timestamp": "82", "input_length": 3112, "output_length": 192, "session_id": "...",
     "hash_ids": {"sys_prompt": [8302, ...], "passages_ids": [...], "history": [...], "web_search": [],
                  "user_input": [...]}}

Chunk ids are position independent: the same passage has the same id wherever it stands. A cache of prefixes reuses a
chunk only after the same chunks before it, so prefix identity is **derived**: the chunks are laid end to end in the
order above, with the lengths that the files ``1_sys_prompt`` to ``5_web_search`` beside the trace give, and cut into
blocks of ``block_tokens``; a block's id is a hash over the id before it and the pieces of chunks in it. The tokens of a
prompt that no chunk accounts for (6 to 12 for each in the published trace: the chat template) stand at its end.

The clock starts again at 0 after each week (the session ids, which hold calendar time, go on): 604,800 s are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from saltern.traces.hash_ids import Count, Name
from saltern.traces.lines import Line, file_sha256, read_lines, refuse
from saltern.traces.options import LoadOptions, Timed, file_provenance, in_order, trace_name
from saltern.traces.request import BLOCK_ID_MAX, Arrival, Identity, Trace, TraceRequest, block_ids

EXPECTED: Final = (
    '{"timestamp": "s", "input_length": n, "output_length": n, "hash_ids": {"sys_prompt": [id, ...], "passages_ids", '
    '"history", "web_search", "user_input"}, "session_id"}'
)
DEFAULT_BLOCK_TOKENS: Final = 64
_WEEK_S: Final = 604_800
#: How near to the ends of a week a clock that starts again must be.
_RESTART_SLACK_S: Final = 3600
#: Part of the file's name: name of the id in it.
_CHUNK_FILES: Final = {
    "1_sys_prompt": "sys_prompt_id",
    "2_passages": "passage_id",
    "3_history": "history_id",
    "4_user_input": "user_input_id",
    "5_web_search": "web_search_id",
}
_TEMPLATE: Final = -1

_ChunkId = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Chunks(msgspec.Struct):
    sys_prompt: list[_ChunkId]
    passages_ids: list[_ChunkId]
    history: list[_ChunkId]
    web_search: list[_ChunkId]
    user_input: list[_ChunkId]

    def ids(self) -> list[int]:
        return [*self.sys_prompt, *self.passages_ids, *self.history, *self.web_search, *self.user_input]


class _Row(msgspec.Struct):
    timestamp: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,12}(\.[0-9]{1,9})?$")]
    input_length: Count
    hash_ids: _Chunks
    output_length: Count = 0
    session_id: Name = ""


def looks_like(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("hash_ids"), dict)


def load(path: Path, options: LoadOptions) -> Trace:
    """The trace, in blocks of 64 tokens unless ``options`` say otherwise; the five chunk files lie beside it."""
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS
    chunk_files = [_chunk_file(path, stem) for stem in _CHUNK_FILES]
    provenance = file_provenance(path, "ragpulse")
    for file in chunk_files:
        provenance = provenance.with_step(f"chunk lengths from {file.name}, sha256 {file_sha256(file)}")
    return Trace(
        name=trace_name(path),
        provenance=provenance,
        block_tokens=block_tokens,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.DERIVED,
        identity_note=f"content chunks laid end to end and cut into blocks of {block_tokens} tokens, hashes chained",
        notes=("the clock of the file starts again each week: 604,800 s are added",),
        opener=lambda: in_order(lambda: _read(path, chunk_files, block_tokens), options, rebase=False),
    )


def _read(path: Path, chunk_files: list[Path], block_tokens: int) -> Iterator[Timed]:
    lengths = _chunk_lengths(chunk_files)
    weeks = 0
    before_s = 0.0
    for line in read_lines(path):
        row = line.convert(line.json(), _Row, EXPECTED)
        at_s = float(row.timestamp)
        if at_s < _RESTART_SLACK_S and before_s > _WEEK_S - _RESTART_SLACK_S:
            weeks += 1
        before_s = at_s
        request = TraceRequest(
            arrival_s=0.0,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            block_ids=block_ids(chain_blocks(_pieces(line, row, lengths), block_tokens)),
            session=row.session_id,
        )
        yield line, at_s + weeks * _WEEK_S, request


def _pieces(line: Line, row: _Row, lengths: dict[int, int]) -> list[tuple[int, int]]:
    """(chunk, tokens) in the order of the prompt."""
    try:
        pieces = [(chunk, lengths[chunk]) for chunk in row.hash_ids.ids()]
    except KeyError as error:
        line.refuse(f"no chunk file has the chunk {error.args[0]}", "expected all five chunk files of the same release")
    rest = row.input_length - sum(tokens for _, tokens in pieces)
    if rest < 0:
        line.refuse(
            f"chunks of {row.input_length - rest} tokens in a prompt of {row.input_length}", f"expected {EXPECTED}"
        )
    return [*pieces, (_TEMPLATE, rest)]


def chain_blocks(pieces: Iterable[tuple[int, int]], block_tokens: int) -> Iterator[int]:
    """Cut (chunk, tokens) laid end to end into blocks; each id is a hash of the one before and of what the block holds.

    Equal chunks after equal chunks give equal ids, whatever stands behind them. The last block may be partial.
    """
    before, room = b"", block_tokens
    digest = blake2b(before, digest_size=8)
    for chunk, tokens in pieces:
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            digest.update(b"%d %d %d;" % (chunk, start, taken))
            start += taken
            room -= taken
            if room == 0:
                before = digest.digest()
                yield int.from_bytes(before) & BLOCK_ID_MAX
                digest, room = blake2b(before, digest_size=8), block_tokens
    if room < block_tokens:
        yield int.from_bytes(digest.digest()) & BLOCK_ID_MAX


def _chunk_file(path: Path, stem: str) -> Path:
    files = [path.parent / f"{stem}.jsonl.gz", path.parent / f"{stem}.jsonl"]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        refuse(
            path,
            1,
            f"the lengths of its chunks are missing: no {stem}.jsonl beside it",
            "put the five files 1_sys_prompt to 5_web_search of the same release into the same folder",
        )
    return found


def _chunk_lengths(files: list[Path]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for file, name in zip(files, _CHUNK_FILES.values(), strict=True):
        for line in read_lines(file):
            row = line.json()
            chunk, tokens = (row.get(name), row.get("token_length")) if isinstance(row, dict) else (None, None)
            if type(chunk) is not int or type(tokens) is not int or not 0 <= tokens < 2**31 or chunk < 0:
                line.refuse("no chunk with its length", f'expected {{"{name}": id, "token_length": n}}')
            if chunk in lengths:
                line.refuse(f"the chunk {chunk} is there twice", "expected another id for every chunk")
            lengths[chunk] = tokens
    return lengths
