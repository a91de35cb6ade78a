"""I1: a token verifies if it is of the strict profile, and for one reason at a time not otherwise."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError, UnauthenticatedError
from saltern.keys import Narrowing
from saltern.names import NamespaceId, TenantId
from tenants.roles import PLATFORM_ROLES, TENANT_ROLES, Role
from tenants.tokens import (
    CLOCK_SKEW_S,
    LIFETIME_MAX_S,
    Audience,
    Claims,
    KeySet,
    public_key_from_x,
    public_key_to_x,
    sign_token,
    verify_token,
)
from tests.support.bad_tokens import BadToken, bad_tokens, base64url, good_claims, good_header, sign_raw

NOW_S = 1_800_000_000
ISSUER = "saltern-test"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
KEY_SET = KeySet(ISSUER, {"k1": KEY.public_key()})
GOOD = Claims(
    issuer=ISSUER,
    subject="tenants/acme/apiKeys/key",
    audience=Audience.NODE,
    tenant=TenantId("acme"),
    namespace=NamespaceId("chat"),
    role=Role.WRITER,
    issued_at_s=NOW_S,
    expires_at_s=NOW_S + 600,
    token_id="0123456789abcdef" * 2,
)
BAD = [bad for audience in Audience for bad in bad_tokens(KEY, OTHER_KEY, "k1", ISSUER, NOW_S, audience)]
AUDIENCES = [audience for audience in Audience for _ in bad_tokens(KEY, OTHER_KEY, "k1", ISSUER, NOW_S, audience)]


def verify(token: str, audience: Audience = Audience.NODE, now_s: int = NOW_S) -> Claims:
    return verify_token(token, KEY_SET, audience=audience, now_s=now_s)


def test_i1_a_signed_token_says_what_was_signed() -> None:
    assert verify(sign_token(KEY, "k1", GOOD)) == GOOD


@pytest.mark.parametrize(
    ("narrowing", "group_uid"),
    [
        (Narrowing(user="ann"), ""),
        (Narrowing("p-1", "ann", "s" * 128), ""),
        (Narrowing(), "0b0e7a52-3d4f-4a6b-8c9d-0e1f2a3b4c5d"),
    ],
)
def test_i2_a_token_says_what_its_salts_are_narrowed_to_and_one_that_is_not_says_nothing(
    narrowing: Narrowing, group_uid: str
) -> None:
    narrowed = replace(GOOD, narrowing=narrowing, group_uid=group_uid)
    assert verify(sign_token(KEY, "k1", narrowed)) == narrowed

    claims = json.loads(base64.urlsafe_b64decode(sign_token(KEY, "k1", GOOD).split(".")[1] + "=="))
    assert claims.keys() == good_claims(issuer=ISSUER, now_s=NOW_S, audience=Audience.NODE).keys()


@given(
    role=st.sampled_from(sorted(Role)),
    lifetime_s=st.integers(1, LIFETIME_MAX_S),
    age=st.floats(0, 1, exclude_max=True),
    key_id=st.text("ghijk0123-", min_size=1, max_size=20),
    token_id=st.text("0123456789abcdef", min_size=32, max_size=32),
)
def test_i1_every_well_formed_token_verifies_until_it_expires(
    role: Role, lifetime_s: int, age: float, key_id: str, token_id: str
) -> None:
    tenant_role = role in TENANT_ROLES
    claims = Claims(
        issuer=ISSUER,
        subject=f"apiKeys/{key_id}",
        audience=Audience.NODE if tenant_role else Audience.CONTROL,
        tenant=TenantId("acme") if tenant_role else None,
        namespace=NamespaceId("chat") if tenant_role else None,
        role=role,
        issued_at_s=NOW_S,
        expires_at_s=NOW_S + lifetime_s,
        token_id=token_id,
    )
    token = sign_token(KEY, "k1", claims)
    assert verify(token, claims.audience, NOW_S + int(lifetime_s * age)) == claims
    with pytest.raises(UnauthenticatedError) as caught:
        verify(token, claims.audience, claims.expires_at_s)
    assert caught.value.reason == "TOKEN_EXPIRED"


@pytest.mark.parametrize(("bad", "audience"), list(zip(BAD, AUDIENCES, strict=True)), ids=[bad.name for bad in BAD])
def test_i1_a_bad_token_is_refused_for_its_own_reason(bad: BadToken, audience: Audience) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        verify(bad.token, audience)
    assert caught.value.reason == bad.expected_reason
    shown = str(caught.value) + repr(caught.value.metadata)
    assert not any(part in shown for part in bad.token.split(".") if len(part) > 8), (
        "the error shows a part of the token"
    )
    assert caught.value.__cause__ is None


@given(st.text(max_size=200) | st.binary(max_size=200) | st.none() | st.integers())
def test_i1_no_input_makes_it_fail_otherwise(token: object) -> None:
    with pytest.raises(UnauthenticatedError):
        verify(token)  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.sampled_from("ABCxyz012_-.=\n \0é"))
def test_i1_no_single_changed_character_verifies(position: int, character: str) -> None:
    token = sign_token(KEY, "k1", GOOD)
    position %= len(token)
    changed = token[:position] + character + token[position + 1 :]
    if changed != token:
        with pytest.raises(UnauthenticatedError):
            verify(changed)


json_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)


@given(
    st.sampled_from(["iss", "sub", "aud", "iat", "nbf", "exp", "jti", "tenant", "namespace", "role"])
    | st.sampled_from(["project", "user", "session", "group"]),
    json_values,
)
def test_i1_a_claim_of_any_other_value_says_it_or_is_refused(name: str, value: object) -> None:
    claims = good_claims(issuer=ISSUER, now_s=NOW_S, audience=Audience.NODE)
    token = sign_raw(KEY, good_header("k1"), json.dumps(claims | {name: value}))
    try:
        verified = verify(token)
    except UnauthenticatedError:
        return
    assert verified.issuer == ISSUER and verified.audience is Audience.NODE
    assert verified.issued_at_s <= NOW_S + CLOCK_SKEW_S and verified.expires_at_s > NOW_S
    assert verified.tenant and verified.role in TENANT_ROLES


def test_i1_a_key_that_has_left_the_set_verifies_nothing() -> None:
    token = sign_token(KEY, "k1", GOOD)
    rotated = KeySet(ISSUER, {"k2": OTHER_KEY.public_key()})
    with pytest.raises(UnauthenticatedError) as caught:
        verify_token(token, rotated, audience=Audience.NODE, now_s=NOW_S)
    assert caught.value.reason == "TOKEN_UNKNOWN_KEY"
    both = KeySet(ISSUER, {"k1": KEY.public_key(), "k2": OTHER_KEY.public_key()})
    assert verify_token(token, both, audience=Audience.NODE, now_s=NOW_S) == GOOD


def test_i1_two_keys_do_not_stand_in_for_each_other() -> None:
    both = KeySet(ISSUER, {"k1": KEY.public_key(), "k2": OTHER_KEY.public_key()})
    with pytest.raises(UnauthenticatedError) as caught:
        verify_token(sign_token(KEY, "k2", GOOD), both, audience=Audience.NODE, now_s=NOW_S)
    assert caught.value.reason == "TOKEN_SIGNATURE"


def test_the_issuer_may_be_ahead_by_the_skew_and_no_more() -> None:
    ahead = replace(GOOD, issued_at_s=NOW_S + CLOCK_SKEW_S, expires_at_s=NOW_S + 600)
    assert verify(sign_token(KEY, "k1", ahead)) == ahead
    with pytest.raises(UnauthenticatedError):
        verify(sign_token(KEY, "k1", ahead), now_s=NOW_S - 1)


@pytest.mark.parametrize("role", sorted(PLATFORM_ROLES))
def test_i1_no_platform_role_has_a_tenant(role: Role) -> None:
    with pytest.raises(UnauthenticatedError):
        verify(sign_token(KEY, "k1", replace(GOOD, role=role)))


def test_published_keys_read_back() -> None:
    public = KEY.public_key()
    assert public_key_from_x(public_key_to_x(public)) == public


@pytest.mark.parametrize(
    "x", ["", "A", base64url(bytes(31)), base64url(bytes(33)), base64url(bytes(32)) + "=", "*" * 43, "é" * 43]
)
def test_malformed_published_keys_are_refused(x: str) -> None:
    with pytest.raises(InvalidArgumentError):
        public_key_from_x(x)
