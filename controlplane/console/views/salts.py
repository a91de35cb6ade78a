"""A tenant's salt policy and its epochs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from controlplane.console.views import texts
from saltern.admin.v1.salt_policies_pb2 import SaltEpoch, SaltPolicy

SCOPE_HELP: Final = {
    "tenant": "One salt for each namespace, shared by all members of the tenant.",
    "namespace": "One salt for each namespace, shared by all members of the tenant.",
    "project": "One salt for each project: projects do not find each other's blocks.",
    "user": "One salt for each user: users do not find each other's blocks.",
    "session": "One salt for each session: nothing is found again in another one.",
}


@dataclass(frozen=True, slots=True)
class EpochRow:
    number: int
    began: str
    age: str
    until: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class SaltView:
    """``grace_s``: how long the policy lets the epoch before be read after a rotation."""

    scope: str
    scope_help: str
    period: str
    grace: str
    grace_s: int
    next_rotation: str
    epochs: tuple[EpochRow, ...]
    etag: str


def salt_view(policy: SaltPolicy, now: datetime) -> SaltView:
    """The current epoch first."""
    scope = texts.enum_word(SaltPolicy.Scope, policy.scope, "SCOPE_")
    return SaltView(
        scope=scope,
        scope_help=SCOPE_HELP.get(scope, ""),
        period=f"every {texts.duration(policy.rotation_period.seconds)}"
        if policy.rotation_period.seconds
        else "on demand",
        grace=texts.duration(policy.grace_period.seconds),
        grace_s=policy.grace_period.seconds,
        next_rotation=texts.stamp(policy.next_rotation_time, "not scheduled"),
        epochs=tuple(_row(epoch, policy.epoch, now) for epoch in reversed(policy.epochs)),
        etag=policy.etag,
    )


def _row(epoch: SaltEpoch, current: int, now: datetime) -> EpochRow:
    is_current = epoch.epoch == current
    return EpochRow(
        number=epoch.epoch,
        began=texts.stamp(epoch.create_time),
        age=texts.ago(texts.to_datetime(epoch.create_time), now),
        until="takes writes" if is_current else texts.stamp(epoch.read_until_time),
        is_current=is_current,
    )
