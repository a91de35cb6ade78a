from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import FailedPreconditionError, InvalidArgumentError, PermissionDeniedError
from saltern.keys import NOT_NARROWED, Narrowing, SaltScope
from tenants.salts import SCOPE_ID_MAX_CHARS, narrow, parse_scope_id

names = st.sampled_from(["", "a", "b", "user"])


@pytest.mark.parametrize("value", ["p-1", "user@example.org", "!~", "x" * SCOPE_ID_MAX_CHARS, ""])
def test_visible_ascii_names_a_scope(value: str) -> None:
    assert parse_scope_id(value, "user_id") == value


@pytest.mark.parametrize("value", [" ", "a b", "a\n", "\0", "é", "\u202e", "x" * (SCOPE_ID_MAX_CHARS + 1), "\ud800"])
def test_another_text_names_none_and_is_not_repeated(value: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_scope_id(value, "user_id")

    assert caught.value.reason == "INVALID_SCOPE_ID"
    assert caught.value.metadata == {"field": "user_id"}
    assert value not in caught.value.message or value == " "


@pytest.mark.parametrize(
    ("scope", "field"), [(SaltScope.PROJECT, "project"), (SaltScope.USER, "user"), (SaltScope.SESSION, "session")]
)
def test_what_the_policy_demands_has_to_be_named(scope: SaltScope, field: str) -> None:
    others = {"project": "p", "user": "u", "session": "s"} | {field: ""}

    with pytest.raises(FailedPreconditionError) as caught:
        narrow(Narrowing(**others), bound_project="", bound_user="", scope=scope)

    assert caught.value.reason == "SALT_SCOPE_REQUIRED"
    assert f"{field}_id" in caught.value.hint
    given_ = Narrowing(**{field: "x"})
    assert narrow(given_, bound_project="", bound_user="", scope=scope) == given_


def test_i2_a_bound_key_is_narrowed_although_it_does_not_ask() -> None:
    narrowed = narrow(NOT_NARROWED, bound_project="p", bound_user="u", scope=SaltScope.TENANT)

    assert narrowed == Narrowing("p", "u")


@given(asked=st.builds(Narrowing, names, names, names), project=names, user=names, scope=st.sampled_from(SaltScope))
def test_i2_a_salt_is_never_wider_than_the_binding_and_the_policy(
    asked: Narrowing, project: str, user: str, scope: SaltScope
) -> None:
    try:
        narrowed = narrow(asked, bound_project=project, bound_user=user, scope=scope)
    except PermissionDeniedError as error:
        assert error.reason == "OUTSIDE_KEY_BINDING"
        pairs = ((project, asked.project), (user, asked.user))
        assert any(bound and wish and wish != bound for bound, wish in pairs)
        return
    except FailedPreconditionError as error:
        assert error.reason == "SALT_SCOPE_REQUIRED"
        return
    assert not project or narrowed.project == project
    assert not user or narrowed.user == user
    for wish, got in (
        (asked.project, narrowed.project),
        (asked.user, narrowed.user),
        (asked.session, narrowed.session),
    ):
        assert not wish or got == wish
    if scope in (SaltScope.PROJECT, SaltScope.USER, SaltScope.SESSION):
        assert getattr(narrowed, scope.value)
