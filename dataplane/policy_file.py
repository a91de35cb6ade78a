"""The last policy that the control plane pushed, kept in the node's state folder: a restart can go on by it (I9).

::

    "SALTERN-POLICY-1\\n" | SHA-256 of the rest (32 bytes) | length of the node's name (1 byte) | name | PolicySnapshot

The checksum finds damage, not forgery: whoever may write the file may run the node. So it is read only where it is this
user's and nobody else may read or write it. It holds no secret (:mod:`tenants.policy`), but it says whom to trust: the
keys that verify tokens. Its modification time is when the control plane was last in touch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from saltern.errors import FailedPreconditionError
from saltern.node.v1 import node_pb2

POLICY_FILE: Final = "policy.snapshot"
SNAPSHOT_MAX_BYTES: Final = 64 * 1024 * 1024
_MAGIC: Final = b"SALTERN-POLICY-1\n"
_DIGEST_BYTES: Final = 32
_NAME_MAX_BYTES: Final = 255
_FILE_MAX_BYTES: Final = len(_MAGIC) + _DIGEST_BYTES + 1 + _NAME_MAX_BYTES + SNAPSHOT_MAX_BYTES
#: A time further ahead than this is no difference between clocks any more.
_AHEAD_MAX_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class KeptPolicy:
    """A policy read back.

    Attributes:
        age_s: since the control plane was last in touch, in seconds.
        is_ahead: the file is of a later time than now: a clock was set, and nobody can say how old it is.
    """

    snapshot: node_pb2.PolicySnapshot
    age_s: float
    is_ahead: bool = False


class PolicyFile:
    """The file of one node.

    Args:
        folder: the node's state folder.
        node_id: shares are one node's; another's file is refused.
        age_max_s: how long a policy may be served without the control plane.
    """

    def __init__(self, folder: Path, node_id: str, age_max_s: float) -> None:
        self.path: Final = folder / POLICY_FILE
        self.age_max_s: Final = age_max_s
        self._node_id = node_id
        # A write goes on in its thread when whoever waited for it is cancelled; it must not undo a later one.
        self._writing = threading.Lock()
        self._version = 0

    def write(self, snapshot: node_pb2.PolicySnapshot, in_touch_unix_s: float | None = None) -> None:
        """Keep ``snapshot``: whole or not at all, on disk when it returns, for this user alone; any thread may call.

        One that is older than what was written before changes nothing. Raises OSError.

        Args:
            in_touch_unix_s: when the control plane was last in touch; None for now.
        """
        with self._writing:
            if snapshot.version > self._version:
                self._write(snapshot, in_touch_unix_s)
                self._version = snapshot.version

    def discard(self) -> bool:
        """Remove what is kept; return whether nothing is left of it."""
        with self._writing:
            try:
                self.path.unlink(missing_ok=True)
                self._sync_folder()
            except OSError:
                return False
        return True

    def _write(self, snapshot: node_pb2.PolicySnapshot, in_touch_unix_s: float | None) -> None:
        name = self._node_id.encode()
        body = bytes([len(name)]) + name + snapshot.SerializeToString()
        partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                file.flush()
                if in_touch_unix_s is not None:
                    os.utime(file.fileno(), (in_touch_unix_s, in_touch_unix_s))
                os.fsync(file.fileno())
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)
        self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def confirm(self, in_touch_unix_s: float | None = None) -> None:
        """Note when the control plane was in touch, None for now; nothing where the file cannot be touched."""
        with contextlib.suppress(OSError):
            os.utime(self.path, None if in_touch_unix_s is None else (in_touch_unix_s, in_touch_unix_s))

    def read(self, now_s: float) -> KeptPolicy:
        """Read the policy back; ``now_s`` is Unix time.

        Raises:
            FailedPreconditionError: KEPT_POLICY_ABSENT; KEPT_POLICY_EXPOSED: another user's, or others may read or
                write it; KEPT_POLICY_DAMAGED; KEPT_POLICY_OF_ANOTHER_NODE; KEPT_POLICY_TOO_OLD, which a time ahead of
                the clock is too.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._unusable("KEPT_POLICY_ABSENT", "there is none") from None
        except OSError as error:
            raise self._unusable("KEPT_POLICY_EXPOSED", (error.strerror or "unreadable").lower()) from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise self._unusable("KEPT_POLICY_EXPOSED", "it is no file")
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                mode = f"{stat.S_IMODE(facts.st_mode):04o}"
                raise self._unusable("KEPT_POLICY_EXPOSED", f"it is user {facts.st_uid}'s with the mode {mode}")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                content = file.read(_FILE_MAX_BYTES + 1)
        except OSError as error:
            raise self._unusable("KEPT_POLICY_DAMAGED", (error.strerror or "unreadable").lower()) from None
        finally:
            os.close(descriptor)
        snapshot = self._decode(content)
        age_s = now_s - facts.st_mtime
        if not -_AHEAD_MAX_S <= age_s <= self.age_max_s:
            limit = f"{self.age_max_s:.0f} s is the limit (--policy-max-age)"
            raise self._unusable("KEPT_POLICY_TOO_OLD", f"it is {age_s:.0f} s old, and {limit}")
        return KeptPolicy(snapshot, max(age_s, 0.0), is_ahead=age_s < 0)

    def _decode(self, content: bytes) -> node_pb2.PolicySnapshot:
        head = len(_MAGIC) + _DIGEST_BYTES
        body = content[head:]
        if (
            len(content) > _FILE_MAX_BYTES
            or not content.startswith(_MAGIC)
            or content[len(_MAGIC) : head] != hashlib.sha256(body).digest()
            or not body
        ):
            raise self._unusable("KEPT_POLICY_DAMAGED", "its checksum or its form is wrong")
        name_end = 1 + body[0]
        if body[1:name_end] != self._node_id.encode():
            raise self._unusable("KEPT_POLICY_OF_ANOTHER_NODE", "it holds another node's shares")
        try:
            return node_pb2.PolicySnapshot.FromString(body[name_end:])
        except DecodeError:
            raise self._unusable("KEPT_POLICY_DAMAGED", "it holds no snapshot") from None

    def _unusable(self, reason: str, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the policy kept in {self.path} cannot be used: {why}",
            reason=reason,
            hint="start the control plane; the node then gets a new one",
        )
