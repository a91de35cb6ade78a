"""The value that opens the index: nothing is read, written or deleted without one (I2)."""

from __future__ import annotations

from dataclasses import dataclass

from saltern.names import NamespaceId, TenantId


@dataclass(frozen=True, slots=True)
class Partition:
    """One salt epoch of one namespace of one tenant: the walls inside which a block key has a meaning.

    Only :func:`dataplane.core.admission.open_partition` makes one, from a verified token (I1, I2); a test walks the
    sources to keep it so.

    Attributes:
        namespace_uid: distinguishes the namespace from a deleted one of the same name (I12).
        epoch: generation of the tenant's salt; a rotation starts a new partition (I12).
    """

    tenant: TenantId
    namespace: NamespaceId
    namespace_uid: str
    epoch: int
