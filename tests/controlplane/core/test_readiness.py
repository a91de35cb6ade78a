from __future__ import annotations

import pytest

from controlplane.core.readiness import BEHIND_S, SILENT_S, SLOW_MS, DatabaseSeen, NodeSeen, ReadyState, Schema, judge

FINE = DatabaseSeen(round_trip_ms=1.0, is_read_only=False, schema=Schema.CURRENT)


@pytest.mark.parametrize(
    ("database", "state", "reasons"),
    [
        (FINE, ReadyState.READY, []),
        (None, ReadyState.UNREADY, ["DATABASE_UNAVAILABLE"]),
        (DatabaseSeen(SLOW_MS, False, Schema.CURRENT), ReadyState.DEGRADED, ["DATABASE_SLOW"]),
        (DatabaseSeen(1.0, True, Schema.CURRENT), ReadyState.UNREADY, ["DATABASE_READ_ONLY"]),
        (DatabaseSeen(1.0, False, Schema.NEWER), ReadyState.DEGRADED, ["SCHEMA_AHEAD"]),
        (DatabaseSeen(1.0, False, Schema.TOO_NEW), ReadyState.UNREADY, ["SCHEMA_TOO_NEW"]),
        (DatabaseSeen(1.0, False, Schema.OLDER), ReadyState.UNREADY, ["SCHEMA_BEHIND"]),
        (
            DatabaseSeen(SLOW_MS, True, Schema.NEWER),
            ReadyState.UNREADY,
            ["DATABASE_READ_ONLY", "SCHEMA_AHEAD", "DATABASE_SLOW"],
        ),
    ],
)
def test_each_finding_keeps_calls_or_turns_them_away(
    database: DatabaseSeen | None, state: ReadyState, reasons: list[str]
) -> None:
    readiness = judge(database, is_draining=False)
    assert (readiness.state, [finding.reason for finding in readiness.findings]) == (state, reasons)
    assert readiness.is_ready == (state in (ReadyState.READY, ReadyState.DEGRADED))


def test_who_drains_takes_no_calls_however_well_it_is() -> None:
    readiness = judge(FINE, is_draining=True)
    assert (readiness.state, readiness.is_ready) == (ReadyState.DRAINING, False)


@pytest.mark.parametrize(
    ("node", "is_late"),
    [
        (NodeSeen("n", lag=0, behind_s=0, silent_s=1), False),
        (NodeSeen("n", lag=3, behind_s=1, silent_s=1), False),
        (NodeSeen("n", lag=3, behind_s=BEHIND_S, silent_s=1), True),
        (NodeSeen("n", lag=0, behind_s=0, silent_s=SILENT_S), True),
    ],
)
def test_a_node_that_is_frozen_or_does_not_follow_is_named(node: NodeSeen, is_late: bool) -> None:
    readiness = judge(FINE, False, [NodeSeen("other", 0, 0, 0), node])
    assert readiness.is_ready, "another control plane would do no better"
    assert (readiness.state is ReadyState.DEGRADED) == is_late
    assert [finding.reason for finding in readiness.findings] == ["NODES_LATE"] * is_late
    assert not is_late or "n (" in readiness.findings[0].message


def test_a_control_plane_whose_own_work_has_ended_is_to_be_restarted() -> None:
    readiness = judge(FINE, is_draining=False, ended_task="leases")
    assert (readiness.state, [finding.reason for finding in readiness.findings]) == (
        ReadyState.UNREADY,
        ["TASK_ENDED"],
    )
