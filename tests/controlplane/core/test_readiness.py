from __future__ import annotations

import pytest

from controlplane.core.readiness import SLOW_MS, DatabaseSeen, ReadyState, Schema, judge

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
