"""The collector is held off while a policy is loaded, and is back whatever came of it."""

from __future__ import annotations

import gc

import pytest

from dataplane.collector_pause import collector_paused


def test_the_collector_is_off_inside_and_on_again_behind() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block still holds it off"
    assert gc.isenabled()


def test_a_refused_policy_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError), collector_paused():
        raise ValueError
    assert gc.isenabled()
