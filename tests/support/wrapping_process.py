"""A control plane's keeper of key-encryption keys alone, in a process of its own, to be killed in the middle.

``python -m tests.support.wrapping_process STATE_DIR BATCH_ROWS``, the database's URL in SALTERN_DATABASE_URL: prints a
line for each batch, goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from controlplane.db import connect
from controlplane.key_encryption.encryption_keys import load_encryption_keys
from controlplane.key_encryption.keeper import KeyEncryptionKeeper


async def main(state_dir: Path, batch_rows: int) -> None:
    database = connect(os.environ["SALTERN_DATABASE_URL"])
    keys = await load_encryption_keys(database, state_dir)
    keeper = KeyEncryptionKeeper(database, keys, batch_rows=batch_rows)  # few: many moments to be killed at
    while True:
        batch = await keeper.step()
        print("idle" if batch is None else f"{batch.table} {batch.rewrapped}", flush=True)
        await asyncio.sleep(0.05 if batch is None else 0)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
