"""The life of the keys that sign tokens, as a function of times and of what the nodes have acknowledged.

::

    published --every node holds it--> signing --another begins to sign--> retiring --its last token has expired-->
    withdrawn

A new key is in the key set before it signs, or a node would refuse a token whose key has not reached it; an old one
stays in the set until nothing that it signed can be good any more, or clients would be refused in the middle of a
token's life. So a rotation refuses nobody. In an emergency every key but a new one is withdrawn at once, and everybody
is refused once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, TypeAlias

#: Added to the lifetime of a token: clocks differ, and a transaction that issues one may be under way.
MARGIN: Final = timedelta(seconds=60)
#: A key signs at the latest so long after it was published: a node that cannot take the policy must not stop rotation.
ACKNOWLEDGE_PATIENCE: Final = timedelta(minutes=10)
#: Nodes that were heard of in this time are waited for: one that is cut off for a moment goes on serving.
RECENT: Final = timedelta(minutes=10)


class KeyState(StrEnum):
    """Where a key is in its life."""

    PUBLISHED = "published"
    SIGNING = "signing"
    RETIRING = "retiring"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class KeyLife:
    """What is known of one signing key.

    Attributes:
        publish_version: the first policy version that holds it.
        sign_time, retire_time: when it began and when it ended to sign; None: it has not.
        not_after_time: no token of it is good from then on; None: that is not decided.
    """

    kid: str
    create_time: datetime
    publish_version: int = 0
    sign_time: datetime | None = None
    retire_time: datetime | None = None
    not_after_time: datetime | None = None

    def state(self, now: datetime) -> KeyState:
        """Where it is at ``now``."""
        if self.not_after_time is not None and self.not_after_time <= now:
            return KeyState.WITHDRAWN
        if self.retire_time is not None:
            return KeyState.RETIRING
        return KeyState.PUBLISHED if self.sign_time is None else KeyState.SIGNING


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node has said last: the policy version it serves, and when it was heard of."""

    applied_version: int
    last_report_time: datetime


@dataclass(frozen=True, slots=True)
class Publish:
    """Make a key and put it into the key set; with ``sign_now`` it signs at once: there is no other."""

    sign_now: bool


@dataclass(frozen=True, slots=True)
class BeginToSign:
    """Let a published key sign; the one that signed retires until ``not_after_time`` and loses its private half."""

    kid: str
    not_after_time: datetime


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take a key out of the key set and forget it: its last token has expired."""

    kid: str


Step: TypeAlias = Publish | BeginToSign | Withdraw


def next_steps(
    keys: Sequence[KeyLife],
    nodes: Iterable[NodeAnswer],
    now: datetime,
    *,
    age_max: timedelta,
    token_lifetime: timedelta,
) -> list[Step]:
    """What is due at ``now``; empty for nothing.

    Args:
        keys: every key that the deployment has.
        nodes: all that are registered.
        age_max: a key that has signed for so long is followed by a new one.
        token_lifetime: the longest that a token is issued for.
    """
    steps: list[Step] = [Withdraw(key.kid) for key in keys if key.state(now) is KeyState.WITHDRAWN]
    signing = [key for key in keys if key.state(now) is KeyState.SIGNING]
    published = [key for key in keys if key.state(now) is KeyState.PUBLISHED]
    if published:
        key = min(published, key=lambda key: (key.create_time, key.kid))
        if not signing or may_sign(key, nodes, now):
            steps.append(BeginToSign(key.kid, now + token_lifetime + MARGIN))
    elif not signing:
        steps.append(Publish(sign_now=True))
    elif all(key.sign_time is not None and key.sign_time + age_max <= now for key in signing):
        steps.append(Publish(sign_now=False))
    return steps


def may_sign(key: KeyLife, nodes: Iterable[NodeAnswer], now: datetime) -> bool:
    """Whether every node that was heard of lately holds the published ``key``, or patience with them is over."""
    if key.create_time + ACKNOWLEDGE_PATIENCE <= now:
        return True
    return all(node.applied_version >= key.publish_version for node in nodes if node.last_report_time > now - RECENT)
