"""The last policy that the control plane pushed, kept in the node's state folder: a restart can go on by it (I9).

::

    policy.snapshot: "SALTERN-POLICY-2\\n" | SHA-256 of the rest (32) | length of the node's name (1) | name | snapshot
    policy.deltas:   what has changed since (:mod:`dataplane.policy_log`)

A snapshot replaces both files; a delta is appended to the second, and now and then both become one snapshot again. The
checksum finds damage, not forgery: whoever may write the file may run the node. So it is read only where it is this
user's and nobody else may read or write it. It holds no secret (:mod:`tenants.policy`), but it says whom to trust: the
keys that verify tokens. The modification time of the first file is when the control plane was last in touch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from dataplane.policy_log import DIGEST_BYTES, DamagedLogError, decode_log, encode_head, encode_record, merge
from saltern.errors import FailedPreconditionError
from saltern.node.v1 import node_pb2

POLICY_FILE: Final = "policy.snapshot"
DELTAS_FILE: Final = "policy.deltas"
SNAPSHOT_MAX_BYTES: Final = 64 * 1024 * 1024
#: Deltas are merged into a new snapshot once they are larger than this and than the snapshot.
DELTAS_MIN_BYTES: Final = 256 * 1024
_MAGIC: Final = b"SALTERN-POLICY-2\n"
#: Of releases before the deltas. One of those refuses the new form: it would miss what has changed since.
_MAGIC_BEFORE: Final = b"SALTERN-POLICY-1\n"
_NAME_MAX_BYTES: Final = 255
_FILE_MAX_BYTES: Final = len(_MAGIC) + DIGEST_BYTES + 1 + _NAME_MAX_BYTES + SNAPSHOT_MAX_BYTES
#: A time further ahead than this is no difference between clocks any more.
_AHEAD_MAX_S: Final = 300.0

#: What the control plane pushes.
Push: TypeAlias = node_pb2.PolicySnapshot | node_pb2.PolicyDelta


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


@dataclass(slots=True)
class _Log:
    """Where the next delta is appended.

    Attributes:
        digest: of the last record, or of the head.
        size_bytes: of the file; 0 before it is there.
        max_bytes: past it everything becomes a snapshot again.
    """

    head: bytes
    digest: bytes
    size_bytes: int
    max_bytes: int


class PolicyFile:
    """The files of one node.

    Args:
        folder: the node's state folder.
        node_id: shares are one node's; another's file is refused.
        age_max_s: how long a policy may be served without the control plane.
        deltas_min_bytes: see :data:`DELTAS_MIN_BYTES`.
    """

    def __init__(
        self, folder: Path, node_id: str, age_max_s: float, *, deltas_min_bytes: int = DELTAS_MIN_BYTES
    ) -> None:
        self.path: Final = folder / POLICY_FILE
        self.deltas_path: Final = folder / DELTAS_FILE
        self.age_max_s: Final = age_max_s
        self._node_id = node_id
        self._deltas_min_bytes = deltas_min_bytes
        # A write goes on in its thread when whoever waited for it is cancelled; it must not undo a later one.
        self._writing = threading.Lock()
        #: What is to be kept: a snapshot and what has changed since; None before the first.
        self._snapshot: node_pb2.PolicySnapshot | None = None
        self._deltas: list[node_pb2.PolicyDelta] = []
        self._version = 0
        #: None where it is not known what is on disk, so that everything has to be written.
        self._log: _Log | None = None

    def write(self, snapshot: node_pb2.PolicySnapshot, in_touch_unix_s: float | None = None) -> None:
        """Keep ``snapshot``: whole or not at all, on disk when it returns, for this user alone; any thread may call.

        One that is older than what was written before changes nothing. Raises OSError.

        Args:
            in_touch_unix_s: when the control plane was last in touch; None for now.
        """
        with self._writing:
            if snapshot.version > self._version or (snapshot.version == self._version and self._log is None):
                self._snapshot, self._deltas, self._version = snapshot, [], snapshot.version
                self._write_all(in_touch_unix_s)

    def keep(self, push: Push, in_touch_unix_s: float | None = None) -> None:
        """:meth:`write` or :meth:`append`."""
        if isinstance(push, node_pb2.PolicyDelta):
            self.append(push, in_touch_unix_s)
        else:
            self.write(push, in_touch_unix_s)

    def append(self, delta: node_pb2.PolicyDelta, in_touch_unix_s: float | None = None) -> None:
        """Keep what has changed since; as :meth:`write`.

        Raises OSError, also for a delta that does not go on from what was to be kept before; what is kept then may be
        the policy before, and the next call writes all of it.
        """
        with self._writing:
            if delta.version <= self._version:
                return
            if self._snapshot is None or delta.base_version != self._version:
                raise OSError(errno.EINVAL, f"it goes on from version {delta.base_version}, which was not kept")
            self._deltas.append(delta)
            self._version = delta.version
            if self._log is None:
                self._write_all(in_touch_unix_s)
                return
            record, digest = encode_record(self._log.digest, delta)
            if self._log.size_bytes + len(record) > self._log.max_bytes:
                self._write_all(in_touch_unix_s)
            else:
                self._append(record, digest)
                self.confirm(in_touch_unix_s)

    def discard(self) -> bool:
        """Remove what is kept; return whether nothing is left of it."""
        with self._writing:
            self._log = None
            try:
                self.path.unlink(missing_ok=True)
                self.deltas_path.unlink(missing_ok=True)
                self._sync_folder()
            except OSError:
                return False
        return True

    def _write_all(self, in_touch_unix_s: float | None) -> None:
        assert self._snapshot is not None
        self._log = None
        self._snapshot, self._deltas = merge(self._snapshot, self._deltas), []
        name = self._node_id.encode()
        body = bytes([len(name)]) + name + self._snapshot.SerializeToString()
        digest = hashlib.sha256(body).digest()
        self._replace(self.path, _MAGIC + digest + body, in_touch_unix_s)
        # From here on the deltas are of an earlier snapshot, and not read any more.
        self.deltas_path.unlink(missing_ok=True)
        self._log = _Log(*encode_head(digest), size_bytes=0, max_bytes=max(self._deltas_min_bytes, len(body)))

    def _append(self, record: bytes, digest: bytes) -> None:
        """Raises OSError; the log is then one that nobody knows the end of."""
        log, self._log = self._log, None
        assert log is not None
        if log.size_bytes:
            descriptor = os.open(self.deltas_path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "ab") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
        else:
            self._replace(self.deltas_path, log.head + record, None)
            log.size_bytes = len(log.head)
        log.size_bytes += len(record)
        log.digest = digest
        self._log = log

    def _replace(self, path: Path, content: bytes, in_touch_unix_s: float | None) -> None:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if in_touch_unix_s is not None:
                    os.utime(file.fileno(), (in_touch_unix_s, in_touch_unix_s))
                os.fsync(file.fileno())
            partial.replace(path)
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
        found = self._read_own(self.path)
        if found is None:
            raise self._unusable("KEPT_POLICY_ABSENT", "there is none")
        content, in_touch_unix_s = found
        digest, snapshot = self._decode(content)
        found = self._read_own(self.deltas_path)
        if found is not None:
            try:
                snapshot = merge(snapshot, decode_log(found[0], digest))
            except DamagedLogError as error:
                raise self._unusable("KEPT_POLICY_DAMAGED", str(error)) from None
        age_s = now_s - in_touch_unix_s
        if not -_AHEAD_MAX_S <= age_s <= self.age_max_s:
            limit = f"{self.age_max_s:.0f} s is the limit (--policy-max-age)"
            raise self._unusable("KEPT_POLICY_TOO_OLD", f"it is {age_s:.0f} s old, and {limit}")
        return KeptPolicy(snapshot, max(age_s, 0.0), is_ahead=age_s < 0)

    def _read_own(self, path: Path) -> tuple[bytes, float] | None:
        """The content of a file that is this user's alone, and when it was changed; None where there is none."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
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
                return file.read(_FILE_MAX_BYTES + 1), facts.st_mtime
        except OSError as error:
            raise self._unusable("KEPT_POLICY_DAMAGED", (error.strerror or "unreadable").lower()) from None
        finally:
            os.close(descriptor)

    def _decode(self, content: bytes) -> tuple[bytes, node_pb2.PolicySnapshot]:
        head = len(_MAGIC) + DIGEST_BYTES
        digest, body = content[len(_MAGIC) : head], content[head:]
        if (
            len(content) > _FILE_MAX_BYTES
            or not content.startswith((_MAGIC, _MAGIC_BEFORE))
            or digest != hashlib.sha256(body).digest()
            or not body
        ):
            raise self._unusable("KEPT_POLICY_DAMAGED", "its checksum or its form is wrong")
        name_end = 1 + body[0]
        if body[1:name_end] != self._node_id.encode():
            raise self._unusable("KEPT_POLICY_OF_ANOTHER_NODE", "it holds another node's shares")
        try:
            return digest, node_pb2.PolicySnapshot.FromString(body[name_end:])
        except DecodeError:
            raise self._unusable("KEPT_POLICY_DAMAGED", "it holds no snapshot") from None

    def _unusable(self, reason: str, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the policy kept in {self.path} cannot be used: {why}",
            reason=reason,
            hint="start the control plane; the node then gets a new one",
        )
