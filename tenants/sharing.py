"""Sharing groups: limits that both the control plane and the nodes hold to."""

from __future__ import annotations

from typing import Final

#: Members of one group, those that are invited among them: every session looks at each one's entries.
GROUP_MEMBERS_MAX: Final = 16
#: Groups that one tenant owns, and groups that one tenant is a member of: every node holds them in its policy.
GROUPS_PER_TENANT_MAX: Final = 64
