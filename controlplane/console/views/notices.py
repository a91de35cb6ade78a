"""What a page says after a change. A link can name one of these and no text of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NOTICES: Final[Mapping[str, str]] = {
    "key-deleted": "The API key is deleted. Its tokens have ended.",
    "key-exists": "The key was made already; its secret is shown only once.",
    "salt-rotated": "A new salt epoch has begun. All writes go there.",
    "invitation-accepted": "The invitation is accepted: both sides read each other's blocks from now on.",
    "invitation-declined": "The invitation is declined. Nothing is shared.",
    "group-left": "You have left the group. Its salt was rotated: what was shared is out of reach.",
    "logged-out": "You are logged out.",
    "session-ended": "Your session had ended, so nothing was changed. Log in and do it again.",
    "credential-ended": "Your session has ended, because its credential is not good any more.",
}
_VERSION_DIGITS_MAX: Final = 19


def find_notice(name: str | None, version: str | None) -> str:
    """The notice of that name, with the policy version that holds the change; empty for any other."""
    notice = _NOTICES.get(name or "", "")
    if notice and version and version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS_MAX:
        return f"{notice} Policy version {version}: nodes in touch take it up within seconds."
    return notice
