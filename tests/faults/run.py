"""One fault after another under load: what was lost, what went on, and how long each was felt."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from saltern.admin_client import AdminClient
from saltern.keys import BlockKey
from tests.chaos.content import key_of
from tests.faults.deployment import ACTS, CONTROLS, NODES, PINNED, POSTGRES, ROAMING, TENANTS, Deployment, Service
from tests.faults.drivers import AdminDriver, DataDriver, Driver, ExchangeDriver
from tests.support.network import NamespaceHost
from tests.support.waiting import wait_until

WELL_FOR_S = 1.5
WELL_WITHIN_S = 90.0
_METHOD = "saltern.admin.v1.QuotaService/UpdateQuota"
_NUMBERS = re.compile(r"\d{8,}")
_NAMES = {"node": NODES[0], "control plane": CONTROLS[0], "postgres": POSTGRES}
#: A fault is felt this long at least before it ends; an outage that is over at once shows nothing.
_KILLED_S, _HELD_S = 3.0, 8.0


class Way(StrEnum):
    """How something fails."""

    KILL = "kill -9"
    PAUSE = "pause"
    CUT = "cut"
    SLOW = "slow"


class Target(StrEnum):
    """What fails."""

    NODE = "node"
    CONTROL = "control plane"
    POSTGRES = "postgres"


ALL = tuple((target, way) for target in Target for way in Way)
#: What ``make test`` has time for; each part fails once.
SHORT = ((Target.NODE, Way.KILL), (Target.CONTROL, Way.CUT), (Target.POSTGRES, Way.KILL))


@dataclass
class Outcome:
    """Of one fault.

    Attributes:
        detail: what exactly was done.
        felt: by kind of work, see ``Journal.felt``; none where it could not be tried.
        skipped: why it was not tried, or empty.
        violations: what must never be.
        lost: acknowledged entries that are gone, which a killed node's are allowed to be.
    """

    target: str
    way: str
    detail: str = ""
    held_s: float = 0.0
    recovered_s: float = 0.0
    felt: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: str = ""
    lost: int = 0
    acknowledged: int = 0
    violations: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class FaultRun:
    """Drives the load, makes things fail, and looks at what that did.

    Args:
        say: prints a line of progress.
    """

    def __init__(self, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._deployment = deployment
        self._say = say
        keys = deployment.keys
        self._pinned = [
            DataDriver(deployment.control(number), keys[PINNED], node, node) for number, node in enumerate(NODES)
        ]
        self._roaming = [
            DataDriver(deployment.control(number), keys[ROAMING], namespace)
            for number, namespace in enumerate(TENANTS[ROAMING])
        ]
        self._exchange = ExchangeDriver(deployment.control, keys[PINNED], NODES[0])
        self._admin = AdminDriver(
            deployment.control, lambda endpoint: AdminClient(endpoint, deployment.admin_secret, deadline_ms=2000)
        )
        self._drivers: list[Driver] = [*self._pinned, *self._roaming, self._exchange, self._admin]

    def run(self, faults: Sequence[tuple[Target, Way]]) -> list[Outcome]:
        """Try each of ``faults``; every outcome is there, those that were skipped too."""
        with self.load():
            return [self._try(target, way) for target, way in faults]

    @contextmanager
    def load(self) -> Iterator[None]:
        """Everybody works for the time of the block; for who does with the services what no fault does."""
        for driver in self._drivers:
            driver.start()
        try:
            yield
        finally:
            for driver in self._drivers:
                driver.stop()

    def watch(self, target: Target, way: str, service: Service, act: Callable[[], None]) -> Outcome:
        """Do something planned to ``service``, which may lose its memory; what that did to everybody, as of a fault."""
        outcome = Outcome(target.value, way, service.name)
        self._wait_until_well("before it", outcome)
        before = {driver.name: sorted(driver.stored) for driver in self._pinned}
        noted = {driver.name: len(driver.journal.violations) for driver in self._drivers}
        began_s = time.monotonic()
        act()
        outcome.held_s = round(time.monotonic() - began_s, 2)
        self._check_what_goes_on(service, began_s, outcome)
        self._wait_until_well("after it", outcome)
        self._measure(service, began_s, outcome)
        self._check_data(service if target is Target.NODE else None, before, outcome)
        self._check_database(outcome)
        for driver in self._drivers:
            outcome.violations += driver.journal.violations[noted[driver.name] :]
        self._say(_line(outcome))
        return outcome

    # ---- one fault

    def _try(self, target: Target, way: Way) -> Outcome:
        outcome = Outcome(target.value, way.value)
        if way in (Way.CUT, Way.SLOW) and not self._deployment.can_cut:
            outcome.skipped = "needs root and network namespaces: on loopback there is no line to cut or to slow"
            self._say(f"{target} {way}: skipped, {outcome.skipped}")
            return outcome
        self._wait_until_well("before the fault", outcome)
        service = self._deployment.services[_NAMES[target]]
        outcome.detail = service.name
        before = {driver.name: sorted(driver.stored) for driver in self._pinned}
        noted = {driver.name: len(driver.journal.violations) for driver in self._drivers}
        began_s = time.monotonic()
        self._fail(service, way, outcome)
        time.sleep(_KILLED_S if way is Way.KILL else _HELD_S)
        self._check_what_goes_on(service, began_s, outcome)
        mended_s = time.monotonic()
        self._mend(service, way)
        outcome.held_s = round(mended_s - began_s, 2)
        self._wait_until_well("after it", outcome)
        outcome.recovered_s = round(time.monotonic() - mended_s - WELL_FOR_S, 2)
        self._measure(service, began_s, outcome)
        self._check_data(service if way is Way.KILL else None, before, outcome)
        self._check_database(outcome)
        for driver in self._drivers:
            outcome.violations += driver.journal.violations[noted[driver.name] :]
        self._say(_line(outcome))
        return outcome

    def _fail(self, service: Service, way: Way, outcome: Outcome) -> None:
        match way:
            case Way.KILL:
                service.kill()
            case Way.PAUSE:
                service.pause()
            case Way.CUT:
                _line_of(service).cut()
            case Way.SLOW:
                outcome.detail += f", {_line_of(service).slow()}"

    def _mend(self, service: Service, way: Way) -> None:
        match way:
            case Way.KILL:
                service.start()
                service.wait_ready()
            case Way.PAUSE:
                service.resume()
            case Way.CUT | Way.SLOW:
                _line_of(service).mend()

    def _wait_until_well(self, when: str, outcome: Outcome) -> None:
        try:
            wait_until(lambda: all(driver.journal.is_well(WELL_FOR_S) for driver in self._drivers), WELL_WITHIN_S)
        except AssertionError:
            ill = [driver.name for driver in self._drivers if not driver.journal.is_well(WELL_FOR_S)]
            outcome.violations.append(f"{when}: {', '.join(ill)} not well after {WELL_WITHIN_S:.0f} s")

    # ---- what was felt

    def _measure(self, service: Service, began_s: float, outcome: Outcome) -> None:
        there = [driver for driver in self._pinned if driver.node == service.name]
        elsewhere = [driver for driver in self._pinned if driver.node != service.name]
        for kind, drivers in {
            "reads, writes: that node": there,
            "reads, writes: other nodes": elsewhere,
            "reads, writes: any node": self._roaming,
            "exchange of API keys": [self._exchange],
            "administration": [self._admin],
        }.items():
            if drivers:
                outcome.felt[kind] = _worst([driver.journal.felt(began_s) for driver in drivers])

    # ---- what must be

    def _check_what_goes_on(self, service: Service, began_s: float, outcome: Outcome) -> None:
        """While it lasts: reads and writes go on at every node that has not failed itself (I9)."""
        for driver in self._pinned:
            felt = driver.journal.felt(began_s)
            if driver.node != service.name and felt["failed"]:
                outcome.violations.append(f"I9: {driver.name} felt it: {felt['why']}")

    def _check_data(self, ended: Service | None, before: dict[str, list[BlockKey]], outcome: Outcome) -> None:
        """What was acknowledged before is there, but for what was in the memory of a node whose process ``ended``."""
        for driver in self._pinned:
            was_killed = ended is not None and driver.node == ended.name
            # Of a memory that is gone, what was stored after the look before is gone too.
            keys = sorted(driver.stored) if was_killed else before[driver.name]
            outcome.acknowledged += len(keys)
            left: list[BlockKey] = keys

            def nothing_is_missing(driver: DataDriver = driver, keys: list[BlockKey] = keys) -> bool:
                nonlocal left
                left = driver.missing(keys)
                return not left

            try:
                wait_until(nothing_is_missing, 0.1 if was_killed else 10)
            except AssertionError:
                outcome.lost += len(left)
                if not was_killed:
                    outcome.violations.append(f"{len(left)} of {len(keys)} entries of {driver.name} are lost")
            if was_killed:
                driver.stored.difference_update(left)
            missing_key = key_of("nobody's", 1)
            if missing_key not in driver.missing([missing_key]):
                outcome.violations.append(f"{driver.name}: an entry that nobody stored")

    def _check_database(self, outcome: Outcome) -> None:
        """Acknowledged acts are audited (I11) and the last one is in force; leases are within every quota (I4)."""
        acknowledged = set(self._admin.acknowledged)
        with self._deployment.database() as database, database.transaction():
            database.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            audited = {
                int(limit_bytes)
                for (after,) in database.execute(
                    "SELECT after::text FROM audit_events WHERE chain = %s AND method = %s AND outcome = 'success'",
                    [ACTS, _METHOD],
                )
                for limit_bytes in _NUMBERS.findall(after)
            }
            in_force = database.execute(
                "SELECT limit_bytes FROM tier_quotas WHERE tenant_id = %s AND tier = 'dram'", [ACTS]
            ).fetchone()
            # What a node may go by: what it is granted once it has settled that, until then what it may have had.
            over = database.execute(
                "SELECT tenant_id, tier, sum(CASE WHEN settled_version >= version THEN granted_bytes"
                " ELSE believed_bytes END) AS held, max(limit_bytes) AS quota"
                " FROM quota_leases JOIN nodes ON nodes.id = node_id JOIN tier_quotas USING (tenant_id, tier)"
                " GROUP BY tenant_id, tier HAVING sum(CASE WHEN settled_version >= version THEN granted_bytes"
                " ELSE believed_bytes END) > max(limit_bytes)"
            ).fetchall()
        if silent := acknowledged - audited:
            outcome.violations.append(f"I11: {len(silent)} of {len(acknowledged)} acts are not in the audit trail")
        if acknowledged and (in_force is None or in_force[0] < max(acknowledged)):
            outcome.violations.append(f"the act that was acknowledged last is not in force: {in_force}")
        for row in over:
            outcome.violations.append(f"I4: leases above the quota: {row}")


def _line_of(service: Service) -> NamespaceHost:
    assert isinstance(service.host, NamespaceHost)
    return service.host


def _worst(felt: Sequence[dict[str, object]]) -> dict[str, Any]:
    """Of several that felt the same fault, the most that any of them felt, and all calls together."""
    rows: Sequence[dict[str, Any]] = felt
    worst: dict[str, Any] = {
        name: max(row[name] for row in rows) for name in ("first_to_last_failure_s", "longest_gap_s", "slowest_s")
    }
    worst |= {name: sum(row[name] for row in rows) for name in ("calls", "failed")}
    why: dict[str, int] = {}
    for row in rows:
        for reason, count in row["why"].items():
            why[reason] = why.get(reason, 0) + count
    return worst | {"why": why}


def _line(outcome: Outcome) -> str:
    felt = ", ".join(f"{kind} {what['longest_gap_s']:.1f} s" for kind, what in outcome.felt.items())
    bad = f"; VIOLATIONS: {outcome.violations}" if outcome.violations else ""
    return f"{outcome.target} {outcome.way} ({outcome.detail}): longest gaps: {felt}{bad}"
