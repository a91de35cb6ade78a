"""Pages of a list (AIP-158): a token is where the page before ended, and of which list.

A token is opaque to clients, not secret, and not trusted: it only says where to go on in a list that its bearer must be
allowed to read anyway. So it needs no signature, but every field of it is checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from saltern.errors import InvalidArgumentError, SalternError
from saltern.keys import frame
from saltern.names import parse_identifier

_TOKEN_MAX_CHARS = 256
_VERSION = 1
_SEQUENCE_MAX = 2**63 - 1
_RowT = TypeVar("_RowT")


def encode_page_token(collection: str, last: str | int) -> str:
    """The token of the page after ``last``: an identifier, or a sequence number."""
    fields = json.dumps([_VERSION, _digest(collection), last], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(fields).rstrip(b"=").decode("ascii")


def decode_identifier_token(token: str, collection: str) -> str:
    """The identifier after which the page begins; the empty text, which comes before all, for the first page.

    Raises:
        InvalidArgumentError: reason INVALID_PAGE_TOKEN: it is not a token of this collection.
    """
    if not token:
        return ""
    last = _decode(token, collection)
    try:
        return parse_identifier(last, what="page token")  # type: ignore[arg-type]  # checks the type too
    except SalternError:
        raise invalid_token() from None


def decode_name_token(token: str, collection: str, parse: Callable[[str], object]) -> str:
    """As ``decode_identifier_token`` for a list of resource names, of which ``parse`` takes one apart."""
    if not token:
        return ""
    last = _decode(token, collection)
    try:
        parse(last)  # type: ignore[arg-type]  # checks the type too
    except SalternError:
        raise invalid_token() from None
    assert isinstance(last, str), "what is no text is no name"
    return last


def decode_sequence_token(token: str, collection: str) -> int | None:
    """The sequence below which the page begins; None for the first page. Raises as ``decode_identifier_token``."""
    if not token:
        return None
    last = _decode(token, collection)
    if type(last) is not int or not 1 <= last <= _SEQUENCE_MAX:
        raise invalid_token()
    return last


def decode_text_token(token: str, collection: str) -> str:
    """The text that ``encode_page_token`` was given, for the caller to check. Raises as ``decode_identifier_token``."""
    last = _decode(token, collection)
    if not isinstance(last, str):
        raise invalid_token()
    return last


def cut_page(rows: Sequence[_RowT], page_size: int) -> tuple[Sequence[_RowT], _RowT | None]:
    """Of up to ``page_size + 1`` rows the page, and its last row if another page follows."""
    page = rows[:page_size]
    return page, page[-1] if len(rows) > page_size else None


def _decode(token: str, collection: str) -> object:
    if len(token) > _TOKEN_MAX_CHARS:
        raise invalid_token()
    try:
        fields = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise invalid_token() from None
    if not isinstance(fields, list) or len(fields) != 3 or fields[:2] != [_VERSION, _digest(collection)]:
        raise invalid_token()
    return fields[2]


def _digest(collection: str) -> str:
    return hashlib.sha256(frame("saltern/page/1", collection)).hexdigest()[:16]


def invalid_token() -> InvalidArgumentError:
    """The error for a token that is not one of its list."""
    return InvalidArgumentError(
        "page_token is not one that this list has given out",
        reason="INVALID_PAGE_TOKEN",
        hint="send the next_page_token of the last page with the same parent, or none to begin again",
        metadata={"field": "page_token"},
    )
