"""What a session's cookie yields, and nothing else does: its name in the database, its seal, its form token.

A cookie is 256 random bits. The database has its hash, and the credential sealed under a key derived from it: whoever
reads the database has no cookie, so can neither be a session nor open what is in it; whoever has a cookie has nothing
once the row is gone. So a session that ends takes the credential along, on every replica at once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from typing import Final, NewType

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.errors import DataLossError
from saltern.keys import frame

#: The value of a cookie: 43 characters of base64url, a secret.
Cookie = NewType("Cookie", str)
CookieHash = NewType("CookieHash", bytes)

_COOKIE_BYTES: Final = 32
_COOKIE_FORM: Final = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)
_NONCE_BYTES: Final = 12


def new_cookie() -> Cookie:
    """A cookie that nobody has had before: made at every log-in, so that none is fixed beforehand by somebody else."""
    return Cookie(secrets.token_urlsafe(_COOKIE_BYTES))


def parse_cookie(text: str | None) -> Cookie | None:
    """``text`` if it has the form of a cookie."""
    return Cookie(text) if text is not None and _COOKIE_FORM.fullmatch(text) is not None else None


def cookie_sha256(cookie: Cookie) -> CookieHash:
    """What the database knows of a cookie; plain SHA-256, because 256 random bits are not guessed."""
    return CookieHash(hashlib.sha256(frame("saltern/console-cookie/1", cookie)).digest())


def form_token(cookie: Cookie) -> str:
    """What every form of a session carries besides the cookie, which a page of another site cannot know."""
    return base64.urlsafe_b64encode(_derive(cookie, "saltern/console-form/1")).rstrip(b"=").decode("ascii")


def is_form_token(cookie: Cookie, shown: str) -> bool:
    """Whether ``shown`` is the form token of ``cookie``; takes as long for any wrong one."""
    return hmac.compare_digest(form_token(cookie).encode("ascii"), shown.encode("utf-8", "replace"))


def seal(cookie: Cookie, secret: bytes) -> bytes:
    """Encrypt ``secret`` (AES-256-GCM) so that only the same cookie opens it."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _cipher(cookie).encrypt(nonce, secret, cookie_sha256(cookie))


def unseal(cookie: Cookie, sealed: bytes) -> bytes:
    """Decrypt; raises DataLossError (SESSION_DAMAGED) for what was sealed under another cookie, or damaged."""
    try:
        return _cipher(cookie).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], cookie_sha256(cookie))
    except (InvalidTag, ValueError):
        raise DataLossError(
            "a session of the console does not open", reason="SESSION_DAMAGED", hint="log in again"
        ) from None


def _cipher(cookie: Cookie) -> AESGCM:
    return AESGCM(_derive(cookie, "saltern/console-seal/1"))


def _derive(cookie: Cookie, purpose: str) -> bytes:
    return hmac.digest(cookie.encode("ascii"), frame(purpose), "sha256")
