from __future__ import annotations

import hashlib
import re

import pytest

from controlplane.secrets import api_key_matches, issue_api_key, parse_api_key
from saltern.errors import UnauthenticatedError


def test_an_issued_key_has_the_form_and_is_found_and_proved_by_its_parts() -> None:
    issued = issue_api_key()

    assert re.fullmatch(r"sk-saltern-[0-9a-f]{16}-[A-Za-z0-9_-]{43}", issued.secret)
    assert parse_api_key(issued.secret) == issued.lookup
    assert issued.secret_sha256 == hashlib.sha256(issued.secret.encode()).digest()
    assert api_key_matches(issued.secret, issued.secret_sha256)
    assert issue_api_key().secret != issued.secret


def test_neither_the_secret_nor_its_hash_is_in_the_repr() -> None:
    issued = issue_api_key()

    assert issued.secret not in repr(issued)
    assert repr(issued.secret_sha256) not in repr(issued)


def test_another_key_of_the_same_lookup_does_not_match() -> None:
    issued = issue_api_key()
    last = "A" if issued.secret[-1] != "A" else "B"

    assert not api_key_matches(issued.secret[:-1] + last, issued.secret_sha256)
    assert not api_key_matches("\ud800", issued.secret_sha256)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-saltern-",
        "sk-saltern-0123456789abcdef-" + "A" * 42,
        "sk-saltern-0123456789abcdef-" + "A" * 44,
        "sk-saltern-0123456789ABCDEF-" + "A" * 43,
        "sk-saltern-0123456789abcdef-" + "A" * 42 + "=",
        "sk-saltern-0123456789abcdef-" + "A" * 43 + "\n",
        " sk-saltern-0123456789abcdef-" + "A" * 43,
        "sk-saltern-0123456789abcde\0-" + "A" * 43,
        "x" * 10_000,
    ],
)
def test_a_malformed_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        parse_api_key(text)

    assert caught.value.reason == "API_KEY_MALFORMED"
    assert "A" * 20 not in str(caught.value)
