from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError
from saltern.names import NamespaceId, TenantId
from tenants.revocation import (
    EVER_S,
    KEEP_S,
    NO_REVOCATIONS,
    REVOCATIONS_MAX,
    Revocation,
    RevocationSet,
    revoke,
)
from tenants.roles import Role
from tenants.tokens import LIFETIME_MAX_S, Audience, Claims

KEYS = [f"{number:016x}" for number in range(100)]


def claims(token_id: str, issued_at_s: int = 1000, lifetime_s: int = 600) -> Claims:
    return Claims(
        issuer="saltern-test",
        subject="tenants/acme/apiKeys/key",
        audience=Audience.NODE,
        tenant=TenantId("acme"),
        namespace=NamespaceId("chat"),
        role=Role.WRITER,
        issued_at_s=issued_at_s,
        expires_at_s=issued_at_s + lifetime_s,
        token_id=token_id,
    )


def test_a_token_is_named_by_its_id_or_by_its_key() -> None:
    token_id = KEYS[1] + KEYS[2]
    assert not NO_REVOCATIONS.covers(claims(token_id))
    assert RevocationSet([Revocation(token_id)]).covers(claims(token_id))
    assert not RevocationSet([Revocation(token_id)]).covers(claims(KEYS[1] + KEYS[3]))
    assert RevocationSet([Revocation(KEYS[1])]).covers(claims(KEYS[1] + KEYS[3]))
    assert not RevocationSet([Revocation(KEYS[1])]).covers(claims(KEYS[2] + KEYS[1]))


def test_the_next_token_of_a_key_whose_tokens_were_revoked_is_good() -> None:
    revoked = RevocationSet([Revocation(KEYS[1], issued_before_s=1001)])
    assert revoked.covers(claims(KEYS[1] + KEYS[2], issued_at_s=1000))
    assert not revoked.covers(claims(KEYS[1] + KEYS[3], issued_at_s=1001))


def test_of_two_revocations_of_the_same_tokens_the_wider_counts() -> None:
    first, second = Revocation(KEYS[1], 1000, 5000), Revocation(KEYS[1], 900, 6000)
    assert RevocationSet([first, second]) == RevocationSet([first])
    assert revoke([first], second, now_s=10).kept == (Revocation(KEYS[1], 1000, 6000),)


@pytest.mark.parametrize("prefix", ["", "abc", "0" * 15, "0" * 17, "0" * 33, "g" * 16, "A" * 16, "0" * 16 + "\n"])
def test_i10_what_names_no_token_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Revocation(prefix)
    assert caught.value.reason == "INVALID_REVOCATION"
    assert not prefix or prefix not in str(caught.value)


acts = st.lists(
    st.tuples(
        st.integers(0, 400),  # seconds since the act before
        st.sampled_from(KEYS),  # whose tokens
        st.sampled_from([*KEYS[:3], ""]),  # one of them, or all
        st.booleans(),  # for ever, or those issued until now
    ),
    max_size=150,
)


@settings(max_examples=300, deadline=None)
@given(acts=acts, lifetime_s=st.integers(5, LIFETIME_MAX_S), later_s=st.integers(0, 2 * KEEP_S))
def test_i10_the_set_never_forgets_a_token_that_could_be_used_and_is_bounded(
    acts: list[tuple[int, str, str, bool]], lifetime_s: int, later_s: int
) -> None:
    """A model that keeps everything for ever: what it refuses, and has not expired, the bounded set refuses."""
    now_s, min_issue_s = 100_000, 0
    kept: tuple[Revocation, ...] = ()
    ever: list[Revocation] = []
    for wait_s, key, suffix, for_ever in acts:
        now_s += wait_s
        revocation = Revocation(key + suffix, EVER_S if for_ever else now_s + 1, now_s + KEEP_S)
        ever.append(revocation)
        outcome = revoke(kept, revocation, now_s)
        kept = outcome.kept
        if outcome.is_widened:
            min_issue_s = now_s + 1
        assert len(kept) <= REVOCATIONS_MAX
    bounded, model = RevocationSet(kept), RevocationSet(ever)
    at_s = now_s + later_s
    for revocation in ever:
        for issued_at_s in {revocation.expires_at_s - KEEP_S, now_s - 1, now_s}:
            token = claims((revocation.token_id_prefix + KEYS[0])[:32], issued_at_s, lifetime_s)
            # A key that was deleted issues nothing after that, so "for ever" names what there was.
            if token.expires_at_s > at_s and issued_at_s <= revocation.expires_at_s - KEEP_S and model.covers(token):
                live = RevocationSet(known for known in kept if known.expires_at_s > at_s)
                assert live.covers(token) or issued_at_s < min_issue_s
    assert len(bounded) <= REVOCATIONS_MAX


def test_i10_a_flood_of_revocations_ends_more_tokens_and_never_fewer() -> None:
    """Somebody with many tokens revokes them one after the other, so that an earlier revocation falls out."""
    now_s, min_issue_s, widened = 100_000, 0, 0
    kept: tuple[Revocation, ...] = ()
    revoked = [claims(f"{number:032x}", now_s - 1, LIFETIME_MAX_S) for number in range(3 * REVOCATIONS_MAX)]
    for number, token in enumerate(revoked):
        outcome = revoke(kept, Revocation(token.token_id, EVER_S, now_s + KEEP_S), now_s)
        kept = outcome.kept
        if outcome.is_widened:
            min_issue_s, widened = now_s + 1, widened + 1
        assert len(kept) <= REVOCATIONS_MAX
        in_force = RevocationSet(kept)
        assert all(in_force.covers(one) or one.issued_at_s < min_issue_s for one in revoked[: number + 1])
    assert widened == 2
