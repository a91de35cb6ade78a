"""How the SSD tier fares: the faults of its device as facts, and the one state that follows from them.

::

    found at the start: folder unusable ............................. off, until the node is restarted
    reads fail in a row, or none finishes ........................... off, until a read succeeds
    a write failed .................................................. read-only, until a write succeeds
    a record was lost lately, files were left alone at the start .... degraded
    nothing of the kind ............................................. ok

While the device cannot be read the tier is hidden from lookups and gets, so that nothing is promised that cannot be
served (I10); while it cannot be written nothing is admitted. Both are tried again after a while, with real work and
without a change of state: only a success ends a state, so that a device that stays broken does not flap.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import structlog

from dataplane.core.ssd_log import SegmentLog
from dataplane.io.clock import Clock
from dataplane.io.workers import Workers

_log = structlog.get_logger(__name__)
#: How long after a fault that closed the tier for reads or writes the next one is tried.
RETRY_S: Final = 30.0
#: How long a lost record keeps the tier degraded.
CALM_S: Final = 600.0
#: So many reads in a row that the device failed, and it counts as gone.
READ_ERRORS_MAX: Final = 8
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NS: Final = 1_000_000_000


class SsdState(StrEnum):
    """How the tier fares; DRAM goes on in each of them."""

    OK = "ok"
    DEGRADED = "degraded"  #: reads and writes go on; something was lost or left alone, or cannot be removed
    READ_ONLY = "read-only"  #: the device takes no writes; tried again after a while
    OFF = "off"  #: the device cannot be read: what is on it is not promised to anybody


@dataclass(frozen=True, slots=True)
class SsdStatus:
    """State of the tier at one moment, and what it has in hand.

    Attributes:
        reason: why it is not ``ok``; empty if it is.
        is_direct: whether segments bypass the page cache.
        since_unix_s: when the state last changed.
        capacity_bytes, used_bytes, unusable_bytes: of files: what all tenants may have, what they are charged, and
            what nobody can use.
        staging_bytes, staged_bytes: memory for records on their way to the device, and how much of it is taken.
        queued_writes: records and other work that wait for the writing thread or are with it.
        reads_in_progress: records that are being read, or wait for a reading thread.
        write_errors, read_errors: operations that the device failed since the start; only ever grow. A record that was
            read but did not verify is in ``SsdCounters.read_failures`` alone.
    """

    state: SsdState
    reason: str = ""
    is_direct: bool = False
    since_unix_s: float = 0.0
    capacity_bytes: int = 0
    used_bytes: int = 0
    unusable_bytes: int = 0
    staging_bytes: int = 0
    staged_bytes: int = 0
    queued_writes: int = 0
    reads_in_progress: int = 0
    write_errors: int = 0
    read_errors: int = 0


class Health:
    """Takes note of faults and successes; opens and closes ``tier`` for reads and writes accordingly.

    Attributes:
        state, reason, since_unix_s: see :class:`SsdStatus`. Call :meth:`look` first where time may have healed.
    """

    def __init__(self, tier: SegmentLog, clock: Clock, workers: Workers) -> None:
        self.state = SsdState.OFF
        self.reason = "not started"
        self.since_unix_s = clock.unix_s()
        self.write_errors = 0
        self.read_errors = 0
        self._tier = tier
        self._clock = clock
        self._workers = workers
        #: The facts; an empty text for one that does not hold.
        self._unusable = self.reason
        self._unreadable = ""
        self._unwritable = ""
        self._unremovable = ""
        self._found = ""
        self._lost = ""
        self._lost_ns = 0
        self._failed_reads = 0
        tier.is_writable = tier.is_readable = False

    # ---- the start

    def started(self, problems: Sequence[str]) -> None:
        """The folder was read; ``problems`` are what was not as it should be."""
        self._unusable = ""
        if problems:
            self._found = problems[0] + (f" (and {len(problems) - 1} more)" if problems[1:] else "")
        self._tier.is_writable = self._tier.is_readable = True
        self.look()

    def unusable(self, why: str) -> None:
        """The folder could not be read: nothing of it is known, and nothing is written to it before a restart."""
        self._unusable = why
        self._tier.is_writable = self._tier.is_readable = self._tier.is_known = False
        self.look()

    # ---- writes

    def write_failed(self, error: Exception) -> None:
        """The device takes no more: serve what is there, and try again later."""
        self.write_errors += 1
        code = error.errno if isinstance(error, OSError) else None
        self._unwritable = "the device is full" if code in _FULL else f"a write failed: {error}"
        if self._tier.is_writable:
            self._tier.is_writable = False
            self._workers.call_later(RETRY_S, self._try_writes)
        self.look()

    def write_succeeded(self) -> None:
        if self._unwritable and self._tier.is_writable:
            self._unwritable = ""
            self.look()

    def removal_failed(self, error: Exception) -> None:
        """A file or a key is still there that should be gone: charged, and tried again after a while."""
        self.write_errors += 1
        self._unremovable = f"a removal failed: {error}"
        self.look()

    def removals_succeeded(self) -> None:
        """Nothing is there any more that should be gone."""
        if self._unremovable:
            self._unremovable = ""
            self.look()

    def try_again(self) -> None:
        """Somebody knows that the device is back: neither reads nor writes wait any longer before they are tried."""
        self._try_writes()
        self._try_reads()

    def _try_writes(self) -> None:
        self._tier.is_writable = not self._unusable

    # ---- reads

    def read_failed(self, reason: str, *, by_device: bool) -> None:
        """A record is lost: the device failed to read it, or read what does not verify (I7)."""
        self._lost, self._lost_ns = reason, self._clock.monotonic_ns()
        if by_device:
            self.read_errors += 1
            self._failed_reads += 1
            if self._failed_reads >= READ_ERRORS_MAX:
                self._hide(f"the device cannot be read: {reason}")
        self.look()

    def read_stalled(self) -> None:
        """Reads are in progress and none has finished for as long as anybody waits for one."""
        self._hide("the device does not answer")
        self.look()

    def read_succeeded(self) -> None:
        self._failed_reads = 0
        if self._unreadable:
            self._unreadable = ""
            self._tier.is_readable = not self._unusable
            self.look()

    def _hide(self, why: str) -> None:
        self._unreadable = why
        if self._tier.is_readable:
            self._tier.is_readable = False
            self._workers.call_later(RETRY_S, self._try_reads)

    def _try_reads(self) -> None:
        if self._unreadable:
            self._failed_reads = READ_ERRORS_MAX - 1  # one more failure is enough
            self._tier.is_readable = not self._unusable

    # ---- the state

    def look(self) -> None:
        """Judge anew what the facts come to."""
        if self._lost and self._clock.monotonic_ns() >= self._lost_ns + int(CALM_S * _NS):
            self._lost = ""
        if off := self._unusable or self._unreadable:
            self._tell(SsdState.OFF, off)
        elif self._unwritable:
            self._tell(SsdState.READ_ONLY, self._unwritable)
        elif problem := self._unremovable or self._lost or self._found:
            self._tell(SsdState.DEGRADED, problem)
        else:
            self._tell(SsdState.OK, "")

    def _tell(self, state: SsdState, reason: str) -> None:
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            self.since_unix_s = self._clock.unix_s()
            level = logging.INFO if state is SsdState.OK else logging.WARNING
            _log.log(level, "ssd tier", state=state.value, reason=reason)
