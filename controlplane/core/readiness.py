"""Whether a control plane is ready, or serves with something missing: the judgement behind ``/readyz``.

::

    ready <──> degraded        either is sent calls: another control plane would do no better, or not for long
      │            │
      └──> unready <┘          nothing that it could do now would succeed
      └──> draining            it is shutting down

A schema that a later release has upgraded is no reason to turn calls away as long as this release may go on beside it:
that is how releases are replaced one control plane at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: A round trip that takes so long is one that callers feel: an exchange takes five.
SLOW_MS: Final = 250.0
#: Reports come every two seconds.
SILENT_S: Final = 6.0
#: A policy takes well under a second.
BEHIND_S: Final = 5.0
_NAMED_MAX: Final = 5


class ReadyState(StrEnum):
    """See the module's drawing."""

    READY = "ready"
    DEGRADED = "degraded"
    UNREADY = "unready"
    DRAINING = "draining"


class Schema(StrEnum):
    """How the schema stands to this release."""

    CURRENT = "current"
    NEWER = "newer"
    TOO_NEW = "too new"
    OLDER = "older"


@dataclass(frozen=True, slots=True)
class DatabaseSeen:
    """What a look at the database found.

    Attributes:
        round_trip_ms: of one small transaction, in milliseconds.
        is_read_only: it takes no writes: a standby, or told so.
    """

    round_trip_ms: float
    is_read_only: bool
    schema: Schema


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. ``reason`` is for programs and never changes its meaning."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """A state, and what speaks against a better one."""

    state: ReadyState
    findings: tuple[Finding, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether calls should be sent here."""
        return self.state in (ReadyState.READY, ReadyState.DEGRADED)


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node that may go by its leases.

    Attributes:
        lag: policy versions that the newest one is ahead of what it goes by.
        behind_s: for how long it has been seen to be behind, in seconds; 0 where it is not.
        silent_s: since its last report, in seconds.
    """

    node: str
    lag: int
    behind_s: float
    silent_s: float

    @property
    def is_late(self) -> bool:
        """Whether changes wait for it: it is silent, or does not follow."""
        return self.silent_s >= SILENT_S or self.behind_s >= BEHIND_S


def judge(
    database: DatabaseSeen | None,
    is_draining: bool,
    nodes: Sequence[NodeSeen] = (),
    others: Sequence[Finding] = (),
    *,
    ended_task: str = "",
) -> Readiness:
    """Say how a control plane is.

    Args:
        database: None where it does not answer.
        others: what else hinders it.
        ended_task: work in the background that has ended by itself; empty for none.
    """
    if is_draining:
        return Readiness(ReadyState.DRAINING, (Finding("DRAINING", "the control plane is shutting down"),))
    if database is None:
        return Readiness(ReadyState.UNREADY, (Finding("DATABASE_UNAVAILABLE", "the database does not answer"),))
    prevents: list[Finding] = []
    if ended_task:
        prevents.append(Finding("TASK_ENDED", f"its {ended_task} has ended by a fault of ours: restart it"))
    hinders = list(others)
    if database.is_read_only:
        prevents.append(Finding("DATABASE_READ_ONLY", "the database takes no writes, and every act is a write (I11)"))
    match database.schema:
        case Schema.OLDER:
            prevents.append(Finding("SCHEMA_BEHIND", "the schema is older than this release needs"))
        case Schema.TOO_NEW:
            prevents.append(
                Finding("SCHEMA_TOO_NEW", "a later release has upgraded the schema past what this one knows")
            )
        case Schema.NEWER:
            hinders.append(
                Finding("SCHEMA_AHEAD", "a later release has upgraded the schema; this one may go on for now")
            )
    if database.round_trip_ms >= SLOW_MS:
        hinders.append(Finding("DATABASE_SLOW", f"the database takes {database.round_trip_ms:.0f} ms for a round trip"))
    late = [node for node in nodes if node.is_late]
    if late:
        named = ", ".join(
            f"{node.node} ({node.lag} versions behind, silent for {node.silent_s:.0f} s)" for node in late[:_NAMED_MAX]
        )
        message = f"{len(late)} nodes do not follow the policy and may still go by their leases: {named}"
        hinders.append(Finding("NODES_LATE", message))
    if prevents:
        return Readiness(ReadyState.UNREADY, (*prevents, *hinders))
    return Readiness(ReadyState.DEGRADED if hinders else ReadyState.READY, tuple(hinders))
