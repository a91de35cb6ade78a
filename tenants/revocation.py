"""Tokens that are refused although they verify: one token, or all of an API key's that were issued before a time.

A token's id begins with the lookup of the API key that it was exchanged for, so both are a prefix of the id. A
revocation is kept until the last token that it can name has expired; so the set stays small, and forgets nothing that
could still be used. A tenant that needs more than :data:`REVOCATIONS_MAX` of them gets one that covers them all: its
tokens issued before now are refused. That ends more tokens than were named, never fewer (I10), and whoever has an API
key only has to exchange it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from saltern.errors import InvalidArgumentError
from tenants.tokens import CLOCK_SKEW_S, LIFETIME_MAX_S, Claims

#: Of one tenant, at a time. Each is sent to every node with every policy.
REVOCATIONS_MAX: Final = 64
KEY_PREFIX_CHARS: Final = 16
TOKEN_ID_CHARS: Final = 32
#: Later than any token: none of the named ones is good, whenever it was issued.
EVER_S: Final = 2**40
#: How long a revocation is kept: no token that it names lives longer. Twice the skew: the issuer's clock may be ahead
#: of the revoker's by one, and that of a node that verifies behind it by another.
KEEP_S: Final = LIFETIME_MAX_S + 2 * CLOCK_SKEW_S
_PREFIX: Final = re.compile(r"[0-9a-f]{16}(?:[0-9a-f]{16})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Revocation:
    """Refuses the tokens whose id begins with ``token_id_prefix`` and that were issued before ``issued_before_s``.

    Attributes:
        token_id_prefix: 16 hexadecimal digits for an API key's tokens, all 32 for one token.
        issued_before_s: Unix seconds; :data:`EVER_S` for whenever.
        expires_at_s: Unix seconds; the last token that it names has expired then.
    """

    token_id_prefix: str
    issued_before_s: int = EVER_S
    expires_at_s: int = EVER_S

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError (INVALID_REVOCATION) unless the prefix and the times are possible."""
        if _PREFIX.fullmatch(self.token_id_prefix) is None or not 0 <= self.issued_before_s <= EVER_S:
            raise InvalidArgumentError(
                "a revocation names no token id, or no time",
                reason="INVALID_REVOCATION",
                hint=f"a token id has {TOKEN_ID_CHARS} hexadecimal digits, its first {KEY_PREFIX_CHARS} are the key's",
            )


class RevocationSet:
    """The revocations of one tenant that a verifier asks; immutable, one look-up for each length of prefix."""

    __slots__ = ("_issued_before_s",)

    def __init__(self, revocations: Iterable[Revocation] = ()) -> None:
        issued_before_s: dict[str, int] = {}
        for revocation in revocations:
            prefix = revocation.token_id_prefix
            issued_before_s[prefix] = max(revocation.issued_before_s, issued_before_s.get(prefix, 0))
        self._issued_before_s: Final[Mapping[str, int]] = MappingProxyType(issued_before_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RevocationSet) and self._issued_before_s == other._issued_before_s

    def __hash__(self) -> int:
        return hash(frozenset(self._issued_before_s.items()))

    def __len__(self) -> int:
        return len(self._issued_before_s)

    def __iter__(self) -> Iterator[Revocation]:
        return (Revocation(prefix, issued_before_s) for prefix, issued_before_s in self._issued_before_s.items())

    def __repr__(self) -> str:
        return f"RevocationSet({len(self)} revocations)"

    def covers(self, claims: Claims) -> bool:
        """Whether a token with these claims is refused."""
        revoked = self._issued_before_s
        if not revoked:  # the case of nearly every request
            return False
        token_id = claims.token_id
        issued_before_s = max(revoked.get(token_id, 0), revoked.get(token_id[:KEY_PREFIX_CHARS], 0))
        return claims.issued_at_s < issued_before_s


NO_REVOCATIONS: Final = RevocationSet()


@dataclass(frozen=True, slots=True)
class Revoked:
    """What is in force after one more revocation.

    Attributes:
        kept: what the tenant has now, at most :data:`REVOCATIONS_MAX`.
        is_widened: they were too many, and all of the tenant's tokens issued until now have to be refused instead.
    """

    kept: tuple[Revocation, ...]
    is_widened: bool


def revoke(in_force: Iterable[Revocation], revocation: Revocation, now_s: int) -> Revoked:
    """Add ``revocation`` to those in force; what has expired goes, what names the same tokens becomes one."""
    by_prefix = {known.token_id_prefix: known for known in in_force if known.expires_at_s > now_s}
    known = by_prefix.get(revocation.token_id_prefix, revocation)
    by_prefix[revocation.token_id_prefix] = Revocation(
        revocation.token_id_prefix,
        max(known.issued_before_s, revocation.issued_before_s),
        max(known.expires_at_s, revocation.expires_at_s),
    )
    if len(by_prefix) > REVOCATIONS_MAX:
        return Revoked((), is_widened=True)
    return Revoked(tuple(by_prefix.values()), is_widened=False)
