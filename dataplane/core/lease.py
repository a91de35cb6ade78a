"""How long this node may grow by its shares of quotas (I9): a lease, counted on the node's own clock.

The control plane may give a share to another node once this one's lease has run out, so from that instant on nothing
here grows: what is there stays and is served, and a put takes the place of the tenant's own entries or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tenants.quota import TierQuota

#: Later than any clock shows.
NEVER_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to grow.

    Attributes:
        expires_ns: until then, on the clock of every ``now_ns`` of the core.
        version: by this policy or a later one; under an earlier one the shares are somebody else's by now.
    """

    expires_ns: int = NEVER_NS
    version: int = 0

    def stops_ns(self, policy_version: int) -> int:
        """From when on nothing grows under ``policy_version``."""
        return self.expires_ns if policy_version >= self.version else 0


def without_growth(quota: TierQuota, used_bytes: int) -> TierQuota:
    """``quota``, but no more than is used now; what is used within the reservation stays reserved (I5)."""
    limit_bytes = min(quota.limit_bytes, used_bytes)
    return TierQuota(min(quota.reserved_bytes, limit_bytes), limit_bytes, quota.weight)
