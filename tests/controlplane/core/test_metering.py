"""The rules of metering, and a machine that reports, loses, repeats, restarts and closes against a model of seconds.

The model knows what each process did at each second; the rules see reports alone.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.core.metering import (
    BOOK_EVERY_S,
    DRAM,
    GAP,
    GAP_AFTER_S,
    HOUR_S,
    LATE,
    SSD,
    Bookings,
    Meter,
    Process,
    Reading,
    Subject,
    Taken,
    settle,
    take_in,
)
from saltern.names import TenantId

HOUR = 100 * HOUR_S
ACME = Subject(TenantId("acme"), "uid-1")
OTHER = Subject(TenantId("other"), "uid-2")


def taken(process: Process, sequence: int, now_s: int, reading: Reading | None, *, open_from_s: int = 0) -> Taken:
    result = take_in(process, sequence, now_s, open_from_s, {} if reading is None else {ACME: reading})
    assert result is not None
    return result


def amounts(result: Taken, subject: Subject = ACME) -> dict[int, dict[str, int]]:
    booked = result.booked.get(subject)
    return {} if booked is None else {hour: dict(found) for hour, found in booked.by_hour.items()}


def first(now_s: int, reading: Reading) -> Process:
    return taken(Process(), 1, now_s, reading).process


def test_i8_what_is_held_is_booked_by_the_second_and_the_lesser_end_of_the_last_stretch() -> None:
    process = first(HOUR, Reading(dram_bytes=100, ssd_bytes=10))
    process = taken(process, 2, HOUR + 2, Reading(dram_bytes=100, ssd_bytes=10)).process
    assert process.meters[ACME].since_s == HOUR  # nothing changed, nothing is written

    shrunk = taken(process, 3, HOUR + 5, Reading(dram_bytes=40, ssd_bytes=90))

    assert amounts(shrunk) == {HOUR: {DRAM: 2 * 100 + 3 * 40, SSD: 2 * 10 + 3 * 10}}


def test_i8_what_was_held_before_the_first_report_and_after_the_last_is_nobodys_guess() -> None:
    begun = taken(Process(), 1, HOUR + 50, Reading(dram_bytes=100))
    assert amounts(begun) == {}
    ended = taken(begun.process, 2, HOUR + 52, None)
    assert amounts(ended) == {} and ended.gone == [ACME] and not ended.process.meters


def test_i8_counters_begin_at_0_with_the_process_and_only_their_growth_is_booked() -> None:
    begun = taken(Process(), 1, HOUR, Reading(counters={"hits": 7}))
    grown = taken(begun.process, 2, HOUR + 2, Reading(counters={"hits": 9, "misses": 1}))
    again = taken(grown.process, 3, HOUR + 4, Reading(counters={"hits": 3, "misses": 1}))
    assert [amounts(step) for step in (begun, grown, again)] == [
        {HOUR: {"hits": 7}},
        {HOUR: {"hits": 2, "misses": 1}},
        {HOUR: {"hits": 3}},  # lower than before: it has begun again
    ]


def test_i8_late_and_repeated_reports_add_nothing() -> None:
    process = taken(first(HOUR, Reading(counters={"hits": 5})), 4, HOUR + 2, Reading(counters={"hits": 6})).process
    for sequence in (0, 1, 3, 4):
        assert take_in(process, sequence, HOUR + 9, 0, {ACME: Reading(counters={"hits": 99})}) is None


def test_i8_a_clock_that_is_set_back_books_nothing_twice() -> None:
    process = first(HOUR + 100, Reading(dram_bytes=1))
    back = taken(process, 2, HOUR + 40, Reading(dram_bytes=2, counters={"hits": 1}))
    assert amounts(back) == {HOUR: {"hits": 1}} and back.process.last_s == HOUR + 100
    assert amounts(taken(back.process, 3, HOUR + 103, Reading(dram_bytes=3))) == {HOUR: {DRAM: 3 * 2}}


def test_a_stretch_over_the_end_of_an_hour_is_split_by_time_and_no_count_is_lost() -> None:
    process = first(HOUR - 3, Reading(dram_bytes=10))
    result = taken(process, 2, HOUR + 4, Reading(dram_bytes=10, counters={"hits": 8, "misses": 1}))
    # A report alone does not book what stays the same: 7 s are not a minute. The counters have changed.
    assert amounts(result) == {
        HOUR - HOUR_S: {DRAM: 30, "hits": 3},
        HOUR: {DRAM: 40, "hits": 5, "misses": 1},
    }


def test_a_report_at_the_very_end_of_an_hour_belongs_to_the_hour_that_it_tells_of() -> None:
    process = first(HOUR - 2, Reading())
    assert amounts(taken(process, 2, HOUR, Reading(counters={"hits": 1}))) == {HOUR - HOUR_S: {"hits": 1}}


def test_i8_a_gap_is_booked_as_the_lesser_of_its_ends_and_told() -> None:
    process = first(HOUR, Reading(dram_bytes=10))
    result = taken(process, 2, HOUR + 7000, Reading(dram_bytes=4))
    assert amounts(result) == {
        HOUR: {DRAM: 4 * HOUR_S, GAP: HOUR_S},
        HOUR + HOUR_S: {DRAM: 4 * (7000 - HOUR_S), GAP: 7000 - HOUR_S},
    }


def test_i8_what_comes_late_for_a_closed_hour_goes_to_the_oldest_open_one() -> None:
    process = first(HOUR - 8, Reading(dram_bytes=10))
    result = taken(process, 2, HOUR + 1, Reading(dram_bytes=10, counters={"hits": 9}), open_from_s=HOUR)
    assert amounts(result) == {HOUR: {DRAM: 90, "hits": 9, LATE: 8}}


def test_i8_of_a_late_stretch_only_what_is_of_closed_hours_is_moved() -> None:
    process = first(HOUR - 8, Reading(dram_bytes=10))
    result = taken(process, 2, HOUR + HOUR_S + 4, Reading(dram_bytes=10), open_from_s=HOUR)
    assert amounts(result) == {
        HOUR: {DRAM: 10 * (HOUR_S + 8), GAP: HOUR_S + 8, LATE: 8},
        HOUR + HOUR_S: {DRAM: 40, GAP: 4},
    }


def test_what_does_not_change_is_booked_once_a_minute_each_tenant_in_its_own_second() -> None:
    subjects = [Subject(TenantId(f"t{index}"), f"uid-{index}") for index in range(200)]
    readings = {subject: Reading(dram_bytes=1) for subject in subjects}
    begun = take_in(Process(), 1, HOUR, 0, readings)
    assert begun is not None
    process, written = begun.process, []
    for sequence, now_s in enumerate(range(HOUR + 2, HOUR + BOOK_EVERY_S + 2, 2), start=2):
        result = take_in(process, sequence, now_s, 0, readings)
        assert result is not None
        process = result.process
        written.append(len(result.changed))
    assert sum(written) == len(subjects) and max(written) < len(subjects) / 8


def test_a_subject_without_use_costs_nothing() -> None:
    result = taken(Process(), 1, HOUR, Reading(counters={"hits": 0}))
    assert not result.changed and not result.process.meters


class Life:
    """One process as it really was: what it counted, and the reports of it that were taken in."""

    def __init__(self) -> None:
        self.held_bytes = self.hits = self.sequence = 0
        self.taken_in: list[tuple[int, Reading]] = []

    @property
    def hits_reported(self) -> int:
        return self.taken_in[-1][1].counters["hits"] if self.taken_in else 0

    @property
    def byte_seconds(self) -> int:
        """The lesser end of each stretch between reports."""
        stretches = zip(self.taken_in, self.taken_in[1:], strict=False)
        return sum(min(a.dram_bytes, b.dram_bytes) * (b_s - a_s) for (a_s, a), (b_s, b) in stretches)


class MeteringMachine(RuleBasedStateMachine):
    """Processes that report and are killed; reports lost, late and repeated; hours that close; clocks set back."""

    def __init__(self) -> None:
        super().__init__()
        self.clock_s = HOUR + HOUR_S - 40
        self.open_from_s = 0
        self.closed: dict[int, dict[str, int]] = {}
        self.booked: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.lives = [Life()]
        self.processes = [Process()]
        self.delayed: list[tuple[int, int, Reading]] = []

    def _report(self) -> tuple[int, int, Reading]:
        life = self.lives[-1]
        life.sequence += 1
        return len(self.lives) - 1, life.sequence, Reading(dram_bytes=life.held_bytes, counters={"hits": life.hits})

    def _deliver(self, number: int, sequence: int, reading: Reading) -> bool:
        result = take_in(self.processes[number], sequence, self.clock_s, self.open_from_s, {ACME: reading})
        if result is None:
            return False
        self.processes[number] = result.process
        self._book(result.booked.get(ACME))
        assert result.process.last_s is not None
        self.lives[number].taken_in.append((result.process.last_s, reading))
        return True

    def _book(self, bookings: Bookings | None) -> None:
        for hour_s, found in () if bookings is None else bookings.by_hour.items():
            assert hour_s >= self.open_from_s and hour_s % HOUR_S == 0
            for name, amount in found.items():
                assert amount > 0
                self.booked[hour_s][name] += amount

    @rule(seconds=st.one_of(st.integers(0, 5), st.integers(GAP_AFTER_S, 3 * HOUR_S)))
    def time_passes(self, seconds: int) -> None:
        self.clock_s += seconds

    @rule(seconds=st.integers(1, 100))
    def the_clock_is_set_back(self, seconds: int) -> None:
        self.clock_s = max(HOUR, self.clock_s - seconds)

    @rule(held_bytes=st.integers(0, 50), hits=st.integers(0, 9))
    def work(self, held_bytes: int, hits: int) -> None:
        self.lives[-1].held_bytes = held_bytes
        self.lives[-1].hits += hits

    @rule(times=st.integers(1, 3))
    def report(self, times: int) -> None:
        report = self._report()
        assert self._deliver(*report)
        for _ in range(times - 1):
            assert not self._deliver(*report)

    @rule()
    def a_report_is_lost(self) -> None:
        self._report()

    @rule()
    def a_report_is_delayed(self) -> None:
        self.delayed.append(self._report())

    @rule(data=st.data())
    def delayed_reports_arrive_in_any_order(self, data: st.DataObject) -> None:
        for report in data.draw(st.permutations(self.delayed)):
            self._deliver(*report)
        self.delayed.clear()

    @rule()
    def the_process_is_killed(self) -> None:
        self.lives.append(Life())
        self.processes.append(Process())

    @rule()
    def silent_processes_are_settled(self) -> None:
        for number, process in enumerate(self.processes):
            if process.last_s is None or self.clock_s - process.last_s <= BOOK_EVERY_S:
                continue
            meters: dict[Subject, Meter] = {}
            for subject, meter in process.meters.items():
                bookings = Bookings()
                meters[subject] = settle(meter, process.last_s, self.open_from_s, bookings)
                self._book(bookings)
            self.processes[number] = Process(process.sequence, process.last_s, meters)

    @rule()
    def hours_close(self) -> None:
        self.open_from_s = max(self.open_from_s, (self.clock_s - 300) // HOUR_S * HOUR_S)
        for hour_s in [hour_s for hour_s in self.booked if hour_s < self.open_from_s]:
            assert hour_s not in self.closed
            self.closed[hour_s] = dict(self.booked.pop(hour_s))

    def _total(self, name: str) -> int:
        return sum(hour.get(name, 0) for hour in (*self.closed.values(), *self.booked.values()))

    @invariant()
    def every_hit_that_was_reported_is_booked_once(self) -> None:
        assert self._total("hits") == sum(life.hits_reported for life in self.lives)

    @invariant()
    def what_was_held_is_booked_once(self) -> None:
        owed = 0
        for process in self.processes:
            for meter in process.meters.values():
                assert process.last_s is not None and meter.since_s <= process.last_s
                owed += meter.reading.dram_bytes * (process.last_s - meter.since_s)
        assert self._total(DRAM) + owed == sum(life.byte_seconds for life in self.lives)

    @invariant()
    def no_hour_has_more_than_its_time(self) -> None:
        for hour_s, hour in (*self.closed.items(), *self.booked.items()):
            seconds = HOUR_S * len(self.processes) + hour.get(LATE, 0)
            assert hour.get(DRAM, 0) <= 50 * seconds and hour.get(GAP, 0) <= seconds, hour_s


MeteringMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMeteringMachine = MeteringMachine.TestCase
