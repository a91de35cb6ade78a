"""No secret reaches the audit trail: it is kept for years and read by many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from controlplane.secrets.api_keys import API_KEY_PATTERN
from saltern.errors import InternalError, InvalidArgumentError

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_SECRET_WORDS = frozenset(
    {"secret", "secrets", "token", "tokens", "password", "passphrase", "key", "keys", "credential", "credentials"}
    | {"salt", "root", "wrapped", "private", "sha256", "hash", "authorization"}
)
#: Names that hold such a word and are no secret.
_HARMLESS_NAMES = frozenset({"block_tokens", "signing_keys", "token_id", "token_id_prefix"})
#: API keys, tokens, and the bootstrap token (``controlplane.auth.bootstrap``).
_SECRET_TEXT = re.compile(
    rf"{API_KEY_PATTERN.pattern}|eyJ[A-Za-z0-9_-]{{10,}}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+|bootstrap-saltern-[A-Za-z0-9_-]{{43}}",
    re.ASCII,
)
#: What each of them begins with: a text with none of these needs no closer look.
_SECRET_STARTS: Final = ("sk-saltern-", "eyJ", "bootstrap-saltern-")
#: The same, cut off anywhere: messages show the beginning of a long text.
_SECRET_BEGINNING = re.compile(
    r"sk-saltern-[0-9a-f]{8,16}(?:-[A-Za-z0-9_-]*)?|eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*)*|bootstrap-saltern-[A-Za-z0-9_-]{4,}",
    re.ASCII,
)


def require_no_secrets(value: object) -> None:
    """Check a before or after value of an audit event, at every depth.

    Raises:
        InternalError: reason SECRET_IN_AUDIT: a name says that its value is secret: a fault of ours.
        InvalidArgumentError: reason SECRET_IN_FIELD: a text holds an API key or a token: somebody pasted it there.
    """
    match value:
        case Mapping():
            for name, member in value.items():
                if _names_a_secret(name):
                    raise InternalError(
                        f"the audit event holds {name!r}, which looks like a secret", reason="SECRET_IN_AUDIT"
                    )
                require_no_secrets(member)
        case list() | tuple():
            for member in value:
                require_no_secrets(member)
        case str():
            if any(start in value for start in _SECRET_STARTS) and _SECRET_TEXT.search(value):
                raise InvalidArgumentError(
                    "a text of the request holds an API key or a token",
                    reason="SECRET_IN_FIELD",
                    hint="take it out; if others may have seen it, delete that key",
                )


@lru_cache(maxsize=1024)  # the same few names in every event
def _names_a_secret(name: str) -> bool:
    return name not in _HARMLESS_NAMES and bool(_SECRET_WORDS & {word.lower() for word in _WORD.findall(name)})


def redacted(text: str) -> str:
    """``text`` without API keys, tokens and beginnings of them: the trail of a denied attempt keeps the rest."""
    return _SECRET_BEGINNING.sub("<secret>", text)
