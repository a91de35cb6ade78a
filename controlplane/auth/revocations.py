"""Ends tokens before they expire: the rules of :mod:`tenants.revocation` over rows. Runs in the caller's transaction.

What is written here reaches every node with the policy version of the same transaction. This service reads it at every
call, so for it there is no delay at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.clock import ceiling_s
from controlplane.db import models
from saltern.errors import ResourceExhaustedError
from saltern.names import TenantId
from tenants.revocation import EVER_S, KEEP_S, REVOCATIONS_MAX, Revocation, Revoked, revoke
from tenants.tokens import CLOCK_SKEW_S

#: Of the platform's tokens, which no node takes: there is no tenant whose tokens could be ended instead.
PLATFORM_REVOCATIONS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Ended:
    """What a revocation did.

    Attributes:
        revocation: as it is in force.
        is_widened: all of the tenant's tokens were ended instead: it had too many revocations in force.
    """

    revocation: Revocation
    is_widened: bool


async def end_tokens(
    session: AsyncSession, tenant: models.Tenant | None, prefix: str, now: datetime, *, issued_before_s: int = EVER_S
) -> Ended:
    """Refuse the tokens of ``tenant`` (locked; None: of the platform) that ``prefix`` names, from the commit on.

    Raises:
        InvalidArgumentError: INVALID_REVOCATION: the prefix names no token.
        ResourceExhaustedError: REVOKED_TOO_FAST, or TOO_MANY_RESOURCES for tokens of the platform.
    """
    now_s = int(now.timestamp())
    revocation = Revocation(prefix, issued_before_s, now_s + KEEP_S)
    owner = None if tenant is None else tenant.id
    rows = models.TokenRevocation.tenant_id.is_not_distinct_from(owner)
    stored = list(await session.scalars(select(models.TokenRevocation).where(rows)))
    in_force = [
        Revocation(row.token_id_prefix, row.issued_before_s, int(row.expire_time.timestamp())) for row in stored
    ]
    outcome = revoke(in_force, revocation, now_s)
    if outcome.is_widened:
        if tenant is None:
            outcome = _all_of_the_platform(in_force, revocation, now_s)
        else:
            end_all_tokens(tenant, now)
    times = {row.token_id_prefix: row.revoke_time for row in stored}
    await session.execute(delete(models.TokenRevocation).where(rows))
    session.add_all(
        models.TokenRevocation(
            tenant_id=owner,
            token_id_prefix=kept.token_id_prefix,
            issued_before_s=kept.issued_before_s,
            revoke_time=times.get(kept.token_id_prefix, now),
            expire_time=datetime.fromtimestamp(kept.expires_at_s, UTC),
        )
        for kept in outcome.kept
    )
    await session.flush()
    return Ended(revocation, outcome.is_widened)


async def end_api_key_tokens(
    session: AsyncSession, tenant: models.Tenant | None, key: models.ApiKey, now: datetime, *, is_deleted: bool
) -> Ended:
    """Refuse every token of an API key from the commit on; unless it is deleted, its next token is good.

    Raises:
        ResourceExhaustedError: as :func:`end_tokens`.
    """
    issued_before = EVER_S
    if not is_deleted:
        key.min_issue_time = _next_issue_time(key.min_issue_time, now)
        issued_before = ceiling_s(key.min_issue_time)
    ended = await end_tokens(session, tenant, key.lookup, now, issued_before_s=issued_before)
    if key.previous_lookup is not None:
        # A rotated key has a second secret, and tokens that begin with the lookup of that one.
        previous = await end_tokens(session, tenant, key.previous_lookup, now, issued_before_s=issued_before)
        ended = Ended(ended.revocation, ended.is_widened or previous.is_widened)
    return ended


def end_all_tokens(tenant: models.Tenant, now: datetime) -> None:
    """Refuse every token of a tenant that was issued until now; the next ones are good.

    Raises:
        ResourceExhaustedError: REVOKED_TOO_FAST.
    """
    tenant.min_issue_time = _next_issue_time(tenant.min_issue_time, now)


async def list_revocations(
    session: AsyncSession, tenant: TenantId | None, after: str, rows_max: int, now: datetime
) -> list[models.TokenRevocation]:
    """Those in force, by prefix, from past ``after`` on."""
    statement = (
        select(models.TokenRevocation)
        .where(
            models.TokenRevocation.tenant_id.is_not_distinct_from(tenant),
            models.TokenRevocation.token_id_prefix > after,
            models.TokenRevocation.expire_time > now,
        )
        .order_by(models.TokenRevocation.token_id_prefix)
        .limit(rows_max)
    )
    return list(await session.scalars(statement))


def _next_issue_time(current: datetime | None, now: datetime) -> datetime:
    """A time after that of every token issued until now, and at which the next one may be issued.

    Token times are whole seconds, and the tokens of a tenant or key are issued at ``current`` at the earliest: so it is
    the second after both. That runs ahead of the clock if done again and again, and verifiers allow only so much.
    """
    issued_s = max(int(now.timestamp()), ceiling_s(current) if current is not None else 0)
    if issued_s + 1 > int(now.timestamp()) + CLOCK_SKEW_S - 1:
        raise ResourceExhaustedError(
            "these tokens were all revoked several times within seconds",
            reason="REVOKED_TOO_FAST",
            hint="wait some seconds; tokens issued until the last time are refused already",
            retry_after_ms=CLOCK_SKEW_S * 1000,
        )
    return datetime.fromtimestamp(issued_s, UTC) + timedelta(seconds=1)


def _all_of_the_platform(in_force: list[Revocation], revocation: Revocation, now_s: int) -> Revoked:
    """More of the platform's than a tenant may have, which only this service reads."""
    kept = {known.token_id_prefix: known for known in in_force if known.expires_at_s > now_s}
    kept[revocation.token_id_prefix] = revocation
    if len(kept) > PLATFORM_REVOCATIONS_MAX:
        raise ResourceExhaustedError(
            f"{PLATFORM_REVOCATIONS_MAX} tokens of the platform are revoked already",
            reason="TOO_MANY_RESOURCES",
            hint=f"delete the API key instead, or rotate the signing key; more than {REVOCATIONS_MAX} are no accident",
            metadata={"limit": str(PLATFORM_REVOCATIONS_MAX)},
        )
    return Revoked(tuple(kept.values()), is_widened=False)
