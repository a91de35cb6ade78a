"""The suite: every case in one list, run against an adapter, each giving one row of a table."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.isolation.adapter import NotOfferedError, StoreAdapter


class Outcome(StrEnum):
    HOLDS = "holds"
    FAILS = "FAILS"
    NOT_OFFERED = "n/a"


@dataclass(frozen=True)
class Verdict:
    """Whether a rule held in one case, and what was seen."""

    holds: bool
    detail: str


@dataclass(frozen=True)
class Case:
    """One thing that may go wrong between tenants.

    Attributes:
        rule: the rule of the design that it tests.
        title: what is tried, in one line.
    """

    rule: str
    title: str
    judge: Callable[[StoreAdapter], Verdict]

    @property
    def name(self) -> str:
        return self.judge.__name__


@dataclass(frozen=True)
class Row:
    """What came of one case."""

    rule: str
    case: str
    outcome: Outcome
    detail: str


CASES: list[Case] = []
Judge = Callable[[StoreAdapter], Verdict]


def case(rule: str, title: str) -> Callable[[Judge], Judge]:
    """Add a case to the suite."""

    def add(judge: Judge) -> Judge:
        CASES.append(Case(rule, title, judge))
        return judge

    return add


def run_case(adapter: StoreAdapter, tried: Case) -> Row:
    """Run one case; whatever it raises is a failure of the store, with where it happened."""
    try:
        verdict = tried.judge(adapter)
    except NotOfferedError as error:
        return Row(tried.rule, tried.title, Outcome.NOT_OFFERED, str(error))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})"
        return Row(tried.rule, tried.title, Outcome.FAILS, detail)
    outcome = Outcome.HOLDS if verdict.holds else Outcome.FAILS
    return Row(tried.rule, tried.title, outcome, verdict.detail)


def by_rule(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda tried: int(tried.rule[1:]))
