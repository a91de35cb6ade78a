"""The life of signing keys against a clock, nodes that answer late or never, and administrators at any moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.key_rotation import (
    ACKNOWLEDGE_PATIENCE,
    MARGIN,
    RECENT,
    BeginToSign,
    KeyLife,
    KeyState,
    NodeAnswer,
    Publish,
    Withdraw,
    may_sign,
    next_steps,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AGE_MAX, LIFETIME = timedelta(days=30), timedelta(minutes=10)


def steps(keys: list[KeyLife], nodes: list[NodeAnswer] | None = None, now: datetime = NOW) -> list[object]:
    return list(next_steps(keys, nodes or [], now, age_max=AGE_MAX, token_lifetime=LIFETIME))


def test_the_first_key_signs_at_once() -> None:
    assert steps([]) == [Publish(sign_now=True)]


def test_a_key_that_is_old_enough_is_followed_by_one_that_waits_for_the_nodes() -> None:
    old = KeyLife("old", NOW - AGE_MAX, sign_time=NOW - AGE_MAX)
    assert steps([old], now=NOW - timedelta(seconds=1)) == []
    assert steps([old]) == [Publish(sign_now=False)]
    new = KeyLife("new", NOW, publish_version=7)
    late, prompt = NodeAnswer(6, NOW), NodeAnswer(7, NOW)
    assert steps([old, new], [late, prompt]) == []
    assert steps([old, new], [prompt, prompt]) == [BeginToSign("new", NOW + LIFETIME + MARGIN)]
    assert steps([old, new], []) == [BeginToSign("new", NOW + LIFETIME + MARGIN)]


def test_a_node_that_is_gone_or_refuses_the_policy_does_not_stop_a_rotation_for_ever() -> None:
    new = KeyLife("new", NOW, publish_version=7)
    gone = NodeAnswer(1, NOW - RECENT)
    refusing = NodeAnswer(1, NOW + ACKNOWLEDGE_PATIENCE)
    assert may_sign(new, [gone], NOW)
    assert not may_sign(new, [NodeAnswer(1, NOW - RECENT + timedelta(seconds=1))], NOW)
    assert not may_sign(new, [refusing], NOW + ACKNOWLEDGE_PATIENCE - timedelta(seconds=1))
    assert may_sign(new, [refusing], NOW + ACKNOWLEDGE_PATIENCE)


def test_a_key_whose_last_token_has_expired_is_withdrawn() -> None:
    signing = KeyLife("signing", NOW, sign_time=NOW)
    retired = KeyLife("retired", NOW, sign_time=NOW, retire_time=NOW, not_after_time=NOW + timedelta(seconds=1))
    assert retired.state(NOW) is KeyState.RETIRING and steps([signing, retired]) == []
    assert steps([signing, retired], now=NOW + timedelta(seconds=1)) == [Withdraw("retired")]


@settings(max_examples=200, deadline=None)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["wait", "wait", "wait", "rotate", "emergency", "hear 0", "hear 1", "lose 0", "find 0"]),
            st.integers(1, 900),  # seconds until the next look
        ),
        max_size=60,
    ),
    age_max_s=st.integers(60, 20_000),
)
def test_i10_no_gap_and_no_token_refused_that_a_rotation_should_not_refuse(
    acts: list[tuple[str, int]], age_max_s: int
) -> None:
    """At every moment exactly one key signs; its tokens are in the set of every node in touch until they expire."""
    now, version, made = NOW, 0, 0
    keys: dict[str, KeyLife] = {}
    nodes = {0: NodeAnswer(0, now), 1: NodeAnswer(0, now)}
    held: dict[int, set[str]] = {0: set(), 1: set()}  # the kids that each node knows
    lost: set[int] = set()
    last_token: dict[str, datetime] = {}  # when the last token of a key expires

    def look() -> None:
        nonlocal version, made
        for step in next_steps(
            list(keys.values()), nodes.values(), now, age_max=timedelta(seconds=age_max_s), token_lifetime=LIFETIME
        ):
            version += 1
            match step:
                case Publish(sign_now):
                    made += 1
                    keys[str(made)] = KeyLife(str(made), now, version, now if sign_now else None)
                case BeginToSign(kid, not_after_time):
                    heard = [node for node in nodes.values() if node.last_report_time > now - RECENT]
                    patient = keys[kid].create_time + ACKNOWLEDGE_PATIENCE > now
                    assert not patient or all(node.applied_version >= keys[kid].publish_version for node in heard)
                    for other in list(keys.values()):
                        if other.sign_time is not None and other.retire_time is None:
                            keys[other.kid] = replace(other, retire_time=now, not_after_time=not_after_time)
                    keys[kid] = replace(keys[kid], sign_time=now)
                case Withdraw(kid):
                    assert last_token.get(kid, now) <= now, "a token of it could still be used"
                    del keys[kid]

    look()
    for act, wait_s in acts:
        match act.split():
            case ["rotate"] if not any(key.state(now) is KeyState.PUBLISHED for key in keys.values()):
                version, made = version + 1, made + 1
                keys[str(made)] = KeyLife(str(made), now, version)
            case ["emergency"]:
                version, made = version + 1, made + 1
                keys = {str(made): KeyLife(str(made), now, version, now)}
                last_token.clear()  # all of them are refused, and shall be
            case ["lose", _]:
                lost.add(0)
            case ["find", _]:
                lost.discard(0)
            case ["hear", number] if int(number) not in lost:
                nodes[int(number)] = NodeAnswer(version, now)
                held[int(number)] = set(keys)
        look()
        (signing,) = [key for key in keys.values() if key.state(now) is KeyState.SIGNING]
        last_token[signing.kid] = now + LIFETIME
        for number, node in nodes.items():
            in_touch = node.applied_version >= signing.publish_version
            assert not in_touch or signing.kid in held[number]
        now += timedelta(seconds=wait_s)
        nodes = {n: node if n in lost else replace(node, last_report_time=now) for n, node in nodes.items()}
