"""The salt key of a sharing group, for a member that has accepted."""

from __future__ import annotations

from typing import TypeAlias
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.caller import not_available
from controlplane.db import models
from controlplane.salts.roots import open_root
from controlplane.secrets import KeyEncryptionKey, group_root_context
from saltern.errors import FailedPreconditionError
from saltern.keys import SaltKey, SaltScope, derive_salt_key
from saltern.names import NamespaceId, SharingGroupId, TenantId

#: Owner and id of a group: its name, taken apart.
GroupName: TypeAlias = tuple[TenantId, SharingGroupId]


async def find_shared_group(session: AsyncSession, name: GroupName, namespace_uid: UUID) -> models.SharingGroup:
    """The group, if the namespace is a member of it that has accepted (I2).

    Raises:
        PermissionDeniedError: RESOURCE_NOT_AVAILABLE: there is no such group, or it is not for this namespace.
    """
    group, member = models.SharingGroup, models.SharingGroupMember
    owner, group_id = name
    statement = (
        select(group)
        .join(member, member.group_uid == group.uid)
        .where(group.tenant_id == owner, group.id == group_id, member.namespace_uid == namespace_uid)
    )
    row = await session.scalar(statement)
    if row is None:
        raise not_available()
    return row


async def derive_group_salts(
    key_encryption_key: KeyEncryptionKey, group: models.SharingGroup
) -> list[tuple[int, SaltKey]]:
    """The (epoch, salt key) of a group, the same for all its members; there is only the current epoch."""
    context = group_root_context(group.uid, group.epoch)
    root = await open_root(key_encryption_key, group.wrapped_root_secret, context)
    salt_key = derive_salt_key(
        root,
        tenant=TenantId(group.tenant_id),
        namespace=NamespaceId(group.id),
        scope=SaltScope.GROUP,
        scope_id=str(group.uid),
        epoch=group.epoch,
    )
    return [(group.epoch, salt_key)]


def require_wide_salt(*, is_narrowed: bool) -> None:
    """Raise FailedPreconditionError (SALT_SCOPE_TOO_NARROW) for who may only have salts narrower than a group's."""
    if is_narrowed:
        raise FailedPreconditionError(
            "a sharing group's salt is narrowed to no project, user or session, and this one would have to be",
            reason="SALT_SCOPE_TOO_NARROW",
            hint="ask for the group without project_id, user_id and session_id, with an API key that is bound to none",
        )
