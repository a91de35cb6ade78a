"""The Mooncake trace form: one JSON object for each request, one request for each line, plain or gzip.

::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

``timestamp`` is in milliseconds. ``hash_ids`` name the prompt's blocks of 512 tokens in order; equal ids mean the same
block after the same prefix, and the last block may be partial. ``output_length`` may be left out; ``tenant`` may be
added. (Published with the Mooncake paper, FAST '25: the requests and no text.)

A trace is read line by line and nothing in it is trusted: every line has a size limit and every field a type and range.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final, NoReturn, cast

import msgspec

from saltern.errors import InvalidArgumentError, NotFoundError

BLOCK_TOKENS: Final = 512
#: A prompt of a million tokens is about 20 KiB of ids; a longer line than this is no request.
LINE_MAX_BYTES: Final = 4 * 1024 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"
_HASH_CHUNK_BYTES: Final = 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)] | Annotated[float, msgspec.Meta(ge=0, le=2**53)]


class TraceRequest(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "timestamp_ms": "timestamp",
        "input_tokens": "input_length",
        "output_tokens": "output_length",
        "block_ids": "hash_ids",
    },
):
    """One request: when it arrived, how long prompt and answer are, and the ids of the prompt's blocks, head first."""

    timestamp_ms: _Milliseconds
    input_tokens: _Count
    block_ids: Annotated[tuple[_BlockId, ...], msgspec.Meta(min_length=1)]
    output_tokens: _Count = 0
    #: Who sent it; empty where the trace does not say.
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests with their provenance. ``sha256`` is of the file as it lies there, or of :func:`encode_jsonl`."""

    source: str
    sha256: str
    requests: tuple[TraceRequest, ...]


_DECODER: Final = msgspec.json.Decoder(TraceRequest)
_ENCODER: Final = msgspec.json.Encoder()


def read_trace(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, limit_requests: int | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file, at most ``limit_requests`` of them, in the order of the file.

    Args:
        path: a JSONL file; gzip is recognised by its content.
        block_tokens: tokens in one block, against which the number of block ids is checked.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: reason INVALID_TRACE: the file is not readable, damaged or truncated, or a line is not a
            request; the message names file, line and what was expected.
    """
    line_number = 0
    with ExitStack() as stack:
        file = _open(path, stack)
        while limit_requests is None or line_number < limit_requests:
            try:
                line = file.readline(LINE_MAX_BYTES + 1)
            except (EOFError, OSError, zlib.error) as error:
                _refuse(path, line_number + 1, f"the file is damaged or truncated ({_why(error)})", "copy it again")
            if not line:
                break
            line_number += 1
            yield _parse_line(line, path, line_number, block_tokens)
    if line_number == 0 and limit_requests != 0:
        _refuse(path, 1, "the file holds no request", "name a trace with one JSON object for each line")


def encode_jsonl(requests: Iterable[TraceRequest]) -> bytes:
    """The requests as a JSONL file that :func:`read_trace` reads back as equal values."""
    return b"".join(_ENCODER.encode(request) + b"\n" for request in requests)


def file_sha256(path: Path) -> str:
    """SHA-256 of the file as it lies on disk, in hexadecimal; raises as :func:`read_trace` does."""
    digest = hashlib.sha256()
    with ExitStack() as stack:
        file = _open_raw(path, stack)
        try:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
        except OSError as error:
            _refuse(path, 1, f"cannot read the file ({_why(error)})", "name a readable file")
    return digest.hexdigest()


def _open_raw(path: Path, stack: ExitStack) -> IO[bytes]:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no trace file {str(path)!r}",
            reason="TRACE_NOT_FOUND",
            hint="name a JSONL file in the Mooncake form, or leave --trace out to generate agent sessions",
        ) from None
    except (OSError, ValueError) as error:
        _refuse(path, 1, f"cannot open the file ({_why(error)})", "name a readable file")


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    raw = _open_raw(path, stack)
    try:
        magic = raw.read(len(_GZIP_MAGIC))
        raw.seek(0)
    except OSError as error:
        _refuse(path, 1, f"cannot read the file ({_why(error)})", "name a regular file")
    if magic != _GZIP_MAGIC:
        return raw
    unpacked = stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb"))
    return cast(IO[bytes], unpacked)


def _parse_line(line: bytes, path: Path, line_number: int, block_tokens: int) -> TraceRequest:
    if len(line) > LINE_MAX_BYTES:
        _refuse(path, line_number, f"the line is longer than {LINE_MAX_BYTES} bytes", "write one request on each line")
    try:
        request = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse(
            path,
            line_number,
            str(error)[:200],
            'expected {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}, none negative',
        )
    blocks = -(-request.input_tokens // block_tokens)
    if len(request.block_ids) > max(blocks, 1):
        _refuse(
            path,
            line_number,
            f"{len(request.block_ids)} hash_ids for {request.input_tokens} tokens",
            f"expected at most {blocks}: one for each {block_tokens} tokens (is its block size another?)",
        )
    return request


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refuse(path: Path, line_number: int, what: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(
        f"trace {str(path)!r}, line {line_number}: {what}",
        reason="INVALID_TRACE",
        hint=hint,
        metadata={"line": str(line_number)},
    ) from None
