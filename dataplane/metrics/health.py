"""Whether a node lives, is ready, or serves with something missing: one judgement for /readyz, gRPC health and metrics.

::

    starting --first policy--> ready <--> degraded --SIGTERM--> draining
                                  (either serves: a degraded node stays in rotation)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class HealthState(StrEnum):
    """See the module's drawing."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"


_SERVING: Final = frozenset({HealthState.READY, HealthState.DEGRADED})


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. ``reason`` is for programs and never changes its meaning."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Health:
    """A state, and what speaks against a better one."""

    state: HealthState
    findings: tuple[Finding, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether clients should be sent here."""
        return self.state in _SERVING


@dataclass(slots=True)
class ControlLink:
    """How the line to the control plane fares; kept by who holds the line.

    Attributes:
        lost_since_s: since when the control plane has not answered, on the clock of ``time.monotonic``; None while it
            does.
        lost_reason: why, as an error's reason.
        refused_version: a newer policy that was offered and could not be applied; 0 if there is none.
        refused_reason: why not, as an error's reason.
    """

    lost_since_s: float | None = None
    lost_reason: str = ""
    refused_version: int = 0
    refused_reason: str = ""

    @property
    def is_connected(self) -> bool:
        return self.lost_since_s is None

    def lost(self, now_s: float, reason: str) -> None:
        """An attempt failed; the first of a row tells since when."""
        if self.lost_since_s is None:
            self.lost_since_s = now_s
        self.lost_reason = reason

    def heard(self) -> None:
        """The control plane answered."""
        self.lost_since_s, self.lost_reason = None, ""

    def refused(self, version: int, reason: str) -> None:
        """A policy could not be applied; the one in force is older than it should be."""
        self.refused_version, self.refused_reason = version, reason

    def applied(self) -> None:
        """The newest policy is in force."""
        self.refused_version, self.refused_reason = 0, ""


def judge(
    *,
    policy_version: int,
    is_draining: bool,
    ssd_state: str | None,
    ssd_reason: str,
    control: ControlLink | None,
    now_s: float,
) -> Health:
    """Say how a node is.

    Args:
        policy_version: the policy in force; 0 before the first.
        ssd_state: ``ok``, ``degraded``, ``read-only`` or ``off``; None where no SSD tier is wanted.
        control: None where nobody follows a control plane.
        now_s: on the clock of ``time.monotonic``.
    """
    if is_draining:
        return Health(HealthState.DRAINING, (Finding("DRAINING", "the node is shutting down"),))
    findings = []
    if control is not None and control.lost_since_s is not None:
        seconds = int(now_s - control.lost_since_s)
        findings.append(
            Finding(
                "CONTROL_PLANE_LOST",
                f"no answer from the control plane for {seconds} s ({control.lost_reason}); serving the last policy",
            )
        )
    if control is not None and control.refused_version:
        findings.append(
            Finding(
                "POLICY_REFUSED",
                f"policy version {control.refused_version} could not be applied ({control.refused_reason}); "
                f"version {policy_version} is in force",
            )
        )
    if ssd_state is not None and ssd_state != "ok":
        reason = "SSD_" + ssd_state.upper().replace("-", "_")
        findings.append(Finding(reason, f"the SSD tier is {ssd_state}: {ssd_reason}" if ssd_reason else ssd_state))
    if not policy_version:
        missing = Finding("NO_POLICY", "the node has not heard yet whom to serve")
        return Health(HealthState.STARTING, (missing, *findings))
    return Health(HealthState.DEGRADED if findings else HealthState.READY, tuple(findings))
