"""API keys: ``sk-saltern-<16 hex lookup>-<43 base64url secret>``.

The lookup finds the row, the rest proves it. Only SHA-256 of the whole text is stored: its 256 random bits cannot be
guessed from the hash, so nothing slower is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from saltern.errors import UnauthenticatedError

_LOOKUP_BYTES = 8
_SECRET_BYTES = 32
#: Also what the audit trail looks for, so that none is ever written there.
API_KEY_PATTERN = re.compile(r"sk-saltern-([0-9a-f]{16})-[A-Za-z0-9_-]{43}", re.ASCII)


@dataclass(frozen=True, slots=True)
class IssuedApiKey:
    """A new API key: ``secret`` goes to the caller once, the others into the database."""

    secret: str = field(repr=False)
    lookup: str
    secret_sha256: bytes = field(repr=False)


def issue_api_key() -> IssuedApiKey:
    """Make a new API key from the system's random source."""
    lookup = secrets.token_hex(_LOOKUP_BYTES)
    secret = f"sk-saltern-{lookup}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    return IssuedApiKey(secret, lookup, _sha256(secret))


def parse_api_key(text: str) -> str:
    """The lookup of an API key.

    Raises:
        UnauthenticatedError: reason API_KEY_MALFORMED; nothing of the text is in the message.
    """
    match = API_KEY_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UnauthenticatedError(
            "the API key is not of the form sk-saltern-...",
            reason="API_KEY_MALFORMED",
            hint="give the whole key as it was shown when it was created",
        )
    return match.group(1)


def api_key_matches(presented: str, stored_sha256: bytes) -> bool:
    """Whether the presented key is the one whose hash is stored; takes the same time wherever they differ."""
    return hmac.compare_digest(_sha256(presented), stored_sha256)


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
