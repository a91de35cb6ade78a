"""From settings to the engine that keeps the records of the tier below DRAM."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dataplane.io.engines.mooncake import MooncakeStore
from dataplane.io.engines.objects import ObjectEngine
from dataplane.io.ssd_disk import Disk
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import load_node_key
from dataplane.settings import SsdSettings

_log = structlog.get_logger(__name__)
#: How long a starting node waits for a store; without it, it serves from DRAM.
_CONNECT_S = 5.0


def open_engine(settings: SsdSettings, files: Files, on_return: Callable[[], None]) -> Disk:
    """Open files, or a store and the ledger of what is in it. May block for some seconds.

    Args:
        on_return: called from another thread when the store can be reached again.

    Raises:
        FailedPreconditionError: SSD_DIR_UNUSABLE, SSD_DIR_IN_USE, SSD_NODE_KEY_UNUSABLE, MOONCAKE_NOT_INSTALLED.
    """
    node_key = load_node_key(settings.node_key_folder, files)
    if settings.mooncake is None:
        return Disk(settings.folder, node_key, files)
    store = MooncakeStore(settings.mooncake, on_return)
    try:
        engine = ObjectEngine(settings.folder, node_key, store, files)
    except BaseException:
        store.close()
        raise
    if not store.wait_connected(_CONNECT_S):
        _log.warning(
            "mooncake cannot be reached; serving from DRAM until it can", endpoint=str(settings.mooncake.master)
        )
    return engine
