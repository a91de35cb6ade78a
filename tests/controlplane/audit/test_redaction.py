from __future__ import annotations

import pytest

from controlplane.audit.redaction import require_no_secrets
from controlplane.secrets import issue_api_key
from saltern.errors import InternalError, InvalidArgumentError


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "root_secret",
        "rootSecret",
        "access_token",
        "accessToken",
        "TOKEN",
        "password",
        "private_key",
        "salt_key",
        "wrapped_root_secret",
        "secret_sha256",
        "key",
    ],
)
def test_a_name_that_looks_secret_is_refused_at_every_depth(name: str) -> None:
    for value in ({name: ""}, {"a": {"b": [{name: 1}]}}):
        with pytest.raises(InternalError, match="looks like a secret"):
            require_no_secrets(value)


def test_names_of_resources_pass() -> None:
    require_no_secrets(
        {"name": "tenants/a/apiKeys/ci", "block_tokens": 16, "role": "ROLE_WRITER", "etag": "x", "tiers": [{"tier": 1}]}
    )
    require_no_secrets(None)


def test_an_api_key_or_token_in_a_text_is_refused_without_repeating_it() -> None:
    secret = issue_api_key().secret
    token = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"

    for text in (secret, f"before {secret} after", token, "bootstrap-saltern-" + "A" * 43):
        with pytest.raises(InvalidArgumentError) as caught:
            require_no_secrets({"display_name": [text]})
        assert text not in str(caught.value)
