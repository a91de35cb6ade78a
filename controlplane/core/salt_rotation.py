"""The life of a tenant's salt epochs, as a function of times.

::

    current --a newer one begins--> readable --its grace ends--> ended: row, root and entries are gone

One epoch is current and takes every write. Those before it are only read, each until its time; an older one never
outlives a newer one. What has ended is destroyed, not marked: nothing can derive its salts any more (I12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeAlias

from tenants.salts import EPOCHS_READABLE_MAX


@dataclass(frozen=True, slots=True)
class Epoch:
    """One generation; ``read_until_time`` is None for the current one."""

    number: int
    create_time: datetime
    read_until_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation leaves.

    Attributes:
        epochs: those that may be read from now on, ascending, the new one last.
        ended: numbers of those whose roots are to be destroyed in the same act.
    """

    epochs: tuple[Epoch, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rotate:
    """Begin a new epoch: the schedule says so."""


@dataclass(frozen=True, slots=True)
class Purge:
    """Destroy epochs whose grace has ended."""

    numbers: tuple[int, ...]


Step: TypeAlias = Rotate | Purge


def rotate(epochs: Sequence[Epoch], now: datetime, grace: timedelta) -> Rotation:
    """Begin the next epoch at ``now``.

    Args:
        epochs: every epoch that is there, ascending, the current one last; at least that.
        grace: how long the one that was current is read on; 0 ends it and every earlier one.
    """
    until = now + grace
    # An older epoch that outlived a newer one would undo a rotation without grace.
    ends = [(epoch, min(epoch.read_until_time or until, until)) for epoch in epochs]
    readable = [replace(epoch, read_until_time=end) for epoch, end in ends if end > now]
    kept = readable[-(EPOCHS_READABLE_MAX - 1) :]
    numbers = {epoch.number for epoch in kept}
    return Rotation(
        epochs=(*kept, Epoch(epochs[-1].number + 1, now)),
        ended=tuple(epoch.number for epoch in epochs if epoch.number not in numbers),
    )


def next_rotation_time(current: Epoch, period: timedelta) -> datetime | None:
    """When the current epoch is to be followed by another; None where nothing rotates by itself (a period of 0)."""
    return current.create_time + period if period else None


def steps_due(epochs: Sequence[Epoch], next_time: datetime | None, now: datetime) -> list[Step]:
    """What is due of one tenant at ``now``; empty for nothing.

    However long nobody has looked, one rotation is enough: an epoch that nobody used protects nothing.
    """
    steps: list[Step] = []
    over = tuple(epoch.number for epoch in epochs if epoch.read_until_time is not None and epoch.read_until_time <= now)
    if over:
        steps.append(Purge(over))
    if next_time is not None and next_time <= now:
        steps.append(Rotate())
    return steps
