"""What somebody pastes into the wrong field is in no error: errors are logged, shown on screens and sent to others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saltern.endpoints import parse_endpoint
from saltern.errors import SalternError, UnavailableError
from saltern.names import parse_api_key_name, parse_identifier, parse_namespace_name
from saltern.sizes import parse_size

API_KEY = "sk-saltern-0123456789abcdef-" + "A-b_" * 10 + "xyz"
BOOTSTRAP = "bootstrap-saltern-" + "A-b_" * 10 + "xyz"
TOKEN = "eyJhbGciOiJFZERTQSIsImtpZCI6IjdlOWUyOTA1YWViNjljYzgifQ.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize("secret", [API_KEY, BOOTSTRAP, TOKEN])
@pytest.mark.parametrize(
    "parse",
    [
        lambda text: parse_identifier(text, what="tenant"),
        lambda text: parse_api_key_name(f"tenants/{text}"),
        lambda text: parse_namespace_name(text),
        lambda text: parse_size(text, what="--dram"),
        lambda text: parse_endpoint(text, what="--control"),
    ],
)
def test_i1_no_error_shows_a_secret_that_was_pasted_into_a_field(parse: Callable[[str], object], secret: str) -> None:
    with pytest.raises(SalternError) as caught:
        parse(secret)
    shown = f"{caught.value} {caught.value!r} {vars(caught.value)}"
    assert secret[20:36] not in shown and "<secret>" in shown


def test_i1_a_secret_in_what_another_side_answered_goes_no_further() -> None:
    error = UnavailableError(f"the proxy refused 'Bearer {TOKEN}'")
    assert str(error) == repr(error.message).strip('"') == "the proxy refused 'Bearer <secret>'"


def test_what_an_api_key_looks_like_may_be_said() -> None:
    assert str(SalternError("of the form sk-saltern-...")) == "of the form sk-saltern-..."
