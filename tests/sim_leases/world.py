"""Nodes, replicas and a faulty network under one random seed; every rule is checked after every event."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.node.push import NodeStream
from dataplane.core.extents import GRANULE_BYTES
from saltern.names import NodeId
from tests.sim_leases.checks import check_healed, check_instant
from tests.sim_leases.control import ControlPlane, Delta, FencedError, Snapshot
from tests.sim_leases.process import Folder, Process

REPORT_MS = 2_000
TICK_MS = 1_000
TRAFFIC_MS = 500
#: About so often somebody joins the sharing group or leaves it.
SHARING_MS = 9_000
#: What the clocks of two replicas may differ at most, in each direction.
REPLICA_SKEW_MS = 2_000
#: Faults end at this time, and everything has to be as it should be after ``HEALING_MS`` more.
FAULTS_END_MS = 120_000
HEALING_MS = 50_000
_TENANTS = ("a", "b")
_PUT_KEYS = 60
#: What only sends something changes nothing that the rules are about.
_SENDS = ("push", "turn", "answer answered")


@dataclass(slots=True)
class Result:
    """What came of one seed."""

    seed: int
    events: int = 0
    failure: str = ""
    done: Counter[str] = field(default_factory=Counter)
    transcript: list[str] = field(default_factory=list)


class World:
    """One seed.

    Args:
        seed: everything follows from it.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.result = Result(seed)
        self.now_ms = 0
        self._queue: list[tuple[int, int, str, Callable[[], None]]] = []
        #: What was ever pushed, by node: a broken proxy may bring it again, to whatever process there is.
        self._sent: dict[NodeId, list[Snapshot | Delta]] = {}
        self._counter = self._folders = 0
        self.control = ControlPlane({tenant: self._quota() for tenant in _TENANTS})
        self.replica_skews_ms = [self.random.randint(-REPLICA_SKEW_MS, REPLICA_SKEW_MS) for _ in range(2)]
        self.replicas_up = [True, True]
        self.processes: list[Process] = []
        for number in range(self.random.randint(1, 5)):
            self._start(NodeId(f"n{number}"), self._folder(), GRANULE_BYTES * self.random.randint(8, 64))
        for number in range(2):
            self._every(TICK_MS, "tick", lambda number=number: self._tick(number))  # type: ignore[misc]
        self._every(TRAFFIC_MS, "traffic", self._traffic)
        self._at(self.random.randint(1, 8_000), "fault", self._fault)
        # Every other world: who shares has more changes of policy, which is another mix.
        if seed % 2:
            self.control.join(_TENANTS[0])
            self._every(SHARING_MS, "sharing", self._share)

    def run(self) -> Result:
        """Play it to its end or to the first rule that does not hold."""
        end_ms = FAULTS_END_MS + HEALING_MS
        try:
            while self._queue and self._queue[0][0] <= end_ms:
                self.now_ms, _, what, act = heapq.heappop(self._queue)
                self.control.true_now_ms = self.now_ms
                act()
                self.result.events += 1
                self.result.done[what] += 1
                if what not in _SENDS:
                    check_instant(self.control, self.processes, self.now_ms)
                for process in self.processes:
                    if process.is_alive and process.core.policy.version and process.is_too_old(self.now_ms):
                        self._end(process, "its policy is too old")
            check_healed(self.control, self.processes, self.now_ms)
        except AssertionError as error:
            self.result.failure = f"at {self.now_ms} ms: {error}"
        return self.result

    # ---- time

    def _at(self, delay_ms: int, what: str, act: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._queue, (self.now_ms + delay_ms, self._counter, what, act))

    def _every(self, period_ms: int, what: str, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._at(period_ms, what, again)

        self._at(self.random.randint(0, period_ms), what, again)

    def _note(self, text: str) -> None:
        self.result.transcript.append(f"{self.now_ms:>8} ms  {text}")

    # ---- the network

    @property
    def _is_calm(self) -> bool:
        return self.now_ms >= FAULTS_END_MS

    def _replica(self) -> int | None:
        """The clock's skew of a replica that answers, or None if none does."""
        up = [skew for skew, is_up in zip(self.replica_skews_ms, self.replicas_up, strict=True) if is_up]
        return self.random.choice(up) if up else None

    def _delay_ms(self) -> int:
        slow = not self._is_calm and self.random.random() < 0.03
        return self.random.randint(1_000, 25_000) if slow else self.random.randint(1, 200)

    def _is_lost(self, process: Process) -> bool:
        return process.is_cut_off or (not self._is_calm and self.random.random() < 0.03)

    def _call(self, process: Process, what: str, at_control: Callable[[int], Callable[[], None]]) -> None:
        """A call of a node: it may be lost on either way, be late, and reach the control plane twice."""
        copies = 2 if not self._is_calm and self.random.random() < 0.05 else 1

        def arrive() -> None:
            skew_ms = self._replica()
            if skew_ms is None or process.is_cut_off:
                return
            try:
                answer = at_control(self.now_ms + skew_ms)
            except FencedError:
                answer = lambda: self._fenced(process)  # noqa: E731
            if not self._is_lost(process):
                self._deliver(process, f"{what} answered", answer)

        for _ in range(copies):
            if not self._is_lost(process):
                self._at(self._delay_ms(), what, arrive)

    def _deliver(self, process: Process, what: str, act: Callable[[], None]) -> None:
        def arrive() -> None:
            if not process.is_alive:
                return
            if process.is_paused:
                self._at(500, what, arrive)
            else:
                act()

        self._at(self._delay_ms(), what, arrive)

    # ---- nodes

    def _start(self, node: NodeId, folder: Folder, capacity_bytes: int) -> Process:
        process = Process(
            node,
            folder,
            capacity_bytes,
            # A folder's time is its host's: the host keeps its clock over restarts.
            clock_offset_ms=sum(map(ord, folder.state_id)) * 1_000,
            clock_rate=1 + (len(self.processes) % 3 - 1) / 2_000,
        )
        self.processes.append(process)
        process.start(self.now_ms)
        self._note(f"{node} starts in {folder.state_id}")
        self._loop(process)
        return process

    def _end(self, process: Process, why: str, back_ms: int = 40_000) -> None:
        process.is_alive = False
        self._note(f"{process.node} of {process.folder.state_id} ends: {why}")
        if not self._is_calm or not any(other.is_alive and other.node == process.node for other in self.processes):
            delay_ms = 1_000 if self._is_calm else self.random.randint(500, back_ms)
            self._at(delay_ms, "restart", lambda: self._restart(process))

    def _folder(self) -> Folder:
        """A new one: a process locks its folder, so no two processes ever have the same at once."""
        self._folders += 1
        return Folder(f"folder-{self._folders}")

    def _restart(self, old: Process) -> None:
        if not any(process.is_alive and process.node == old.node for process in self.processes):
            self._start(old.node, old.folder, old.capacity_bytes).is_cut_off = old.is_cut_off and not self._is_calm

    def _loop(self, process: Process) -> None:
        """Register, then report, for as long as the process lives."""

        def turn() -> None:
            if not process.is_alive:
                return
            if not process.is_paused:
                if not process.epoch:
                    self._register(process)
                else:
                    self._report(process)
            self._at(REPORT_MS, "turn", turn)

        self._at(1, "turn", turn)

    def _register(self, process: Process) -> None:
        sent_ms = process.clock_ms(self.now_ms)

        def at_control(now_ms: int) -> Callable[[], None]:
            epoch, lease_version = self.control.register(
                process.node, process.folder.state_id, process.capacity_bytes, now_ms
            )

            def answered() -> None:
                if epoch > process.epoch:
                    process.registered(sent_ms, epoch, lease_version, self.now_ms)
                    self._open_stream(process)

            return answered

        self._call(process, "register", at_control)

    def _report(self, process: Process) -> None:
        sent_ms, epoch, versions = process.clock_ms(self.now_ms), process.epoch, process.versions

        def at_control(now_ms: int) -> Callable[[], None]:
            lease_version, newest = self.control.report(process.node, epoch, versions, now_ms)

            def answered() -> None:
                if process.epoch == epoch:
                    process.answered(sent_ms, lease_version, newest, self.now_ms)
                    # A stream that has died silently shows in that nothing comes of what is known to be there.
                    if process.touch.behind_s(process.clock_ms(self.now_ms)) > 3 * REPORT_MS:
                        self._open_stream(process)

            return answered

        self._call(process, "report", at_control)

    def _fenced(self, process: Process) -> None:
        # Which of two processes of one name goes on is the operator's business; here the one that is cut off ends.
        if any(other.is_alive and other.node == process.node and other is not process for other in self.processes):
            self._end(process, "fenced by another process")
        else:
            process.epoch = 0

    def _open_stream(self, process: Process) -> None:
        process.stream += 1
        stream, epoch = process.stream, process.epoch
        sender = NodeStream(process.node, epoch, accepts_deltas=self.random.random() < 0.8)
        arrives_ms = 0

        def push() -> None:
            nonlocal arrives_ms
            if not process.is_alive or process.stream != stream:
                return
            self._at(self.random.randint(100, 900), "push", push)
            if self._replica() is None or process.is_cut_off or process.stalled_stream == stream:
                return
            if not sender.answered.is_set() or self.control.version <= sender.sent_version:
                return
            try:
                sent = self.control.push(process.node, epoch, sender.base_version)
            except FencedError:
                return
            if isinstance(sent, Snapshot):
                sender.base_version = None
            if self._is_lost(process):
                return  # before it was sent; on the way only with the whole stream
            sender.sent(sent.version)
            self.result.done["snapshot" if isinstance(sent, Snapshot) else "delta"] += 1
            arrives_ms = max(arrives_ms, self.now_ms + self._delay_ms())
            self._sent.setdefault(process.node, []).append(sent)
            # A broken proxy may repeat itself.
            copies = 2 if not self._is_calm and self.random.random() < 0.05 else 1
            for _ in range(copies):
                self._at(arrives_ms - self.now_ms, "policy", lambda: arrive(sent))

        def arrive(sent: Snapshot | Delta) -> None:
            if not process.is_alive or process.stream != stream:
                return
            if process.is_paused:
                self._at(500, "policy", lambda: arrive(sent))
                return
            in_force = process.receive(sent, self.now_ms)
            if in_force is None:
                self.result.done["refused"] += 1
                answer(is_refusal=True)
            else:
                self._at(self.random.choice([1, 5, 30, 5_000]), "kept", lambda: kept(in_force))

        def kept(in_force: Snapshot) -> None:
            if process.is_alive and not process.is_paused:
                process.keep(in_force)
                answer(is_refusal=False)

        def answer(*, is_refusal: bool) -> None:
            versions = process.versions

            def at_control(_: int) -> Callable[[], None]:
                self.control.answer(process.node, epoch, versions)
                sender.take_answer(versions[0], is_refusal=is_refusal)
                return lambda: None

            self._call(process, "answer", at_control)

        push()

    # ---- what happens

    def _quota(self) -> int:
        return self.random.choice([0, 1, 3, 10, 40, 100]) * GRANULE_BYTES + self.random.choice([0, 0, 17])

    def _tick(self, replica: int) -> None:
        if self.replicas_up[replica]:
            self.control.tick(self.now_ms + self.replica_skews_ms[replica])

    def _traffic(self) -> None:
        for process in self.processes:
            if process.is_serving(self.now_ms) and not process.is_paused:
                for tenant in self.control.members:
                    process.open_group(tenant, self.now_ms)
                self.result.done["peers read"] += bool(process.readers_of_peers(self.now_ms))
                for _ in range(3):
                    process.put_start(self.random.choice(_TENANTS), self.random.randrange(_PUT_KEYS), self.now_ms)
                while len(process.tickets) > (0 if self._is_calm else 4) or self.random.random() < 0.5:
                    process.put_end(self.random.randrange(100), self.now_ms)
                    if not process.tickets:
                        break

    def _fault(self) -> None:
        """One thing that goes wrong, or that an operator does; and its end, some time later."""
        if self._is_calm:
            self._heal()
            return
        self._at(self.random.randint(200, 12_000), "fault", self._fault)
        alive = [process for process in self.processes if process.is_alive]
        process = self.random.choice(alive) if alive else None
        lasts_ms = self.random.choice([500, 3_000, 10_000, 30_000, 60_000])
        match self.random.choice(
            [
                "quota",
                "quota",
                "revoke",
                "revoke",
                "crash",
                "alone",
                "cut",
                "pause",
                "stall",
                "replica",
                "outage",
                "drain",
                "move",
                "join",
            ]
        ):
            case "quota":
                tenant, quota = self.random.choice(_TENANTS), self._quota()
                self._note(f"quota of {tenant}: {quota}")
                self.control.set_quota(tenant, quota)
            case "replay":
                self._replay(
                    self.random.choice([process for process in alive if process.is_cut_off] or alive or [None])
                )
            case "revoke":
                self._revoke(self.random.choice(_TENANTS))
            case "crash" if process:
                self._end(process, "killed")
            case "alone" if process:
                self._end(process, f"killed, and its host cut off for {lasts_ms} ms", back_ms=2_000)
                process.is_cut_off = True
                self._at(lasts_ms, "mend", lambda: self._mend(process.folder))
            case "stall" if process:
                self._note(f"policies no longer reach {process.node}, and nobody says so")
                process.stalled_stream = process.stream
            case "cut" if process:
                self._note(f"{process.node} cut off for {lasts_ms} ms")
                process.is_cut_off = True
                self._at(lasts_ms, "mend", lambda: setattr(process, "is_cut_off", False))
            case "pause" if process:
                self._note(f"{process.node} paused for {lasts_ms} ms")
                process.is_paused = True
                self._at(lasts_ms, "resume", lambda: setattr(process, "is_paused", False))
            case "replica" | "outage" as what:
                for number in range(2) if what == "outage" else [self.random.randrange(2)]:
                    self._note(f"replica {number} down for {lasts_ms} ms")
                    self.replicas_up[number] = False
                    self._at(lasts_ms, "up", lambda number=number: self.replicas_up.__setitem__(number, True))  # type: ignore[misc]
            case "drain" if self.control.nodes:
                node = self.random.choice(sorted(self.control.nodes))
                row = self.control.nodes[node]
                row.is_draining = not row.is_draining
                self._note(f"{node} {'drains' if row.is_draining else 'is uncordoned'}")
                self.control.bump()
            case "move" if process:
                self._note(f"{process.node} cut off, and started elsewhere")
                process.is_cut_off = True
                folder = self._folder()
                self._at(self.random.randint(100, 20_000), "move", lambda: self._moved(process, folder))
            case "join" if len({process.node for process in self.processes}) < 7:
                self._start(NodeId(f"n{len(self.processes)}"), self._folder(), GRANULE_BYTES * 16)

    def _replay(self, process: Process | None) -> None:
        """What another process of the node was sent, or this one before, is brought again."""
        if process is None or process.is_paused or not self._sent.get(process.node):
            return
        old = self.random.choice(self._sent[process.node][-20:])
        self._note(f"{process.node} of {process.folder.state_id} is brought {old} once more")
        in_force = process.receive(old, self.now_ms)
        if in_force is not None:
            process.keep(in_force)

    def _revoke(self, tenant: str) -> None:
        """Revoke, and wait until that is in force everywhere; from then on nobody may go by what was before."""
        version = self.control.revoke(tenant)
        self._note(f"tokens of {tenant} revoked with {version}")
        self._wait_for(version)

    def _share(self) -> None:
        """The second tenant joins the group of the first one, or leaves it and waits until no node shares (I2)."""
        if self._is_calm or self.random.random() < 0.3:
            return
        guest = _TENANTS[1]
        if guest not in self.control.members:
            self.control.join(guest)
            self._note(f"{guest} joins the group with {self.control.version}")
            return
        version = self.control.leave(guest)
        self._note(f"{guest} leaves the group with {version}")
        self._wait_for(version)

    def _wait_for(self, version: int) -> None:
        until_ms = self.now_ms + self.random.choice([5_000, 60_000])

        def look() -> None:
            skew_ms = self._replica()
            if skew_ms is not None and self.control.is_everywhere(version, self.now_ms + skew_ms):
                self._note(f"{version} is everywhere")
                self.result.done["waited"] += 1
                self.control.waited_version = max(self.control.waited_version, version)
            elif self.now_ms < until_ms:
                self._at(200, "wait", look)

        look()

    def _mend(self, folder: Folder) -> None:
        for process in self.processes:
            if process.folder is folder:
                process.is_cut_off = False

    def _moved(self, old: Process, folder: Folder) -> None:
        if sum(process.is_alive and process.node == old.node for process in self.processes) < 2:
            self._start(old.node, folder, old.capacity_bytes)

    def _heal(self) -> None:
        """End every fault; of two processes of one name the older one is stopped."""
        self._note("every fault ends")
        self.replicas_up = [True, True]
        for row in self.control.nodes.values():
            row.is_draining = False
        self.control.bump()
        newest: dict[NodeId, Process] = {}
        for process in self.processes:
            process.is_cut_off = process.is_paused = False
            if process.is_alive:
                if process.node in newest:
                    self._end(newest[process.node], "stopped by its operator")
                newest[process.node] = process
