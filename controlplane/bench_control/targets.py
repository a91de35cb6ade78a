"""What the control plane is to reach, held against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

#: Names in the report of the audit trail.
EXPORT: Final = "export as JSON Lines, to a file"
VERIFY: Final = "verify, offline"


@dataclass(frozen=True, slots=True)
class Target:
    """One figure and its bound.

    Attributes:
        figure: out of the report; raises KeyError where that part was not measured.
        is_least: the figure is to be at least ``bound``, otherwise at most.
    """

    name: str
    figure: Callable[[Mapping[str, Any]], float]
    bound: float
    is_least: bool = False


TARGETS: Final = (
    Target("token exchanges, each audited, per s", lambda report: report["exchange"]["exchange"]["per_s"], 1_000, True),
    Target("quota change in force on every node, p99 ms", lambda report: report["policy"]["quota_ms"]["p99"], 500),
    Target("revocation refused by every node, p99 ms", lambda report: report["policy"]["revocation_ms"]["p99"], 1_000),
    Target("snapshot loaded by a node, worst, ms", lambda report: report["policy"]["snapshot_load_ms"]["max"], 1_000),
    Target("page of the list of tenants, p99 ms", lambda report: report["policy"]["list_page_ms"]["p99"], 100),
    Target("audit export, events per s", lambda report: _audit(report, EXPORT), 50_000, True),
    Target("audit verification, events per s", lambda report: _audit(report, VERIFY), 100_000, True),
)


def _audit(report: Mapping[str, Any], name: str) -> float:
    per_s: float = report["audit"]["measured"][name]["per_s"]
    return per_s


def judge(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target with its ``figure`` (null where not measured), ``bound``, ``direction`` and ``verdict``."""
    return [_judge(target, report) for target in TARGETS]


def _judge(target: Target, report: Mapping[str, Any]) -> dict[str, Any]:
    figure: float | None = None
    verdict = "not measured"
    with suppress(KeyError):
        figure = target.figure(report)
        is_met = figure >= target.bound if target.is_least else figure <= target.bound
        verdict = "met" if is_met else "missed"
    return {
        "name": target.name,
        "figure": figure,
        "bound": target.bound,
        "direction": "at least" if target.is_least else "at most",
        "verdict": verdict,
    }


def table(judged: list[dict[str, Any]]) -> str:
    """The targets for people."""
    lines = []
    for one in judged:
        figure = "-" if one["figure"] is None else f"{one['figure']:,.0f}"
        lines.append(f"{one['name']:48} {figure:>10}  {one['direction']} {one['bound']:>9,.0f}  {one['verdict']}")
    return "\n".join(lines)
