"""From what nodes report of themselves to what a tenant used in each hour; values in, values out (I8).

A node reports *readings*: the bytes that a tenant holds now, and counters that began at 0 with the node's process. A
*meter* is the newest reading of one subject (a tenant, or a namespace of it) in one process. What the next reading adds
is *booked* to hours::

    reports    r1          r2          r3 (the process has changed nothing between r1 and r2)
    held       h           h           g
    meter      since=r1    as it was   since=r3
    booked     -           -           h x (r1..r2) + min(h, g) x (r2..r3);  counters of r3 - counters of r1

So a subject of which nothing changed costs nothing, however often it is reported. The rules:

* **Time is the control plane's**, in whole Unix seconds; a node's clock is never asked. Stretches share their ends, so
  nothing is lost or counted twice by rounding, and a clock that is set back books nothing until it has caught up.
* **Between two reports the lesser of the two ends is booked**, across a gap as well: never more than was held at both
  of its ends. A process vouches for itself alone: from the last report of one to the first of the next is nothing.
* **Counters of another process begin at 0**, and so do those of another tenant or namespace of the same name. Within
  one process they only grow; one that is lower than before has begun again, as best one can know.
* **A report that is not newer than the last one is dropped**: late, repeated and reordered ones add nothing, and one
  that is lost is made up for by the next.
* **A stretch over the end of an hour is split by time**, counters in proportion, in integers whose sum is exact.
* **A closed hour never changes**: what belongs to it and comes later is booked to the oldest hour that is open, and
  ``late_seconds`` says for how long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from zlib import crc32

from saltern.names import TenantId

HOUR_S: Final = 3600
#: Longer than so without a report is a gap: it is booked in the same way, and its length told beside.
GAP_AFTER_S: Final = 10
#: A meter of which nothing changes is booked once in so long, so that hours that are open can be read meanwhile.
BOOK_EVERY_S: Final = 60

DRAM: Final = "dram_byte_seconds"
SSD: Final = "ssd_byte_seconds"
GAP: Final = "gap_seconds"
LATE: Final = "late_seconds"

_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose usage it is: a tenant's as a whole, or that of one of its namespaces.

    Attributes:
        tenant_uid, namespace_uid: tell those of the same name apart; ``namespace_uid`` is empty for the tenant.
    """

    tenant: TenantId
    tenant_uid: str
    namespace_uid: str = ""
    namespace: str = ""

    @property
    def phase_s(self) -> int:
        """When within ``BOOK_EVERY_S`` it is due: another second for each tenant."""
        return crc32(self.tenant.encode()) % BOOK_EVERY_S


@dataclass(frozen=True, slots=True)
class Reading:
    """What one report says of one subject.

    Attributes:
        dram_bytes, ssd_bytes: held now.
        counters: since the process began, by name; those that are 0 may be left out.
    """

    dram_bytes: int = 0
    ssd_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=lambda: _NOTHING)

    @property
    def holds(self) -> bool:
        """Whether any byte is held."""
        return bool(self.dram_bytes or self.ssd_bytes)

    @property
    def is_blank(self) -> bool:
        """Nothing is held, and nothing ever happened: not worth a meter."""
        return not (self.dram_bytes or self.ssd_bytes or any(self.counters.values()))


@dataclass(frozen=True, slots=True)
class Meter:
    """The newest reading of one subject in one process.

    Attributes:
        since_s: what is held is booked up to then, in Unix seconds.
    """

    since_s: int
    reading: Reading


@dataclass(frozen=True, slots=True)
class Moment:
    """When a report came, in Unix seconds.

    Attributes:
        last_s: when the report before it came, of the same process; None for its first one.
        now_s: not before ``last_s``: a clock that was set back stands still instead.
        open_from_s: the first second of the oldest hour that is not closed.
    """

    last_s: int | None
    now_s: int
    open_from_s: int = 0

    @property
    def is_after_gap(self) -> bool:
        """Whether the process was silent for longer than a report may take."""
        return self.last_s is not None and self.now_s - self.last_s > GAP_AFTER_S


@dataclass(frozen=True, slots=True)
class Process:
    """What is known of one process of a node.

    Attributes:
        sequence: of its newest report; 0 before the first.
        last_s: when that came; None before the first.
        meters: of all that it reports and that is not blank.
    """

    sequence: int = 0
    last_s: int | None = None
    meters: Mapping[Subject, Meter] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Taken:
    """What a report has changed.

    Attributes:
        process: what is known of the process now.
        changed: meters that are new or moved on. gone: those that there are no more.
        booked: amounts by subject.
    """

    process: Process
    changed: Mapping[Subject, Meter]
    gone: Sequence[Subject]
    booked: Mapping[Subject, Bookings]


class Bookings:
    """Amounts by hour: a hour's first Unix second, then the name of what is counted."""

    __slots__ = ("by_hour",)

    def __init__(self) -> None:
        self.by_hour: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, hour_s: int, name: str, amount: int) -> None:
        """Book ``amount``; nothing for 0."""
        if amount:
            self.by_hour[hour_s][name] += amount


def is_due(since_s: int, now_s: int, phase_s: int) -> bool:
    """Whether a meter of which nothing changed is to be booked now.

    Args:
        phase_s: of ``0..BOOK_EVERY_S - 1``, another one for each subject, so that not all are due at once.
    """
    return (now_s + phase_s) // BOOK_EVERY_S > (since_s + phase_s) // BOOK_EVERY_S


def advance(meter: Meter | None, reading: Reading | None, at: Moment, bookings: Bookings) -> Meter | None:
    """Book what happened up to a report; return the meter that follows from it.

    Args:
        meter: None for a subject that the process did not report before.
        reading: None for one that it reports no more: the node has forgotten it, counters and all.
    """
    before = Reading() if meter is None else meter.reading
    after = Reading() if reading is None else reading
    last_s = at.now_s if at.last_s is None else at.last_s
    lesser = Reading(min(before.dram_bytes, after.dram_bytes), min(before.ssd_bytes, after.ssd_bytes))
    increments = _increments(before.counters, after.counters)
    if meter is not None:
        _book_held(bookings, before, meter.since_s, last_s, at.open_from_s)
    _book_held(bookings, lesser, last_s, at.now_s, at.open_from_s)
    _book_counters(bookings, increments, last_s, at.now_s, at.open_from_s)
    if at.is_after_gap and (increments or lesser.holds):
        for hour_s, seconds in _split(last_s, at.now_s, at.open_from_s):
            bookings.add(hour_s, GAP, seconds)
    if meter is not None and before.holds:
        _book_late(bookings, meter.since_s, at.now_s if lesser.holds or increments else last_s, at.open_from_s)
    elif increments:
        _book_late(bookings, last_s, at.now_s, at.open_from_s)
    return None if after.is_blank else Meter(at.now_s, after)


def settle(meter: Meter, last_s: int, open_from_s: int, bookings: Bookings) -> Meter:
    """Book what is held up to the last report of a process that has become silent."""
    _book_held(bookings, meter.reading, meter.since_s, last_s, open_from_s)
    if meter.reading.holds:
        _book_late(bookings, meter.since_s, last_s, open_from_s)
    return Meter(last_s, meter.reading)


def take_in(
    process: Process, sequence: int, now_s: int, open_from_s: int, readings: Mapping[Subject, Reading]
) -> Taken | None:
    """Follow one report of a process, which names everything that the process knows.

    Returns:
        What has changed; None for a report that is not newer than the last one.
    """
    if sequence <= process.sequence:
        return None
    last_s = process.last_s
    at = Moment(last_s, now_s if last_s is None else max(last_s, now_s), open_from_s)
    meters = dict(process.meters)
    changed: dict[Subject, Meter] = {}
    booked: dict[Subject, Bookings] = {}
    gone = [subject for subject in meters if subject not in readings]
    for subject, reading in readings.items():
        meter = meters.get(subject)
        if meter is None:
            if reading.is_blank:
                continue
        elif (meter.reading is reading or meter.reading == reading) and not (
            reading.holds and (at.is_after_gap or is_due(meter.since_s, at.now_s, subject.phase_s))
        ):
            continue
        bookings = booked[subject] = Bookings()
        follower = advance(meter, reading, at, bookings)
        if follower is None:
            gone.append(subject)
        else:
            meters[subject] = changed[subject] = follower
    for subject in gone:
        meter = meters.pop(subject)
        if subject not in booked:
            advance(meter, None, at, booked.setdefault(subject, Bookings()))
    return Taken(Process(sequence, at.now_s, meters), changed, gone, booked)


def _increments(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for name, count in after.items():
        known = before.get(name, 0)
        increment = count - known if count >= known else count
        if increment:
            found[name] = increment
    return found


def _book_held(bookings: Bookings, held: Reading, begin_s: int, end_s: int, open_from_s: int) -> None:
    """Book what was held, whole, from ``begin_s`` to ``end_s``."""
    if held.holds:
        for hour_s, seconds in _split(begin_s, end_s, open_from_s):
            bookings.add(hour_s, DRAM, held.dram_bytes * seconds)
            bookings.add(hour_s, SSD, held.ssd_bytes * seconds)


def _book_counters(
    bookings: Bookings, increments: Mapping[str, int], begin_s: int, end_s: int, open_from_s: int
) -> None:
    """Book what was counted from ``begin_s`` to ``end_s``: to each hour in proportion to its time."""
    if not increments:
        return
    pieces = list(_split(begin_s, end_s, open_from_s)) or [(_open_hour(end_s, open_from_s), 1)]
    whole = sum(seconds for _, seconds in pieces)
    passed = 0
    for hour_s, seconds in pieces:
        for name, increment in increments.items():
            bookings.add(hour_s, name, increment * (passed + seconds) // whole - increment * passed // whole)
        passed += seconds


def _book_late(bookings: Bookings, begin_s: int, end_s: int, open_from_s: int) -> None:
    """Tell for how long what was booked belongs to hours that are closed."""
    bookings.add(_open_hour(begin_s, open_from_s), LATE, max(0, min(end_s, open_from_s) - begin_s))


def _split(begin_s: int, end_s: int, open_from_s: int) -> Iterator[tuple[int, int]]:
    """Parts of a stretch by the hour that each is booked to: (first second of the hour, seconds)."""
    if begin_s < min(end_s, open_from_s):
        late_end_s = min(end_s, open_from_s)
        yield _open_hour(begin_s, open_from_s), late_end_s - begin_s
        begin_s = late_end_s
    while begin_s < end_s:
        hour_s = begin_s // HOUR_S * HOUR_S
        part_end_s = min(end_s, hour_s + HOUR_S)
        yield hour_s, part_end_s - begin_s
        begin_s = part_end_s


def _open_hour(at_s: int, open_from_s: int) -> int:
    """The hour that ``at_s`` is booked to."""
    return max(at_s, open_from_s) // HOUR_S * HOUR_S
