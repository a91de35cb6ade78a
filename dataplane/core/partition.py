"""The value that opens the index: nothing is read, written or deleted without one (I2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from saltern.names import NamespaceId, TenantId

#: No uid holds it (dataplane.policy_codec sees to it), so that two uids joined by it are told apart again.
UID_SEPARATOR: Final = "/"


@dataclass(frozen=True, slots=True)
class Partition:
    """One salt epoch of one namespace of one tenant: the walls inside which a block key has a meaning.

    What a namespace has put into a sharing group is a partition of its own, beside those of its private entries.

    Only :func:`dataplane.core.admission.open_partition` makes one, from a verified token (I1, I2); a test walks the
    sources to keep it so.

    Attributes:
        namespace_uid: distinguishes the namespace from a deleted one of the same name (I12).
        epoch: generation of the tenant's salt, or of the group's; a rotation starts a new partition (I12).
        group_uid: of the sharing group; empty for what is the namespace's alone.
    """

    tenant: TenantId
    namespace: NamespaceId
    namespace_uid: str
    epoch: int
    group_uid: str = ""

    @property
    def storage_uid(self) -> str:
        """Names, with the epoch, where a tenant keeps it on disk: its own data key, folder and row of a snapshot."""
        return storage_uid(self.namespace_uid, self.group_uid)


def storage_uid(namespace_uid: str, group_uid: str = "") -> str:
    """Join what tells partitions of one tenant and epoch apart into one name; without a group the namespace's uid."""
    return f"{namespace_uid}{UID_SEPARATOR}{group_uid}" if group_uid else namespace_uid


def split_storage_uid(joined_uid: str) -> tuple[str, str]:
    """The (namespace_uid, group_uid) of a :func:`storage_uid`."""
    namespace_uid, _, group_uid = joined_uid.partition(UID_SEPARATOR)
    return namespace_uid, group_uid
