"""Data keys of the SSD tier: one for each partition, in a small file wrapped under the node's own key (I12).

::

    STATE_DIR/ssd-node-key           32 random bytes, mode 0600
      wraps SSD_DIR/TENANT/PARTITION/key     the partition's data key, with its namespace uid and epoch
        derives the keys of each segment (dataplane.core.segments.SegmentCipher)

Destroying a partition's key file makes its segments unreadable, whatever of them is still on the device. Keep the state
folder on another device than the segments where the device itself may be stolen or returned.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dataplane.core.segments import NONCE_BYTES, BadFormatError
from dataplane.io.ssd_files import Files
from saltern.errors import FailedPreconditionError
from saltern.keys import frame
from saltern.names import TenantId

KEY_FILE: Final = "key"
NODE_KEY_FILE: Final = "ssd-node-key"
DATA_KEY_BYTES: Final = 32
#: No key file is longer: a uid is at most this long.
KEY_FILE_MAX_BYTES: Final = 4096
_MAGIC: Final = b"SALTKEY1"
_BODY: Final = struct.Struct(f"<{DATA_KEY_BYTES}sq")


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """A data key and whose it is."""

    data_key: bytes = field(repr=False)
    storage_uid: str
    epoch: int


def load_node_key(state_dir: Path, files: Files) -> bytes:
    """The node's key; made on first use.

    Raises:
        FailedPreconditionError: SSD_NODE_KEY_UNUSABLE, it cannot be read or made.
    """
    path = state_dir / NODE_KEY_FILE
    try:
        if not path.exists():
            files.write_small(path, os.urandom(DATA_KEY_BYTES))
        key = path.read_bytes()
    except OSError as error:
        raise _unusable(path, (error.strerror or "unusable").lower()) from None
    if len(key) != DATA_KEY_BYTES:
        raise _unusable(path, f"it is not {DATA_KEY_BYTES} bytes long")
    return key


def new_data_key() -> bytes:
    return os.urandom(DATA_KEY_BYTES)


def wrap_key(node_key: bytes, key: PartitionKey, tenant: TenantId, number: int) -> bytes:
    """The content of a key file; bound to the tenant and the folder that it lies in (I2)."""
    nonce = os.urandom(NONCE_BYTES)
    body = _BODY.pack(key.data_key, key.epoch) + key.storage_uid.encode()
    return _MAGIC + nonce + AESGCM(node_key).encrypt(nonce, body, frame(_MAGIC, tenant, number))


def unwrap_key(node_key: bytes, content: bytes, tenant: TenantId, number: int) -> PartitionKey:
    """Raises BadFormatError: torn, moved to another folder, or wrapped under another node's key."""
    start = len(_MAGIC) + NONCE_BYTES
    if not content.startswith(_MAGIC) or len(content) < start:
        raise BadFormatError("not a key file")
    try:
        body = AESGCM(node_key).decrypt(content[len(_MAGIC) : start], content[start:], frame(_MAGIC, tenant, number))
        data_key, epoch = _BODY.unpack_from(body)
        return PartitionKey(data_key, body[_BODY.size :].decode(), epoch)
    except (InvalidTag, struct.error, UnicodeDecodeError, ValueError):
        raise BadFormatError("the key file does not open under this node's key") from None


def _unusable(path: Path, why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"cannot use the SSD node key {path}: {why}",
        reason="SSD_NODE_KEY_UNUSABLE",
        hint="restore the file, or remove it together with the content of --ssd-dir to start with an empty SSD tier",
    )
