"""Trace files line by line: plain or gzip, bounded in memory, and nothing in them trusted.

Whatever is wrong with a file is one error that names file, line and what was expected; what was sound before that line
has been given by then.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NoReturn, TypeVar, cast

import msgspec

from saltern.errors import InvalidArgumentError, NotFoundError

#: A prompt of a million tokens is about 20 KiB of ids and 4 MiB of text; a longer line than this is no request.
LINE_MAX_BYTES: Final = 8 * 1024 * 1024
#: A session of 10,000 requests on one line, as in the Claude Code form.
SESSION_LINE_MAX_BYTES: Final = 128 * 1024 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"
_HASH_CHUNK_BYTES: Final = 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace file, without its end; ``number`` counts from 1."""

    path: Path
    number: int
    text: str

    def refuse(self, what: str, hint: str) -> NoReturn:
        """Raise InvalidArgumentError, reason INVALID_TRACE, for this line."""
        refuse(self.path, self.number, what, hint)

    def json(self) -> Any:
        """The line as JSON; refuses what JSON has no meaning for (NaN, a name twice), and says where."""
        try:
            return _STRICT_JSON.decode(self.text)
        except (ValueError, RecursionError) as error:
            self.refuse(f"no sound JSON ({_why(error)[:160]})", "expected one JSON object on each line")

    def convert(self, value: Any, shape: type[Shape], expected: str) -> Shape:
        """``value`` as a msgspec Struct, every field checked for type and range."""
        try:
            return msgspec.convert(value, shape)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            self.refuse(str(error)[:200], f"expected {expected}")


def read_lines(path: Path, *, line_max_bytes: int = LINE_MAX_BYTES) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; gzip is recognised by its content.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: reason INVALID_TRACE: it cannot be read, is damaged, truncated or no UTF-8, a line is
            longer than ``line_max_bytes``, or there is no line at all.
    """
    number, found = 0, False
    with ExitStack() as stack:
        file = _open(path, stack)
        while True:
            try:
                raw = file.readline(line_max_bytes + 1)
            except (EOFError, OSError, zlib.error) as error:
                refuse(path, number + 1, f"the file is damaged or truncated ({_why(error)})", "copy it again")
            if not raw:
                break
            number += 1
            if len(raw) > line_max_bytes:
                refuse(
                    path, number, f"the line is longer than {line_max_bytes} bytes", "write one request on each line"
                )
            if number == 1:
                raw = raw.removeprefix(_BOM)
            try:
                text = raw.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                refuse(path, number, f"byte {error.start + 1} is not UTF-8", "save the file as UTF-8")
            if text and not text.isspace():
                found = True
                yield Line(path, number, text)
    if not found:
        refuse(path, 1, "the file holds no request", "name a trace with at least one request")


def file_sha256(path: Path) -> str:
    """SHA-256 of the file as it lies on disk, in hexadecimal; raises as :func:`read_lines` does."""
    digest = hashlib.sha256()
    with ExitStack() as stack:
        file = _open_raw(path, stack)
        try:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
        except OSError as error:
            refuse(path, 1, f"cannot read the file ({_why(error)})", "name a readable file")
    return digest.hexdigest()


def refuse(path: Path, line_number: int, what: str, hint: str) -> NoReturn:
    """Raise the one kind of error for a trace that is not sound."""
    raise InvalidArgumentError(
        f"trace {str(path)!r}, line {line_number}: {what}",
        reason="INVALID_TRACE",
        hint=hint,
        metadata={"line": str(line_number)},
    ) from None


def _open_raw(path: Path, stack: ExitStack) -> IO[bytes]:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        raise NotFoundError(
            f"there is no trace file {str(path)!r}",
            reason="TRACE_NOT_FOUND",
            hint="name a file that is there; docs/replay.md lists the formats that are read",
        ) from None
    except (OSError, ValueError) as error:
        refuse(path, 1, f"cannot open the file ({_why(error)})", "name a readable file")


def _open(path: Path, stack: ExitStack) -> IO[bytes]:
    raw = _open_raw(path, stack)
    try:
        magic = raw.read(len(_GZIP_MAGIC))
        raw.seek(0)
    except OSError as error:
        refuse(path, 1, f"cannot read the file ({_why(error)})", "name a regular file: a trace is read more than once")
    if magic != _GZIP_MAGIC:
        return raw
    return cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw, mode="rb")))


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:64]!r} is there twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_STRICT_JSON: Final = json.JSONDecoder(object_pairs_hook=_unique_names, parse_constant=_no_constant)


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
