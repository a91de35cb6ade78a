"""I9: a node is in touch while it goes by the newest policy, not merely while somebody answers."""

from __future__ import annotations

from dataplane.core.in_touch import InTouch


def test_an_answer_counts_as_of_when_the_report_was_sent() -> None:
    touch = InTouch(0.0)
    assert touch.answered(5.0, newest_version=3, applied_version=3)
    assert touch.since_s == 5.0
    assert touch.answered(4.0, newest_version=3, applied_version=3)
    assert touch.since_s == 5.0, "a late answer takes nothing back"


def test_an_answer_that_knows_a_newer_policy_counts_once_that_is_applied() -> None:
    touch = InTouch(0.0)
    assert not touch.answered(5.0, newest_version=4, applied_version=3)
    assert not touch.answered(7.0, newest_version=9, applied_version=3)
    assert (touch.since_s, touch.behind_s(8.0)) == (0.0, 3.0)
    touch.applied(4)
    assert (touch.since_s, touch.behind_s(8.0)) == (5.0, 0.0)
