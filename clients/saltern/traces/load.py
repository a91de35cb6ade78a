"""Reads any trace: finds the format by the first line, or takes the one that is named."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from saltern.errors import InvalidArgumentError
from saltern.traces import claude_code, hash_ids, ragpulse, tables, texts
from saltern.traces.lines import SESSION_LINE_MAX_BYTES, Line, read_lines
from saltern.traces.options import LoadOptions
from saltern.traces.request import Trace


class Format(StrEnum):
    """Formats of trace files; see the modules of their loaders and docs/replay.md."""

    HASH_IDS = "hash-ids"
    CLAUDE_CODE = "claude-code"
    RAGPULSE = "ragpulse"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SERVEGEN = "servegen"
    TEXTS = "texts"
    OPENAI = "openai"
    PROMPTS = "prompts"


_LOADERS: Final[dict[Format, Callable[[Path, LoadOptions], Trace]]] = {
    Format.HASH_IDS: hash_ids.load,
    Format.CLAUDE_CODE: claude_code.load,
    Format.RAGPULSE: ragpulse.load,
    Format.AZURE: tables.load_azure,
    Format.BURSTGPT: tables.load_burstgpt,
    Format.SERVEGEN: tables.load_servegen,
    Format.TEXTS: texts.load_texts,
    Format.OPENAI: texts.load_openai,
    Format.PROMPTS: texts.load_prompts,
}
#: In the order in which they are tried: what has the most particular fields first.
_JSON_FORMATS: Final[tuple[tuple[Format, Callable[[Any], bool]], ...]] = (
    (Format.CLAUDE_CODE, claude_code.looks_like),
    (Format.RAGPULSE, ragpulse.looks_like),
    (Format.HASH_IDS, hash_ids.looks_like),
    (Format.OPENAI, texts.looks_like_openai),
    (Format.TEXTS, texts.looks_like_texts),
)
_CSV_FORMATS: Final[tuple[tuple[Format, Callable[[list[str]], bool]], ...]] = (
    (Format.AZURE, tables.is_azure),
    (Format.BURSTGPT, tables.is_burstgpt),
    (Format.SERVEGEN, tables.is_servegen),
)
_TEXT_ENDINGS: Final = (".txt", ".txt.gz")


def load_trace(path: Path, options: LoadOptions | None = None, *, file_format: Format | None = None) -> Trace:
    """A trace file as a :class:`Trace`; its requests are read when it is iterated.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: reason INVALID_TRACE: it is none of the formats, or damaged where it begins; or an option
            makes no sense.
    """
    return _LOADERS[file_format or detect_format(path)](path, options or LoadOptions())


def detect_format(path: Path) -> Format:
    """The format by the file's first line; plain prompts by the ending ``.txt``, since any text is a prompt.

    Raises:
        NotFoundError, InvalidArgumentError: as :func:`load_trace`.
    """
    if path.name.endswith(_TEXT_ENDINGS):
        return Format.PROMPTS
    line = next(read_lines(path, line_max_bytes=SESSION_LINE_MAX_BYTES))
    if line.text.lstrip().startswith(("{", "[")):
        return _detect_json(line)
    row = tables.cells(line)
    found = next((name for name, looks_like in _CSV_FORMATS if looks_like(row)), None)
    if found is None:
        line.refuse("neither JSON nor a heading that is known", _expected())
    return found


def _detect_json(line: Line) -> Format:
    row = line.json()
    found = next((name for name, looks_like in _JSON_FORMATS if looks_like(row)), None)
    if found is None:
        names = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
        line.refuse(f"a JSON line of no format that is known ({names[:160]})", _expected())
    return found


def _expected() -> str:
    return (
        "expected the first line of one of: hash-ids (timestamp, input_length, hash_ids), claude-code (requests, "
        "block_size), ragpulse, openai (messages), texts (timestamp, input), azure, burstgpt or servegen CSV; or name "
        "the format with --format; plain prompts end in .txt"
    )


def parse_format(text: str) -> Format:
    """A format by its name.

    Raises:
        InvalidArgumentError: there is no such format.
    """
    try:
        return Format(text)
    except ValueError:
        known = ", ".join(Format)
        raise InvalidArgumentError(
            f"there is no trace format {text[:64]!r}", reason="INVALID_TRACE_OPTION", hint=f"choose one of: {known}"
        ) from None
