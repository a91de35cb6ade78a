"""How a command fails: one exit code and one or two lines for every error, never a traceback unless asked.

====  =====================================================================================
code  means
====  =====================================================================================
0     done
1     a fault of ours, or damaged data
2     wrong use: an argument, option or request that could never work
3     not found, or not permitted (both look the same to a caller who may not know)
4     not authenticated: no API key, a revoked one, a token that does not verify
5     the state does not allow it: exists already, changed meanwhile, precondition not met
6     a quota or limit refused it
7     unavailable, or no answer within the deadline; the same command may work later
8     an audit trail does not verify: it or its checkpoints were changed
130   interrupted
====  =====================================================================================
"""

from __future__ import annotations

import json
from typing import Final

import click

from saltern.errors import SalternError, StatusCode, without_secrets

#: For the end of every help.
EXIT_CODES_TEXT: Final = (
    "0 done, 1 internal, 2 usage, 3 not found or not permitted, 4 not authenticated, 5 precondition or conflict,"
    " 6 quota, 7 unavailable or late, 8 an audit trail that does not verify, 130 interrupted."
)
EXIT_OK: Final = 0
EXIT_INTERNAL: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_VERIFIED: Final = 8
EXIT_INTERRUPTED: Final = 130

_EXIT_CODES: Final[dict[StatusCode, int]] = {
    StatusCode.INTERNAL: EXIT_INTERNAL,
    StatusCode.DATA_LOSS: EXIT_INTERNAL,
    StatusCode.INVALID_ARGUMENT: EXIT_USAGE,
    StatusCode.NOT_FOUND: 3,
    StatusCode.PERMISSION_DENIED: 3,
    StatusCode.UNAUTHENTICATED: 4,
    StatusCode.FAILED_PRECONDITION: 5,
    StatusCode.ALREADY_EXISTS: 5,
    StatusCode.ABORTED: 5,
    StatusCode.RESOURCE_EXHAUSTED: 6,
    StatusCode.DEADLINE_EXCEEDED: 7,
    StatusCode.UNAVAILABLE: 7,
}


def exit_code(error: SalternError) -> int:
    """The process's exit code for ``error``."""
    return _EXIT_CODES.get(error.code, EXIT_INTERNAL)


def error_lines(error: SalternError) -> str:
    """``error: what; why`` and, if there is something to do about it, ``hint: what to do``."""
    hint = f"\nhint: {one_line(error.hint)}" if error.hint else ""
    return f"error: {one_line(error.message)}{hint}"


def error_json(error: SalternError) -> str:
    """The error as one line of JSON for programs, as written to stderr with ``--output json``."""
    body: dict[str, object] = {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "hint": error.hint,
        "metadata": error.metadata,
    }
    if error.retry_after_ms is not None:
        body["retryAfterMs"] = error.retry_after_ms
    return json.dumps({"error": body})


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print lines to stdout or stderr: whatever names and words are in them, they drive no terminal.

    On stderr there are no secrets either, the texts of other libraries' errors included.
    """
    text = without_secrets(text) if err else text
    click.echo("\n".join(map(_printable, text.split("\n"))), err=err, nl=nl)


def one_line(text: str) -> str:
    """``text`` on one line, with everything unprintable escaped: a name must not be able to drive the terminal."""
    return "".join(" " if char in "\r\n\t" else _printable(char) for char in str(text)).strip()


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
