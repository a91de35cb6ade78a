"""A new secret for an API key: what becomes of the one before, over the key's row. Runs in the caller's transaction."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from controlplane.db.models import ApiKey
from controlplane.secrets import IssuedApiKey
from saltern.errors import FailedPreconditionError
from tenants.tokens import LIFETIME_MAX_S

OVERLAP_DEFAULT: Final = timedelta(hours=24)
OVERLAP_MAX: Final = timedelta(days=30)
#: A secret that stays good stays so for as long as a token may live: then none of its tokens outlives it.
SECRET_LIFE_MIN: Final = timedelta(seconds=LIFETIME_MAX_S)


def rotate(
    row: ApiKey,
    issued: IssuedApiKey,
    overlap: timedelta,
    now: datetime,
    *,
    expire_time: datetime | None = None,
    end_previous: bool = False,
) -> list[str]:
    """Give the key (its row locked) the secret ``issued``; the one it had stays good for ``overlap``.

    Args:
        expire_time: when the key expires from now on; None: as before.
        end_previous: end what is left of an earlier overlap.

    Returns:
        The lookups of secrets that end now, before their time: their tokens have to be refused.

    Raises:
        FailedPreconditionError: ROTATION_IN_PROGRESS: an earlier overlap lasts; API_KEY_EXPIRED: with no new
            ``expire_time`` the new secret would be good for nothing.
    """
    is_expired = row.expire_time is not None and row.expire_time <= now
    if is_expired and expire_time is None:
        raise FailedPreconditionError(
            f"the API key {row.id} has expired",
            reason="API_KEY_EXPIRED",
            hint="give a new time for it to expire, or make another key",
        )
    ended = []
    if row.previous_lookup is not None and row.previous_expire_time is not None and row.previous_expire_time > now:
        if not end_previous:
            raise FailedPreconditionError(
                f"the previous secret of the API key {row.id} is good until {row.previous_expire_time:%FT%TZ}",
                reason="ROTATION_IN_PROGRESS",
                hint="a key has two secrets at most: wait until then, or end that one (--end-previous)",
                metadata={"api_key": row.id},
            )
        ended.append(row.previous_lookup)
    row.previous_lookup = row.previous_secret_sha256 = row.previous_expire_time = row.previous_last_used_time = None
    if overlap and not is_expired:
        row.previous_lookup, row.previous_secret_sha256 = row.lookup, row.secret_sha256
        ends = now + overlap
        row.previous_expire_time = ends if row.expire_time is None else min(ends, row.expire_time)
        row.previous_last_used_time = row.last_used_time
    elif not is_expired:
        ended.append(row.lookup)
    row.lookup, row.secret_sha256 = issued.lookup, issued.secret_sha256
    row.rotate_time, row.last_used_time = now, None
    row.expire_time = expire_time or row.expire_time
    return ended
