"""The life of the keys that secrets are wrapped under, as a function of times and of what the control planes report.

::

    published --every control plane holds it--> current --another becomes current--> retiring
        --no control plane wraps with it--> retired --nothing is under it, and somebody says so--> removed

A new key is held everywhere before anything is wrapped under it, or a control plane would find secrets that it cannot
open. An old one retires only when nobody wraps with it: from then on the database refuses it, so what is left under it
can only become less, and a count of zero is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, TypeAlias

#: A control plane that has not reported for so long is not waited for; the database guards against its return.
LOST_AFTER: Final = timedelta(seconds=30)


class KeyState(StrEnum):
    """Where a key is in its life."""

    PUBLISHED = "published"
    CURRENT = "current"
    RETIRING = "retiring"
    RETIRED = "retired"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class KeyLife:
    """What is known of one key; each time is None until that has happened."""

    id: str
    create_time: datetime
    use_time: datetime | None = None
    retire_time: datetime | None = None
    remove_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A control plane, as it reported last.

    Attributes:
        held: keys that it can unwrap with.
        wraps_with: the one that it wraps with.
    """

    held: frozenset[str]
    wraps_with: str
    report_time: datetime


@dataclass(frozen=True, slots=True)
class Use:
    """Wrap with this key from now on."""

    id: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Let nothing more be wrapped under this key."""

    id: str


Step: TypeAlias = Use | Retire


def current_key(keys: Iterable[KeyLife]) -> str | None:
    """The key that new secrets are wrapped under; None before the first one."""
    used = [(key.use_time, key.id) for key in keys if key.use_time is not None and key.retire_time is None]
    return max(used)[1] if used else None


def state_of(key: KeyLife, current: str | None) -> KeyState:
    """Where ``key`` is, ``current`` being the current one."""
    if key.remove_time is not None:
        return KeyState.REMOVED
    if key.retire_time is not None:
        return KeyState.RETIRED
    if key.use_time is None:
        return KeyState.PUBLISHED
    return KeyState.CURRENT if key.id == current else KeyState.RETIRING


def living(holders: Iterable[Holder], now: datetime) -> list[Holder]:
    """The control planes that are waited for."""
    return [holder for holder in holders if now - holder.report_time < LOST_AFTER]


def next_steps(keys: Sequence[KeyLife], holders: Iterable[Holder], now: datetime) -> list[Step]:
    """What is due at ``now``: at most one key begins to be used, and those that nobody wraps with retire."""
    alive, current = living(holders, now), current_key(keys)
    states = {key.id: state_of(key, current) for key in keys}
    for key in sorted(keys, key=lambda key: (key.create_time, key.id)):
        if states[key.id] is KeyState.PUBLISHED and alive and all(key.id in holder.held for holder in alive):
            return [Use(key.id)]  # the one before retires once it is seen that nobody wraps with it
    return [
        Retire(key.id)
        for key in keys
        if states[key.id] is KeyState.RETIRING and all(holder.wraps_with != key.id for holder in alive)
    ]
