"""KeyEncryptionKeyService: what secrets are wrapped under, how far a rotation has got, and the end of an old key."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.admin.fields import to_timestamp
from controlplane.admin.service import AdminServicer, Change, method
from controlplane.caller import authorise
from controlplane.core.key_encryption import KeyState, current_key, living, state_of
from controlplane.db.locks import lock_key_encryption_keys
from controlplane.db.models import KeyEncryptionKey
from controlplane.key_encryption.encryption_keys import EncryptionKeys, load_rows, to_life
from controlplane.key_encryption.keeper import RESOURCE, load_holders
from controlplane.key_encryption.rewrapping import count_wrapped
from controlplane.rpc import Context
from saltern.admin.v1 import key_encryption_keys_pb2 as pb2
from saltern.admin.v1 import key_encryption_keys_pb2_grpc as pb2_grpc
from saltern.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from tenants.roles import Permission

_ID: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_STATES: Final = {
    KeyState.PUBLISHED: pb2.KeyEncryptionKey.STATE_PUBLISHED,
    KeyState.CURRENT: pb2.KeyEncryptionKey.STATE_CURRENT,
    KeyState.RETIRING: pb2.KeyEncryptionKey.STATE_RETIRING,
    KeyState.RETIRED: pb2.KeyEncryptionKey.STATE_RETIRED,
    KeyState.REMOVED: pb2.KeyEncryptionKey.STATE_REMOVED,
}


class KeyEncryptionKeyService(AdminServicer, pb2_grpc.KeyEncryptionKeyServiceServicer):
    service = "saltern.admin.v1.KeyEncryptionKeyService"

    @property
    def _keys(self) -> EncryptionKeys:
        keys = self._parts.encryption_keys
        assert keys is not None, "a control plane has them; only parts of one are without"
        return keys

    @method
    async def ListKeyEncryptionKeys(
        self, request: pb2.ListKeyEncryptionKeysRequest, context: Context
    ) -> pb2.ListKeyEncryptionKeysResponse:
        authorise(Permission.ENCRYPTION_KEYS_READ, None)
        async with self._database.transaction() as session:
            return await self._list(session, self._parts.clock())

    @method
    async def RotateKeyEncryptionKey(
        self, request: pb2.RotateKeyEncryptionKeyRequest, context: Context
    ) -> pb2.KeyEncryptionKey:
        authorise(Permission.ENCRYPTION_KEYS_MANAGE, None)

        async def act(session: AsyncSession, now: datetime) -> Change[pb2.KeyEncryptionKey]:
            await lock_key_encryption_keys(session)
            rows = await load_rows(session)
            _require_settled(rows)
            row = await self._keys.next_key(rows, now)
            session.add(row)
            after = _encode(row, [*rows, row], {}, 0)
            return Change(tenant=None, resource=f"{RESOURCE}/{row.id}", response=after, after=after)

        return await self._change("RotateKeyEncryptionKey", request, pb2.KeyEncryptionKey, act)

    @method
    async def RemoveKeyEncryptionKey(
        self, request: pb2.RemoveKeyEncryptionKeyRequest, context: Context
    ) -> pb2.KeyEncryptionKey:
        authorise(Permission.ENCRYPTION_KEYS_MANAGE, None)
        if _ID.fullmatch(request.id) is None:
            raise InvalidArgumentError(
                "id is not the id of a key-encryption key",
                reason="INVALID_KEY_ID",
                hint="16 hexadecimal digits, as `saltern key-encryption-key list` shows them; never the key itself",
            )

        async def act(session: AsyncSession, now: datetime) -> Change[pb2.KeyEncryptionKey]:
            await lock_key_encryption_keys(session)
            rows = await load_rows(session)
            row = next((row for row in rows if row.id == request.id), None)
            if row is None:
                raise NotFoundError(
                    f"there is no key-encryption key {request.id}", hint="`saltern key-encryption-key list` has all"
                )
            # Retired before this transaction began, so the count of now is the count for ever.
            counts = await count_wrapped(session)
            before = _encode(row, rows, counts, 0)
            _require_removable(row.id, before, counts)
            row.retire_time, row.remove_time, row.sealed_key = row.retire_time or now, now, None
            after = _encode(row, rows, counts, 0)
            return Change(tenant=None, resource=f"{RESOURCE}/{row.id}", response=after, before=before, after=after)

        return await self._change("RemoveKeyEncryptionKey", request, pb2.KeyEncryptionKey, act)

    async def _list(self, session: AsyncSession, now: datetime) -> pb2.ListKeyEncryptionKeysResponse:
        rows, counts = await load_rows(session), await count_wrapped(session)
        holders = living(await load_holders(session), now)
        return pb2.ListKeyEncryptionKeysResponse(
            encryption_keys=[
                _encode(row, rows, counts, sum(row.id not in holder.held for holder in holders))
                for row in reversed(rows)
            ],
            holders=len(holders),
        )


def _require_settled(rows: Sequence[KeyEncryptionKey]) -> None:
    """One rotation at a time: a key that waits would be overtaken, and never retire."""
    for row in rows:
        if row.use_time is None and row.remove_time is None:
            raise FailedPreconditionError(
                f"the key-encryption key {row.id} waits until every control plane holds it",
                reason="ROTATION_IN_PROGRESS",
                hint="`saltern key-encryption-key list` says how many do not: append it to their files too",
            )


def _require_removable(key_id: str, found: pb2.KeyEncryptionKey, counts: Mapping[str, Counter[str]]) -> None:
    if found.state not in (pb2.KeyEncryptionKey.STATE_PUBLISHED, pb2.KeyEncryptionKey.STATE_RETIRED):
        raise FailedPreconditionError(
            f"the key-encryption key {key_id} has not retired",
            reason="KEY_IN_USE",
            hint="rotate first, and wait until every control plane wraps with the new key",
        )
    count = counts[key_id].total() if key_id in counts else 0
    if count:
        raise FailedPreconditionError(
            f"{count} secrets are still wrapped under the key-encryption key {key_id}",
            reason="KEY_IN_USE",
            hint="they are wrapped anew by themselves; `saltern key-encryption-key list` counts them down, and the log"
            " names those that are damaged",
            metadata={"count": str(count)},
        )


def _encode(
    row: KeyEncryptionKey, rows: Sequence[KeyEncryptionKey], counts: Mapping[str, Counter[str]], missing: int
) -> pb2.KeyEncryptionKey:
    state = state_of(to_life(row), current_key(map(to_life, rows)))
    return pb2.KeyEncryptionKey(
        id=row.id,
        state=_STATES[state],
        create_time=to_timestamp(row.create_time),
        use_time=to_timestamp(row.use_time),
        retire_time=to_timestamp(row.retire_time),
        remove_time=to_timestamp(row.remove_time),
        sealed_by=row.sealed_by or "",
        wrapped=[pb2.WrappedCount(table=table, count=count) for table, count in sorted(counts.get(row.id, {}).items())],
        missing_holders=0 if state is KeyState.REMOVED else missing,
    )
