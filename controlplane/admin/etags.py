"""Etags (AIP-154): they change with every change, and with deletion and creation under the same name."""

from __future__ import annotations

import hashlib
import struct
from typing import Final
from uuid import UUID

from saltern.errors import AbortedError
from saltern.keys import frame

_ETAG_CHARS: Final = 20
# ``frame("saltern/etag/1", uid.bytes, *revisions)``, of which a page of a list needs a thousand.
_LABEL: Final = frame("saltern/etag/1")
_UID: Final = struct.Struct("<cQ16s")
_REVISION: Final = struct.Struct("<cQQ")


def make_etag(uid: UUID, *revisions: int) -> str:
    """The etag of a resource in its present form."""
    parts = [_LABEL, _UID.pack(b"b", 16, uid.bytes), *(_REVISION.pack(b"i", 8, revision) for revision in revisions)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:_ETAG_CHARS]


def check_etag(given: str, current: str, name: str) -> None:
    """Raise AbortedError (ETAG_MISMATCH) if the caller gave an etag and it is not the current one."""
    if given and given != current:
        raise AbortedError(
            f"{name} has changed since the etag of this request was read",
            reason="ETAG_MISMATCH",
            hint="read it again, look at what changed, and retry with its new etag",
            metadata={"resource": name},
        )
