"""One judgement of a node: what makes it starting, ready, degraded or draining."""

from __future__ import annotations

from typing import Any

from dataplane.metrics.health import ControlLink, Health, HealthState, judge


def judged(**facts: Any) -> Health:
    usual = {"policy_version": 3, "is_draining": False, "ssd_state": "ok", "ssd_reason": "", "control": ControlLink()}
    return judge(**{**usual, "now_s": 100.0, **facts})


def reasons(health: Health) -> list[str]:
    return [finding.reason for finding in health.findings]


def test_a_node_with_nothing_amiss_is_ready() -> None:
    assert judged() == judged(ssd_state=None, control=None) == Health(HealthState.READY)
    assert judged().is_ready


def test_i9_a_lost_control_plane_degrades_but_the_node_stays_ready() -> None:
    control = ControlLink()
    control.lost(60.0, "UNREACHABLE")
    control.lost(90.0, "DEADLINE_EXCEEDED")
    health = judged(control=control)
    assert health.state is HealthState.DEGRADED and health.is_ready
    assert reasons(health) == ["CONTROL_PLANE_LOST"]
    assert "40 s" in health.findings[0].message
    control.heard()
    assert judged(control=control).state is HealthState.READY


def test_a_refused_policy_degrades_until_the_next_one_is_applied() -> None:
    control = ControlLink()
    control.refused(4, "RESERVATIONS_ABOVE_CAPACITY")
    assert reasons(judged(control=control)) == ["POLICY_REFUSED"]
    control.applied()
    assert judged(control=control).state is HealthState.READY


def test_an_ssd_tier_that_is_not_ok_degrades_with_its_reason() -> None:
    health = judged(ssd_state="read-only", ssd_reason="the device is full")
    assert reasons(health) == ["SSD_READ_ONLY"] and health.is_ready
    assert "the device is full" in health.findings[0].message


def test_without_a_policy_or_while_draining_it_is_not_ready_whatever_else_holds() -> None:
    starting = judged(policy_version=0, ssd_state="off")
    assert starting.state is HealthState.STARTING and not starting.is_ready
    assert reasons(starting) == ["NO_POLICY", "SSD_OFF"]
    draining = judged(is_draining=True, policy_version=0)
    assert draining.state is HealthState.DRAINING and not draining.is_ready
