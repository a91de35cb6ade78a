from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.salt_rotation import Epoch, Purge, Rotate, next_rotation_time, rotate, steps_due
from tenants.salts import EPOCHS_READABLE_MAX

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
FIRST = (Epoch(1, NOW),)
graces = st.integers(0, 100).map(lambda hours: timedelta(hours=hours))


def test_the_epoch_before_is_read_for_the_grace_and_the_new_one_is_current() -> None:
    rotation = rotate(FIRST, NOW + HOUR, 2 * HOUR)

    assert rotation.epochs == (Epoch(1, NOW, NOW + 3 * HOUR), Epoch(2, NOW + HOUR))
    assert rotation.ended == ()


def test_i12_without_grace_every_earlier_epoch_ends_at_once() -> None:
    two = rotate(FIRST, NOW, 24 * HOUR).epochs

    rotation = rotate(two, NOW + HOUR, timedelta(0))

    assert rotation.epochs == (Epoch(3, NOW + HOUR),)
    assert rotation.ended == (1, 2)


def test_a_longer_grace_gives_an_earlier_epoch_no_more_time() -> None:
    two = rotate(FIRST, NOW, 2 * HOUR).epochs

    three = rotate(two, NOW + HOUR, 24 * HOUR).epochs

    assert [epoch.read_until_time for epoch in three] == [NOW + 2 * HOUR, NOW + 25 * HOUR, None]


def test_one_epoch_past_the_limit_ends_the_oldest() -> None:
    epochs = FIRST
    for step in range(EPOCHS_READABLE_MAX - 1):
        rotation = rotate(epochs, NOW + step * timedelta(minutes=1), 24 * HOUR)
        assert rotation.ended == ()
        epochs = rotation.epochs

    rotation = rotate(epochs, NOW + HOUR, 24 * HOUR)

    assert len(rotation.epochs) == EPOCHS_READABLE_MAX
    assert rotation.ended == (1,)


@given(st.lists(st.tuples(graces, graces), max_size=30))
def test_i12_whatever_is_rotated_epochs_only_rise_and_none_outlives_a_newer_one(
    rotations: list[tuple[timedelta, timedelta]],
) -> None:
    """Pairs of how long after the one before, and with which grace."""
    epochs, now, ever_ended = FIRST, NOW, set[int]()
    for passed, grace in rotations:
        now += passed
        rotation = rotate(epochs, now, grace)

        numbers = [epoch.number for epoch in rotation.epochs]
        assert numbers[-1] == epochs[-1].number + 1
        assert numbers == sorted(set(numbers)) and len(numbers) <= EPOCHS_READABLE_MAX
        assert set(rotation.ended) == {epoch.number for epoch in epochs} - set(numbers)
        ever_ended |= set(rotation.ended)
        assert not ever_ended & set(numbers)
        ends = [epoch.read_until_time for epoch in rotation.epochs[:-1]]
        assert rotation.epochs[-1].read_until_time is None
        assert all(end is not None and now < end <= now + grace for end in ends)
        assert ends == sorted(ends, key=lambda end: end or now)
        epochs = rotation.epochs


def test_nothing_is_due_before_its_time() -> None:
    epochs = rotate(FIRST, NOW, HOUR).epochs
    due = next_rotation_time(epochs[-1], 2 * HOUR)
    assert due == NOW + 2 * HOUR

    assert steps_due(epochs, due, NOW + HOUR - timedelta(microseconds=1)) == []
    assert steps_due(epochs, due, NOW + HOUR) == [Purge((1,))]
    assert steps_due(epochs, due, NOW + 2 * HOUR) == [Purge((1,)), Rotate()]
    assert steps_due(epochs[1:], due, NOW + 1000 * HOUR) == [Rotate()]


def test_without_a_period_nothing_rotates_by_itself() -> None:
    assert next_rotation_time(FIRST[0], timedelta(0)) is None
    assert steps_due(FIRST, None, NOW + 100_000 * HOUR) == []
