"""Proof that an export of a chain is whole and unchanged, from checkpoints and a public key alone (I11).

What is found, and by what:

=========================  ===================================================================================
edit                       the event's hash
insertion, reorder         the sequence; the hash of the event before, which each event names
deletion                   the sequence
deletion at the end        a checkpoint of a later sequence
a whole chain made anew    the checkpoint's hash
a forged checkpoint        its signature
a stolen, retired key      when it signed, as the file of public keys says: none of its checkpoints is of a later time
                           or a later event, and the newest one of a chain is not of a key that retired long ago
checkpoints taken away     the digest of the one before, which each names; at the end: ``remembered``, or a stretch of
                           events without a signature that is longer than the service ever leaves one
=========================  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from saltern.audit.chain import ChainHead, ChainWalk, EventHash, FaultKind
from saltern.audit.checkpoints import (
    Checkpoint,
    CheckpointDigest,
    decode_checkpoint,
    is_authentic,
)
from saltern.audit.lines import decode_event, is_one_form
from saltern.audit.public_keys import CheckpointPublicKey
from saltern.errors import DataLossError

#: No more are kept; the rest are counted.
FINDINGS_MAX: Final = 100
UNSIGNED_SPAN_MAX_US: Final = 15 * 60 * 1_000_000
#: Clocks differ, and what was begun before a rotation ends after it.
CLOCK_SLACK_US: Final = 60 * 1_000_000


class FindingKind(StrEnum):
    """What is wrong; those of the chain itself are :class:`saltern.audit.chain.FaultKind`."""

    EDITED = FaultKind.EDITED.value
    MISSING = FaultKind.MISSING.value
    OUT_OF_ORDER = FaultKind.OUT_OF_ORDER.value
    UNLINKED = FaultKind.UNLINKED.value
    TRUNCATED = FaultKind.TRUNCATED.value
    MALFORMED = "malformed"  #: the line is no event, or not in its one form
    OTHER_CHAIN = "other-chain"  #: the event, or checkpoint, belongs to another chain
    REWRITTEN = "rewritten"  #: the event is not the one that a checkpoint has signed
    CHECKPOINT_FORGED = "checkpoint-forged"  #: none of the public keys has signed it
    KEY_RETIRED = "key-retired"  #: the checkpoint is of a key that did not sign at that time, or of that event
    CHECKPOINT_MISSING = "checkpoint-missing"  #: checkpoints before this one are not there, or are not in order
    ROLLED_BACK = "rolled-back"  #: what was verified before is not there any more
    UNSIGNED = "unsigned"  #: events that should long have been signed, or no checkpoint at all


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``sequence``: of the event, or of the checkpoint's event. ``detail``: in words."""

    kind: FindingKind
    sequence: int
    detail: str


class Remembered(msgspec.Struct, frozen=True):
    """What a verification found last, kept by whoever verifies, so that nothing can be rolled back behind it.

    ``hash``: of the event of ``sequence``; ``digest``: of the checkpoint that signed it. Hexadecimal digits.
    """

    chain: str
    sequence: int
    hash: str
    digest: str


@dataclass(slots=True)
class Report:
    """What a verification found.

    Attributes:
        first_sequence, last: the stretch that was read; 0 for no event.
        signed_sequence: everything up to this event is what was signed; 0: nothing.
        checkpoints: how many were authentic.
        unreadable_checkpoints: lines that are none, as a crash in the middle of one leaves.
        findings: the first :data:`FINDINGS_MAX`, in the order in which they were found; ``count`` is of all.
        newest: the last authentic checkpoint.
    """

    chain: str
    events: int = 0
    first_sequence: int = 0
    last: ChainHead = field(default_factory=lambda: ChainHead(0, EventHash(b"")))
    signed_sequence: int = 0
    checkpoints: int = 0
    unreadable_checkpoints: int = 0
    findings: list[Finding] = field(default_factory=list)
    count: int = 0
    newest: Checkpoint | None = None

    @property
    def is_intact(self) -> bool:
        return self.count == 0

    @property
    def first_bad_sequence(self) -> int | None:
        """The lowest sequence with which something is wrong."""
        return min((finding.sequence for finding in self.findings), default=None)

    def add(self, kind: FindingKind, sequence: int, detail: str) -> None:
        self.count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, sequence, detail))

    def remember(self) -> Remembered | None:
        """What the next verification should be told; None without a checkpoint."""
        if self.newest is None:
            return None
        head = self.newest.head
        return Remembered(self.chain, head.sequence, head.hash.hex(), self.newest.digest.hex())


class Verifier:
    """Verifies one export of one chain: first its checkpoints, then its events, then :meth:`finish`.

    Args:
        keys: public keys of checkpoints, by key id.
        from_sequence: where the export is meant to begin, if not with the first event of the chain.
        remembered: what an earlier verification of this chain has found.
        unsigned_span_max_us: events without a signature may be so far apart; the service signs every minute.
        now_us: when this is, or when the checkpoints were copied, Unix microseconds; None: not known, and then a chain
            whose newest checkpoint is of a retired key is taken for one of long ago.
    """

    def __init__(
        self,
        chain: str,
        keys: Mapping[str, CheckpointPublicKey],
        *,
        from_sequence: int = 1,
        remembered: Remembered | None = None,
        unsigned_span_max_us: int = UNSIGNED_SPAN_MAX_US,
        now_us: int | None = None,
    ) -> None:
        self.report = Report(chain)
        self._chain = chain
        self._periods = keys
        self._keys = {key_id: key.key for key_id, key in keys.items()}
        self._now_us = now_us
        self._latest_us: dict[int, int] = {}  # by sequence signed with a retired key: no event may be later
        self._from_sequence = from_sequence
        self._remembered = remembered
        self._unsigned_span_max_us = unsigned_span_max_us
        self._signed: dict[int, EventHash] = {}
        self._digests: set[CheckpointDigest] = set()
        self._walk: ChainWalk | None = None
        self._line = 0
        self._first_unsigned_us: int | None = None
        self._last_unsigned_us = 0

    def read_checkpoints(self, lines: Iterable[bytes]) -> None:
        """Take the checkpoints that one writer has made, in its order; call it once for each writer's folder."""
        report, before = self.report, None
        for line in lines:
            if not line.strip():
                continue
            try:
                checkpoint = decode_checkpoint(line)
            except DataLossError:
                report.unreadable_checkpoints += 1
                continue
            sequence = checkpoint.head.sequence
            if checkpoint.chain != self._chain:
                report.add(FindingKind.OTHER_CHAIN, sequence, f"a checkpoint of the chain {checkpoint.chain!r}")
                continue
            if not is_authentic(checkpoint, self._keys):
                why = "altered" if checkpoint.key_id in self._keys else f"signed by the unknown key {checkpoint.key_id}"
                report.add(FindingKind.CHECKPOINT_FORGED, sequence, f"the checkpoint of event {sequence} is {why}")
                continue
            period = self._periods[checkpoint.key_id]
            until_us = checkpoint.time_us if period.until_us is None else period.until_us
            if not period.from_us - CLOCK_SLACK_US <= checkpoint.time_us <= until_us + CLOCK_SLACK_US:
                why = "signed with a key that did not sign at that time"
                report.add(FindingKind.KEY_RETIRED, sequence, f"the checkpoint of event {sequence} is {why}")
                continue
            if before is not None and (checkpoint.previous != before.digest or not _goes_on(before, checkpoint)):
                report.add(
                    FindingKind.CHECKPOINT_MISSING,
                    sequence,
                    f"the checkpoint of event {sequence} does not continue that of event {before.head.sequence}",
                )
            before = checkpoint
            self._take(checkpoint)

    def read_events(self, lines: Iterable[bytes]) -> None:
        """Take the events, in the order of the export; each line with or without its line feed."""
        report, signed = self.report, self._signed
        for raw in lines:
            self._line += 1
            line = raw.removesuffix(b"\n")
            try:
                event = decode_event(line)
                record = event.to_chained_record()
            except (DataLossError, ValueError):
                report.add(FindingKind.MALFORMED, self._next_sequence(), f"line {self._line} is not an audit event")
                continue
            sequence = record.sequence
            if event.chain != self._chain:
                report.add(FindingKind.OTHER_CHAIN, sequence, f"line {self._line} is of the chain {event.chain!r}")
                continue
            if not is_one_form(line, event):
                report.add(FindingKind.MALFORMED, sequence, f"line {self._line} is not in the one form of an event")
            if self._walk is None:
                self._walk = self._begin(sequence, record.previous_hash)
                report.first_sequence = sequence
            faults = self._walk.step(record)
            for fault in faults:
                report.add(FindingKind(fault.value), sequence, _DETAILS[fault].format(line=self._line))
            report.events += 1
            if not faults and sequence in signed:
                self._compare(sequence, record.hash)
                if record.record.event_time_us > self._latest_us.get(sequence, record.record.event_time_us):
                    why = "is later than the retired key signed that vouches for it"
                    report.add(FindingKind.KEY_RETIRED, sequence, f"event {sequence} {why}")
            if self.report.newest is None or sequence > self.report.newest.head.sequence:
                self._last_unsigned_us = record.record.event_time_us
                if self._first_unsigned_us is None:
                    self._first_unsigned_us = self._last_unsigned_us

    def finish(self) -> Report:
        """Look at the end of the export and of the checkpoints; return what was found."""
        report, newest = self.report, self.report.newest
        report.last = self._walk.at if self._walk else ChainHead(self._from_sequence - 1, EventHash(b""))
        last = report.last.sequence
        if newest is None:
            report.add(FindingKind.UNSIGNED, max(1, report.first_sequence), "no checkpoint vouches for these events")
        elif newest.head.sequence > last:
            report.add(
                FindingKind.TRUNCATED,
                last + 1,
                f"the chain was signed up to event {newest.head.sequence}, and the export ends with {last}",
            )
        if self._first_unsigned_us is not None and newest is not None:
            span_us = self._last_unsigned_us - self._first_unsigned_us
            if span_us > self._unsigned_span_max_us:
                report.add(
                    FindingKind.UNSIGNED,
                    newest.head.sequence + 1,
                    f"events of {span_us // 1_000_000} s after the last checkpoint are not signed",
                )
        self._check_newest_key()
        self._check_remembered()
        return report

    def _take(self, checkpoint: Checkpoint) -> None:
        report, sequence = self.report, checkpoint.head.sequence
        report.checkpoints += 1
        self._digests.add(checkpoint.digest)
        if self._signed.setdefault(sequence, checkpoint.head.hash) != checkpoint.head.hash:
            report.add(FindingKind.REWRITTEN, sequence, f"two checkpoints have signed different events {sequence}")
        if self._periods[checkpoint.key_id].until_us is not None:
            self._latest_us[sequence] = checkpoint.time_us + CLOCK_SLACK_US
        newest = report.newest
        if newest is None or (sequence, checkpoint.time_us) > (newest.head.sequence, newest.time_us):
            report.newest = checkpoint

    def _begin(self, sequence: int, previous_hash: EventHash) -> ChainWalk:
        """Where the walk starts: with the chain, or where the export is meant to and says so itself."""
        start = self._from_sequence - 1
        if start == 0:
            return ChainWalk(self._chain)
        known = self._signed.get(start)
        if known is None and sequence == self._from_sequence:
            known = previous_hash  # the next checkpoint covers it
        return ChainWalk(self._chain, ChainHead(start, known or EventHash(b"")))

    def _compare(self, sequence: int, event_hash: EventHash) -> None:
        report = self.report
        if self._signed[sequence] == event_hash:
            report.signed_sequence = sequence
            return
        report.add(
            FindingKind.REWRITTEN,
            sequence,
            f"event {sequence} is not what was signed; the last one that is: {report.signed_sequence or 'none'}",
        )

    def _check_newest_key(self) -> None:
        """After a rotation every chain is signed anew, so an old key alone at its end is one that was stolen."""
        newest = self.report.newest
        if newest is None or self._now_us is None:
            return
        until_us = self._periods[newest.key_id].until_us
        if until_us is not None and self._now_us - until_us > self._unsigned_span_max_us:
            why = "the newest one is of a key that has retired since; checkpoints of later keys are not there"
            self.report.add(FindingKind.KEY_RETIRED, newest.head.sequence, why)

    def _check_remembered(self) -> None:
        remembered, report = self._remembered, self.report
        if remembered is None:
            return
        known = self._signed.get(remembered.sequence)
        if (
            remembered.chain != self._chain
            or known is None
            or known.hex() != remembered.hash
            or not any(digest.hex() == remembered.digest for digest in self._digests)
        ):
            report.add(
                FindingKind.ROLLED_BACK,
                remembered.sequence,
                f"the checkpoint of event {remembered.sequence}, seen before, is not there any more",
            )

    def _next_sequence(self) -> int:
        return (self._walk.at.sequence if self._walk else self._from_sequence - 1) + 1


def _goes_on(before: Checkpoint, checkpoint: Checkpoint) -> bool:
    """Of a later event; or of the same one, signed anew with another key."""
    if checkpoint.head.sequence > before.head.sequence:
        return True
    return checkpoint.head == before.head and checkpoint.key_id != before.key_id


_DETAILS: Final = {
    FaultKind.EDITED: "line {line} was changed: it does not have its hash",
    FaultKind.MISSING: "events before line {line} are not there",
    FaultKind.OUT_OF_ORDER: "line {line} stands after an event of the same or a higher sequence",
    FaultKind.UNLINKED: "line {line} does not continue the event before it",
}
