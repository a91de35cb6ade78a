"""A token on its way through vLLM, readable by the engine's connector alone.

The gateway puts the caller's token into ``kv_transfer_params``, and vLLM prints those (``--enable-log-requests``). So
it goes sealed: AES-256-GCM under a key that the API server and the engine's processes read from one file, with the
request's ``cache_salt`` as associated data, so that a sealed token is good for requests of its own salt only.
"""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from saltern.errors import FailedPreconditionError, UnauthenticatedError
from saltern.keys import frame

#: Of ``kv_transfer_params``.
TOKEN_FIELD: Final = "saltern_token"  # noqa: S105 (a field's name)
KEY_FILE_VARIABLE: Final = "SALTERN_GATEWAY_SEAL_KEY_FILE"
SEALED_MAX_CHARS: Final = 8192
_PREFIX: Final = "sealed1."
_LABEL: Final = "saltern/vllm/token/1"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class TokenSeal:
    """Seals and opens tokens; its repr does not show the key.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def __repr__(self) -> str:
        return "TokenSeal(<secret>)"

    @classmethod
    def from_file(cls, path: Path) -> TokenSeal:
        """The seal of a key file; the first process that asks for it makes the file.

        Raises:
            FailedPreconditionError: SEAL_KEY_UNUSABLE: it cannot be read or made, others may read it, or it holds
                something else.
        """
        try:
            key = _read(path)
            if key is None:
                _make(path)
                key = _read(path)
        except OSError as error:
            raise _unusable(path, f"cannot be read or made ({error.strerror or type(error).__name__})") from None
        if key is None:
            raise _unusable(path, "disappeared")
        return cls(key)

    def seal(self, token: str, cache_salt: str) -> str:
        """Seal a token for requests of one ``cache_salt``."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, token.encode(), frame(_LABEL, cache_salt))
        return _PREFIX + base64.urlsafe_b64encode(sealed).decode("ascii")

    def open(self, sealed: str, cache_salt: str) -> str:
        """Open a sealed token.

        Raises:
            UnauthenticatedError: TOKEN_SEAL: it was not sealed with this key for this salt.
        """
        try:
            if not is_sealed(sealed) or len(sealed) > SEALED_MAX_CHARS:
                raise ValueError
            raw = base64.b64decode(sealed[len(_PREFIX) :], altchars=b"-_", validate=True)
            nonce, box = raw[:_NONCE_BYTES], raw[_NONCE_BYTES:]
            return self._cipher.decrypt(nonce, box, frame(_LABEL, cache_salt)).decode()
        except (ValueError, InvalidTag):
            raise UnauthenticatedError(
                "the request's token was not sealed by this deployment's gateway for this cache_salt",
                reason="TOKEN_SEAL",
                hint=f"give the gateway and the engine the same {KEY_FILE_VARIABLE}",
            ) from None


def is_sealed(text: str) -> bool:
    """Whether a text says that it is a sealed token, as opposed to a token as it was issued."""
    return text.startswith(_PREFIX)


def _read(path: Path) -> bytes | None:
    """The key, or None where there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise _unusable(path, "may be read by others")
        text = file.read(4 * _KEY_BYTES)
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise _unusable(path, f"does not hold {_KEY_BYTES} bytes in hexadecimal digits")
    return key


def _make(path: Path) -> None:
    """Make the key file whole or not at all; of several processes at a time one wins."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(_KEY_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _unusable(path: Path, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the gateway's seal key file {path} {why}",
        reason="SEAL_KEY_UNUSABLE",
        hint=f"let {KEY_FILE_VARIABLE} name a file in a folder of the engine's own user; it is made if it is not there",
    )
