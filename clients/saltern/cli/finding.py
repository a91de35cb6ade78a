"""What a check of ``saltern doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from saltern.cli.failure import EXIT_INTERNAL, exit_code
from saltern.errors import SalternError


class State(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at.
        detail: what was seen.
        hint: how to mend it; empty where nothing is wrong.
        exit_code: what the command exits with if this is the first failure.
    """

    state: State
    check: str
    detail: str
    hint: str = ""
    exit_code: int = 0


def ok(check: str, detail: str) -> Finding:
    return Finding(State.OK, check, detail)


def warn(check: str, detail: str, hint: str) -> Finding:
    return Finding(State.WARN, check, detail, hint)


def fail(check: str, detail: str, hint: str) -> Finding:
    return Finding(State.FAIL, check, detail, hint, EXIT_INTERNAL)


def failed(check: str, error: SalternError) -> Finding:
    """A failure that an error of the tree explains."""
    return Finding(State.FAIL, check, error.message, error.hint, exit_code(error))
