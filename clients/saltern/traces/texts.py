"""Traces that hold the prompts themselves. Their identity is derived from the text by one simple rule.

**Four characters count as one token** (no tokenizer is asked). A prompt is cut into pieces of ``4 * block_tokens``
characters from its start; a block's id is a hash (BLAKE2b, 63 bits) of the id before it and its piece. So two prompts
share a block if and only if they are equal up to its end. The last piece may be shorter and then is a block of its own.

===========  ===========================================================================================================
format       each line
===========  ===========================================================================================================
``prompts``  a prompt (``.txt``); no times: they are ``spacing_s`` apart
``texts``    ``{"timestamp": us, "input": text, "output": text, "session_id": name}``, as LMCache's agent traces
``openai``   a request to an OpenAI-compatible API with ``messages`` or ``prompt``, bare or under ``request`` or
             ``body``, with its time beside it (``timestamp``, ``created``, ``created_at`` or ``time``: seconds,
             milliseconds or microseconds since 1970, or ISO 8601), and where known its ``response`` or ``usage``,
             ``user`` (the tenant) and ``session_id`` or ``conversation_id``
===========  ===========================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from saltern.traces.hash_ids import Name, Time
from saltern.traces.lines import Line, read_lines
from saltern.traces.options import LoadOptions, Timed, file_provenance, in_order, trace_name
from saltern.traces.request import BLOCK_ID_MAX, Arrival, Identity, Trace, TraceRequest, block_ids

CHARACTERS_PER_TOKEN: Final = 4
DEFAULT_BLOCK_TOKENS: Final = 64
TEXTS_EXPECTED: Final = '{"timestamp": microseconds, "input": text, "output": text, "session_id": name}'
OPENAI_EXPECTED: Final = (
    'a request with "messages" or "prompt", bare or under "request" or "body", and "timestamp", "created" or "time"'
)
_TIME_NAMES: Final = ("timestamp", "created", "created_at", "time")
_SESSION_NAMES: Final = ("session_id", "conversation_id", "thread_id")


class _Text(msgspec.Struct):
    timestamp: Time
    input: str
    output: str = ""
    session_id: Name | int = ""


def looks_like_texts(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("input"), str) and "timestamp" in row


def looks_like_openai(row: Any) -> bool:
    return isinstance(row, dict) and bool({"messages", "prompt"} & _asked(row).keys())


def tokens_of(text: str) -> int:
    """Tokens of a text by the rule above, a started one counting in full."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def text_block_ids(text: str, block_tokens: int) -> Iterator[int]:
    """Ids of the text's blocks, head first."""
    piece_characters = block_tokens * CHARACTERS_PER_TOKEN
    before = b""
    for start in range(0, len(text), piece_characters):
        piece = text[start : start + piece_characters].encode("utf-8", "surrogatepass")
        before = blake2b(before + piece, digest_size=8).digest()
        yield int.from_bytes(before) & BLOCK_ID_MAX


def load_prompts(path: Path, options: LoadOptions) -> Trace:
    """One prompt on each line, ``spacing_s`` apart."""
    spaced = f"no times in the file: requests are {options.spacing_s:g} s apart"
    return _trace(path, "prompts", options, _read_prompts, rebase=False, notes=(spaced,))


def load_texts(path: Path, options: LoadOptions) -> Trace:
    """Prompts and answers with their times."""
    return _trace(path, "texts", options, _read_texts, rebase=True)


def load_openai(path: Path, options: LoadOptions) -> Trace:
    """A log of an OpenAI-compatible API."""
    return _trace(path, "openai", options, _read_openai, rebase=True)


_Read = Callable[[Path, int, LoadOptions], Iterator[Timed]]


def _trace(
    path: Path, file_format: str, options: LoadOptions, read: _Read, *, rebase: bool, notes: tuple[str, ...] = ()
) -> Trace:
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS
    return Trace(
        name=trace_name(path),
        provenance=file_provenance(path, file_format, steps=notes),
        block_tokens=block_tokens,
        arrival=Arrival.ABSOLUTE,
        identity=Identity.DERIVED,
        identity_note=f"text cut into blocks of {4 * block_tokens} characters, 4 of them to a token; hashes chained",
        notes=notes,
        opener=lambda: in_order(partial(read, path, block_tokens, options), options, rebase=rebase),
    )


def _request(
    text: str, block_tokens: int, *, output_tokens: int = 0, session: str = "", tenant: str = ""
) -> TraceRequest:
    return TraceRequest(
        arrival_s=0.0,
        input_tokens=tokens_of(text),
        output_tokens=output_tokens,
        block_ids=block_ids(text_block_ids(text, block_tokens)),
        session=session,
        tenant=tenant,
    )


def _read_prompts(path: Path, block_tokens: int, options: LoadOptions) -> Iterator[Timed]:
    for count, line in enumerate(read_lines(path)):
        yield line, count * options.spacing_s, _request(line.text, block_tokens)


def _read_texts(path: Path, block_tokens: int, options: LoadOptions) -> Iterator[Timed]:
    for line in read_lines(path):
        row = line.convert(line.json(), _Text, TEXTS_EXPECTED)
        answer_tokens = tokens_of(row.output)
        request = _request(row.input, block_tokens, output_tokens=answer_tokens, session=str(row.session_id))
        yield line, row.timestamp / 1e6, request


def _read_openai(path: Path, block_tokens: int, options: LoadOptions) -> Iterator[Timed]:
    for line in read_lines(path):
        row = line.json()
        if not looks_like_openai(row):
            line.refuse("neither messages nor a prompt in it", f"expected {OPENAI_EXPECTED}")
        asked = _asked(row)
        request = _request(
            _prompt_text(line, asked),
            block_tokens,
            output_tokens=_output_tokens(line, row),
            session=_name(line, row, asked, _SESSION_NAMES),
            tenant=_name(line, row, asked, ("tenant", "user")),
        )
        yield line, _time_s(line, row, asked), request


def _asked(row: dict[str, Any]) -> dict[str, Any]:
    """The request itself, where it is inside of an envelope."""
    for name in ("request", "body"):
        inner = row.get(name)
        if isinstance(inner, dict):
            return _asked(inner)
    return row


def _prompt_text(line: Line, asked: dict[str, Any]) -> str:
    """Tools, then the messages with their roles: the order in which chat templates lay them out."""
    if isinstance(asked.get("prompt"), str):
        return str(asked["prompt"])
    messages = asked.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        line.refuse("messages that are no list of objects", f"expected {OPENAI_EXPECTED}")
    parts = [_text(asked["tools"])] if asked.get("tools") else []
    for message in messages:
        parts.append(f"{message.get('role', '')}\n{_text(message.get('content'))}")
        if message.get("tool_calls"):
            parts.append(_text(message["tool_calls"]))
    return "\n".join(parts)


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _output_tokens(line: Line, row: dict[str, Any]) -> int:
    """As the API counted them, otherwise by the length of the answer; 0 where it is not recorded."""
    answer = row.get("response")
    if isinstance(answer, dict) and isinstance(answer.get("body"), dict):
        answer = answer["body"]
    answer = answer if isinstance(answer, dict) else {}
    for holder in (answer, row):
        usage = holder.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if counted is not None:
            if type(counted) is not int or not 0 <= counted < 2**31:
                line.refuse(f"completion_tokens {str(counted)[:32]!r}", "expected a whole number from 0 on")
            return counted
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return 0
    messages = [choice.get("message") for choice in choices if isinstance(choice, dict)]
    return sum(tokens_of(_text(message.get("content"))) for message in messages if isinstance(message, dict))


def _name(line: Line, row: dict[str, Any], asked: dict[str, Any], names: tuple[str, ...]) -> str:
    for holder in (row, asked):
        for name in names:
            value = holder.get(name)
            if value is not None:
                if not isinstance(value, str | int) or isinstance(value, bool) or len(str(value)) > 256:
                    line.refuse(f"{name} is no short name", "expected text of at most 256 characters")
                return str(value)
    return ""


def _time_s(line: Line, row: dict[str, Any], asked: dict[str, Any]) -> float:
    """Seconds since 1970; a number's size says its unit: up to the year 5138 in seconds, then ms, then us."""
    value = next((holder[name] for holder in (row, asked) for name in _TIME_NAMES if name in holder), None)
    hint = f"expected {OPENAI_EXPECTED}"
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
            return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            line.refuse(f"{value[:64]!r} is no time", hint)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e17:
        line.refuse("no time, or none from 1970 on", hint)
    for limit, per_second in ((1e11, 1.0), (1e14, 1e3)):
        if value < limit:
            return value / per_second
    return value / 1e6
