"""A rotation of the key-encryption key without a control plane: ``saltern serve rewrap``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from controlplane.audit import record
from controlplane.clock import Clock, utc_now
from controlplane.core.key_encryption import KeyState, current_key, state_of
from controlplane.db import connect
from controlplane.db.catalogue import require_row_security
from controlplane.db.locks import lock_key_encryption_keys
from controlplane.key_encryption.encryption_keys import EncryptionKeys, load_encryption_keys, load_rows, to_life
from controlplane.key_encryption.keeper import INTERVAL_S, RESOURCE, SERVICE, KeyEncryptionKeeper
from controlplane.key_encryption.kms import KmsClient
from controlplane.rpc import database_failure
from controlplane.settings import ControlSettings
from saltern.errors import FailedPreconditionError

ACTOR = "server-command"


async def rewrap(
    settings: ControlSettings, say: Callable[[str], None], *, rotate: bool, clock: Clock = utc_now
) -> None:
    """Wrap everything anew under the current key, or under a new one with ``rotate``; proves the end by a count.

    Control planes may run beside it or not; it can be killed at any moment and run again.

    Raises:
        FailedPreconditionError: reason SECRETS_LEFT: some do not open, or are locked; NO_NEW_KEY: nothing to rotate to.
        SalternError: the database, a key or the key management service cannot be had.
    """
    kms = None if settings.kms_endpoint is None else KmsClient(settings.kms_endpoint)
    database = connect(settings.database_url.get_secret_value(), pool_connections=2)
    try:
        await require_row_security(database)
        keys = await load_encryption_keys(database, settings.state_dir, kms, clock)
        keeper = KeyEncryptionKeeper(database, keys, clock)
        if rotate:
            async with database.transaction(keeper.scope) as session:
                await lock_key_encryption_keys(session)
                row = await keys.next_key(await load_rows(session), clock())
                session.add(row)
                await session.flush()
                method, resource = f"{SERVICE}/RotateKeyEncryptionKey", f"{RESOURCE}/{row.id}"
                await record(session, tenant=None, actor=ACTOR, method=method, resource=resource, now=clock())
        try:
            await _until_done(keeper, keys, say)
        finally:
            await keeper.leave()
    except SQLAlchemyError as error:
        raise database_failure(error) or error from None
    finally:
        await database.close()
        if kms is not None:
            await kms.close()


async def _until_done(keeper: KeyEncryptionKeeper, keys: EncryptionKeys, say: Callable[[str], None]) -> None:
    idle = 0
    while True:
        batch = await keeper.step()
        if batch is not None:
            say(f"{batch.table}: {batch.rewrapped} secrets wrapped anew under {keys.ring.wraps_with}")
            idle = 0
            continue
        rows, counts = await keeper.look()
        current = current_key(map(to_life, rows))
        states = {row.id: state_of(to_life(row), current) for row in rows}
        left = {key_id: count for key_id, count in counts.items() if key_id != current}
        waiting = [id for id, state in states.items() if state in (KeyState.PUBLISHED, KeyState.RETIRING)]
        if not left and not waiting:
            for key_id, state in states.items():
                if state is KeyState.RETIRED:
                    say(f"{key_id}: retired, 0 secrets under it; `saltern key-encryption-key remove {key_id}`")
            say(f"{current}: current, {counts.get(current or '', 0)} secrets under it")
            return
        idle += 1
        if not waiting and idle >= 3:
            raise FailedPreconditionError(
                f"{sum(left.values())} secrets are still under the keys {', '.join(sorted(left))}",
                reason="SECRETS_LEFT",
                hint="the log names the table of those that are damaged; run it again if others held them",
            )
        await asyncio.sleep(INTERVAL_S)
