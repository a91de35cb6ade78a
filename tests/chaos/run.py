"""A chaos run: live, die, restart, and after every restart look whether what was promised is there."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

from saltern.client import Client
from saltern.keys import BlockKey
from saltern.results import Hit
from tests.chaos.content import content_of, is_right
from tests.chaos.deployment import (
    CHANGING,
    GUEST,
    MIB,
    SHARES,
    TURNING,
    Deployment,
    NodeDiedError,
    NodeProcess,
    Share,
    Worker,
)
from tests.chaos.disk_view import Place, PlaceView, view_of
from tests.chaos.epochs import Turning
from tests.chaos.guest import Guest
from tests.chaos.plan import AT_RANDOM, CLEAN_STOP, RECOVERY, Life, draw_life
from tests.chaos.sharing import WRONG_BYTES, Pair
from tests.chaos.truth import KEYS, SETTLE_S, Truth, require_alive
from tests.chaos.worker import Report
from tests.support.waiting import wait_until

READ_BATCH = 16
#: Until an idle node has trimmed what is above a soft mark.
CALM_S = 0.5
#: On SSD of one tenant before the first kill, and how long that may take.
FILL_ENTRIES, FILL_S = 100, 60.0
#: Every tenant over both transports.
CLIENTS = [(tenant, transport) for tenant in SHARES for transport in ("tcp", "shm")]


@dataclass
class Totals:
    """What a run found, and how often it looked.

    Attributes:
        kills: of the node, by how it died; ``kills_of_others`` of clients and the control plane.
        violations: what must never be; a run without one is a run that passed.
        checked: what was compared, by kind.
        seen: what clients were answered.
        slowest_s: the longest call of any client.
        node_resident_bytes: after each restart, before clients come.
        client_resident_bytes: of the clients that lived through all of it, at each pause.
    """

    kills: Counter[str] = field(default_factory=Counter)
    kills_of_others: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    restart_s: list[float] = field(default_factory=list)
    node_resident_bytes: list[int] = field(default_factory=list)
    client_resident_bytes: list[int] = field(default_factory=list)


class ChaosRun:
    """Runs the lives of one seed against one deployment.

    Args:
        say: prints a line of progress.
    """

    def __init__(self, deployment: Deployment, seed: int, resources: ExitStack, say: Callable[[str], None]) -> None:
        self._deployment = deployment
        self._plan = Random(seed)
        self._rng = Random(f"{seed}, and what depends on processes")
        self._guest = Guest(seed, KEYS)
        self._say = say
        self._resources = resources
        self.totals = Totals()
        self._workers: list[Worker] = []
        self._last_reports: dict[int, Report] = {}
        self._turning = Turning(deployment, TURNING, seed, KEYS)
        self._pair = Pair(deployment, seed)
        self._truth = Truth(deployment, self._turning, self._pair, resources)
        self._node: NodeProcess | None = None
        self._with_ssd = True
        self._seeds = 0
        self._left_behind: dict[str, list[BlockKey]] = {}
        resources.callback(self._end)
        resources.callback(self._turning.close)
        resources.callback(self._pair.close)

    def run(self, kills: int, *, dram_share: float = 0.2) -> Totals:
        """Kill the node ``kills`` times, the last ``dram_share`` of them without an SSD tier."""
        self._fill()
        without_ssd = int(kills * dram_share)
        while self.totals.kills.total() < kills:
            self._with_ssd = self.totals.kills.total() < kills - without_ssd
            before = self.totals.kills.total()
            self._live(draw_life(self._plan, with_ssd=self._with_ssd))
            for number in range(before + 1, self.totals.kills.total() + 1):
                if number % 10 == 0 or number == kills:
                    self._say(self._progress(number, kills))
        node = self._restarted(None)
        self._compare_with_truth(node, "at the end")
        return self.totals

    # ---- one life

    def _fill(self) -> None:
        """Start everything and let clients work until both tiers hold something: from here on there is what to lose."""
        node = self._restarted(None)
        assert node is not None, "the node does not start"
        self._start_missing_workers()
        for worker in self._workers:
            worker.go()
        wait_until(lambda: node.books()["tenants"][CHANGING]["ssd_entries"] > FILL_ENTRIES, FILL_S)
        self._pause()
        node.kill()
        self._died(AT_RANDOM)

    def _live(self, life: Life) -> None:
        expected = self._look_at_disk()
        self._turning.look()
        node = self._restarted(life)
        if node is None:
            return
        try:
            if life.aims_at_recovery:
                node.turn_trigger()
            self._verify(node, expected)
            if life.aim is not None and not life.aims_at_recovery:
                node.turn_trigger()
            self._work(node, life)
        except NodeDiedError:
            pass
        if life.way == CLEAN_STOP:
            self._stop_cleanly(node)
            return
        if node.is_alive:
            node.kill()
            self._died(AT_RANDOM)
        else:
            self._check_how_it_died(node)
            self._died(life.way)
        time.sleep(life.linger_s)
        self._pause()

    def _stop_cleanly(self, node: NodeProcess) -> None:
        """Whatever is on either tier now must be there after the next start."""
        self._pause()
        self._compare_with_truth(node, "before a clean stop")
        time.sleep(CALM_S)
        self._left_behind = {
            tenant: [key for key, is_there in self._truth.there(tenant, node).items() if is_there] for tenant in SHARES
        }
        status = node.stop()
        if status:
            self._wrong(f"a clean stop ended with status {status}: {self._log_tail('node.log')}")
        self.totals.checked["clean stops"] += 1

    def _work(self, node: NodeProcess, life: Life) -> None:
        """Clients work until the node is dead, or its time is over."""
        self._start_missing_workers()
        for worker in self._workers:
            worker.go()
        self._load(node, life)
        if life.books_are_checked and node.is_alive:
            self._pause()
            self._compare_with_truth(node, "under load")
            for worker in self._workers:
                worker.go()
            time.sleep(0.05)

    def _load(self, node: NodeProcess, life: Life) -> None:
        """Clients work; what is to happen in the middle, happens."""
        end_s = time.monotonic() + (max(2.0, 3 * life.load_s) if life.aim else life.load_s)
        middle_s = time.monotonic() + life.load_s * self._rng.uniform(0.2, 0.8)
        if life.client_dies:
            _sleep_until(middle_s, node)
            victim = self._rng.choice(self._workers)
            victim.kill()
            self._workers.remove(victim)
            self._last_reports.pop(victim.process.pid, None)
            self.totals.kills_of_others["client"] += 1
        if life.control_dies:
            self._deployment.kill_control()
            self.totals.kills_of_others["control plane"] += 1
            time.sleep(0.1)
            self._deployment.restart_control()
        if node.is_alive and (what := self._guest.draw()):
            self._renew_guest(node, what)
        if node.is_alive and (grace_s := self._turning.draw()) is not None:
            self._turning.rotate(grace_s)
            self._truth.forget(TURNING)
            self.totals.checked[f"salts rotated, grace {grace_s} s"] += 1
        if node.is_alive:
            self._share()
        while node.is_alive and time.monotonic() < end_s:
            if life.way == "while a policy is applied":
                self._change_policy()
            _sleep_until(min(end_s, time.monotonic() + 0.05), node)

    def _renew_guest(self, node: NodeProcess, what: str) -> None:
        """Store entries, delete whose they are, and make it anew under the same name: they must never be seen again."""
        keys = self._guest.next_keys()
        self._truth.reader(GUEST).put_many([(key, content_of(key)) for key in keys])
        self._truth.forget(GUEST)
        self._guest.renew(self._deployment, what, keys)
        self.totals.checked[f"{what} made anew"] += 1
        self._wait_until_guest_is_served(node, keys[0])

    def _wait_until_guest_is_served(self, node: NodeProcess, key: BlockKey) -> None:
        end_s = time.monotonic() + SETTLE_S
        while node.is_alive and (error := self._truth.reader(GUEST).lookup([key]).error) is not None:
            if time.monotonic() > end_s:
                self._wrong(f"what was made anew is not served after {SETTLE_S:.0f} s: {error!r}, {error.reason}")
                return
            time.sleep(0.02)

    def _share(self) -> None:
        """The two that share take a step: they form their group, use it, or part."""
        for what, count in self._pair.act():
            self.totals.checked[what] += count
            if what == WRONG_BYTES:
                self._wrong(f"I2: {what}")

    def _verify_what_has_ended(self, node: NodeProcess) -> None:
        """What the node has once acknowledged to be over it refuses from its first answer on (I2, I12)."""
        turning, pair = self._turning, self._pair
        for epoch in turning.served(turning.refused):
            self._wrong(f"I12: epoch {epoch}, which the node knew to be over, is served again")
        if served := pair.served(pair.refused):
            self._wrong(f"I2: {served} sessions of a group that the node knew to be left are opened again")
        self.totals.checked["ended epochs refused"] += len(turning.refused)
        self.totals.checked["sessions of groups that were left refused"] += len(pair.refused)

    def _verify_what_was_deleted(self, node: NodeProcess) -> None:
        there = self._truth.there(GUEST, node)
        self.totals.checked["deleted entries looked for"] += len(self._guest.deleted)
        if back := [key for key in self._guest.deleted if there[key]]:
            self._wrong(f"I12: {len(back)} entries of a deleted tenant, namespace or salt epoch are back")

    def _restarted(self, life: Life | None) -> NodeProcess | None:
        """A node that serves; None if it died on the way there, as it was meant to."""
        began_s = time.monotonic()
        node = self._node = self._deployment.start_node(
            with_ssd=self._with_ssd, aim=life.aim if life else None, at_once=life is not None and life.aims_at_recovery
        )
        if not node.wait_ready():
            self._check_how_it_died(node)
            self._died(RECOVERY)
            return None
        self.totals.restart_s.append(time.monotonic() - began_s)
        return node

    def _check_how_it_died(self, node: NodeProcess) -> None:
        if not node.was_killed:
            self._wrong(f"the node ended by itself with status {node.process.poll()}: see {self._log_tail('node.log')}")

    def _died(self, way: str) -> None:
        self.totals.kills[way] += 1

    # ---- checks

    def _look_at_disk(self) -> dict[Place, PlaceView]:
        if not self._with_ssd:
            return {}
        return view_of(self._deployment.ssd_dir, self._deployment.state_dir)

    def _verify(self, node: NodeProcess, expected: dict[Place, PlaceView]) -> None:
        """Right after a restart, before any client comes: nothing flushed is lost, nothing is wrong.

        Raises:
            NodeDiedError: an aim came to pass meanwhile; what was missing then says nothing.
        """
        self.totals.node_resident_bytes.append(node.resident_bytes)
        self._verify_what_has_ended(node)
        self._compare_with_truth(node, "after the restart")
        self._verify_what_was_deleted(node)
        if self._left_behind:
            self._verify_what_was_left(node)
            return
        for place, view in expected.items():
            reader = self._reader_of(place)
            if reader is None:
                continue
            tenant = place.tenant
            self.totals.checked["sealed segments at a kill"] += view.sealed_segments
            self.totals.checked["open segments at a kill"] += view.open_segments
            for kind, keys in (("flushed", view.flushed), ("written", view.written - view.flushed)):
                lost = self._missing(tenant, sorted(keys), reader)
                require_alive(node)
                self.totals.checked[f"{kind} entries read back"] += len(keys) - len(lost)
                # Whose limit was lowered since may have lost some, oldest segments first.
                if lost and tenant not in (CHANGING, GUEST):
                    self._wrong(f"I7: {len(lost)} of {len(keys)} {kind} entries of {tenant} are lost")
        books = node.books()
        if books["fault"]:
            self._wrong(f"I8: after reading everything: {books['fault']}")

    def _verify_what_was_left(self, node: NodeProcess) -> None:
        """After a clean stop both tiers are as they were; reading moves entries between them, so look first."""
        there = {tenant: self._truth.there(tenant, node) for tenant in self._left_behind}
        for tenant, left in self._left_behind.items():
            lost = [key for key in left if not there[tenant][key]]
            require_alive(node)
            self.totals.checked["entries there after a clean stop"] += len(left) - len(lost)
            if lost:
                self._wrong(f"I7: {len(lost)} of {len(left)} entries of {tenant} are lost by a clean stop")
            self._missing(tenant, left, self._truth.reader(tenant))  # only the bytes count
        self._left_behind = {}

    def _reader_of(self, place: Place) -> Client | None:
        """Who must find what lies there; None if it may be gone: of an epoch that has ended, or will soon."""
        if place.is_shared:
            return self._pair.reader_of_the_other(place.tenant) if place.epoch == self._pair.epoch else None
        if place.tenant == TURNING:
            return self._turning.reader(place.epoch) if place.epoch in self._turning.live else None
        return self._truth.reader(place.tenant)

    def _missing(self, tenant: str, keys: Sequence[BlockKey], reader: Client) -> list[BlockKey]:
        """Which of ``keys`` cannot be read; wrong bytes are a violation."""
        missing = []
        for start in range(0, len(keys), READ_BATCH):
            part = keys[start : start + READ_BATCH]
            for key, result in zip(part, reader.get_many(part), strict=True):
                if not isinstance(result, Hit):
                    missing.append(key)
                elif not is_right(key, result.payload):
                    self._wrong(f"I7: wrong bytes of {tenant}")
        return [key for key in missing if not isinstance(reader.get_many([key])[0], Hit)]

    def _compare_with_truth(self, node: NodeProcess | None, when: str) -> None:
        """What the node says against what can be seen: keys that are there, files on disk (I4, I8)."""
        assert node is not None
        try:
            wait_until(lambda: not self._truth.disagreements(node), SETTLE_S)
        except AssertionError:
            disagreements = self._truth.disagreements(node)
            require_alive(node)
            for told in disagreements:
                self._wrong(f"{when}: {told}" if told.startswith("I") else f"I8 {when}: {told}")
        self.totals.checked["books compared"] += 1

    # ---- clients

    def _start_missing_workers(self) -> None:
        running = [(worker.orders.tenant, worker.orders.transport) for worker in self._workers]
        for tenant, transport in CLIENTS:
            if (tenant, transport) not in running:
                self._seeds += 1
                self._workers.append(self._deployment.start_worker(tenant, transport, self._seeds, KEYS))

    def _pause(self) -> None:
        """Every client must end its call in time, whatever has become of the node (I10)."""
        for worker in self._workers:
            worker.ask_to_pause()
        for worker in list(self._workers):
            report = worker.paused()
            if report is None:
                what = "hangs" if worker.process.poll() is None else f"died: {self._log_tail('workers.log')}"
                self._wrong(f"I10: a client of {worker.orders.tenant} over {worker.orders.transport} {what}")
                worker.kill()
                self._workers.remove(worker)
                continue
            self._take(worker, report)

    def _take(self, worker: Worker, report: Report) -> None:
        totals, last = self.totals, self._last_reports.get(worker.process.pid, Report())
        totals.seen += Counter(report.counts) - Counter(last.counts)
        totals.slowest_s = max(totals.slowest_s, report.slowest_s)
        for told in report.wrong[len(last.wrong) :]:
            self._wrong(f"I7: {told}")
        for told in report.late[len(last.late) :]:
            self._wrong(f"I10: {told}")
        totals.client_resident_bytes.append(report.resident_bytes)
        self._last_reports[worker.process.pid] = report

    def _change_policy(self) -> None:
        """Other limits for one tenant: often below what it uses."""
        rng = self._rng
        share = Share(0, rng.choice([1, 2, 4, 8]) * MIB, rng.choice([2, 4, 8, 12]) * MIB)
        self._deployment.set_quota(CHANGING, share)
        self.totals.checked["policies pushed"] += 1

    # ---- telling

    def _wrong(self, what: str) -> None:
        self.totals.violations.append(f"after {self.totals.kills.total()} kills: {what}")
        self._say(f"  VIOLATION {self.totals.violations[-1]}")

    def _progress(self, number: int, kills: int) -> str:
        totals = self.totals
        return (
            f"{number:>5} of {kills} kills   {totals.checked['flushed entries read back']:>8} flushed entries read back"
            f"   {totals.seen['hits']:>8} hits compared   {len(totals.violations)} violations"
        )

    def _log_tail(self, name: str) -> str:
        return " | ".join((self._deployment.folder / name).read_text(errors="replace").splitlines()[-5:])

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        if self._node is not None:
            self._node.kill()


def _sleep_until(when_s: float, node: NodeProcess) -> None:
    while node.is_alive and time.monotonic() < when_s:
        time.sleep(min(0.01, max(0.0, when_s - time.monotonic())))
