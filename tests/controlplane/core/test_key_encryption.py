"""The life of key-encryption keys: none is used before everybody holds it, none retires while somebody uses it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from controlplane.core.key_encryption import (
    LOST_AFTER,
    Holder,
    KeyLife,
    KeyState,
    Retire,
    Use,
    current_key,
    next_steps,
    state_of,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD = KeyLife("old", NOW - timedelta(days=2), use_time=NOW - timedelta(days=2))
NEW = KeyLife("new", NOW - timedelta(days=1))
USED = KeyLife("new", NEW.create_time, use_time=NOW)


def holder(wraps_with: str, *held: str, ago: timedelta = timedelta(0)) -> Holder:
    return Holder(frozenset(held), wraps_with, NOW - ago)


def test_a_new_key_is_used_once_every_control_plane_holds_it() -> None:
    assert next_steps([OLD, NEW], [holder("old", "old", "new"), holder("old", "old")], NOW) == []
    assert next_steps([OLD, NEW], [holder("old", "old", "new")] * 2, NOW) == [Use("new")]
    assert next_steps([OLD, NEW], [], NOW) == [], "nobody holds it"


def test_a_lost_control_plane_is_not_waited_for() -> None:
    lost = holder("old", "old", ago=LOST_AFTER)
    late = holder("old", "old", ago=LOST_AFTER - timedelta(microseconds=1))
    assert next_steps([OLD, NEW], [holder("old", "old", "new"), lost], NOW) == [Use("new")]
    assert next_steps([OLD, NEW], [holder("old", "old", "new"), late], NOW) == []


def test_an_old_key_retires_once_nobody_wraps_with_it() -> None:
    both = ("old", "new")
    assert next_steps([OLD, USED], [holder("new", *both), holder("old", *both)], NOW) == []
    assert next_steps([OLD, USED], [holder("new", *both)] * 2, NOW) == [Retire("old")]


def test_never_is_the_current_key_retired_and_a_second_new_one_waits_for_its_turn() -> None:
    third = KeyLife("third", NOW)
    everywhere = [holder("old", "old", "new", "third")]
    assert next_steps([OLD, NEW, third], everywhere, NOW) == [Use("new")]
    assert next_steps([USED], [holder("third", "new")], NOW) == []


def test_states() -> None:
    retired = KeyLife("old", NOW, use_time=NOW - timedelta(days=1), retire_time=NOW)
    removed = KeyLife("older", NOW, NOW, NOW, NOW)
    keys = [removed, retired, USED, KeyLife("next", NOW)]
    current = current_key(keys)
    assert current == "new"
    assert [state_of(key, current) for key in keys] == [
        KeyState.REMOVED, KeyState.RETIRED, KeyState.CURRENT, KeyState.PUBLISHED,
    ]  # fmt: skip
    assert state_of(OLD, "new") is KeyState.RETIRING
    assert current_key([NEW]) is None
