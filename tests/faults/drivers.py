"""Who works while something fails: readers and writers, exchanges of API keys, administrators; and what they felt."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from saltern.admin.v1.quotas_pb2 import TIER_DRAM, Quota, TierQuota, UpdateQuotaRequest
from saltern.admin_client import AdminClient
from saltern.client import Client
from saltern.credentials import ApiKeyCredentials, Grant, NodeEndpoint
from saltern.deadline import Deadline
from saltern.errors import SalternError
from saltern.exchange import exchange_api_key
from saltern.keys import BlockKey
from saltern.names import NamespaceId, TenantId, quota_name
from saltern.results import AlreadyStored, Hit, Miss, Stored
from tests.chaos.content import content_of, is_right, key_of
from tests.faults.deployment import ACTS, LIMIT_BYTES

CALL_DEADLINE_S = 1.0
CONTROL_DEADLINE_S = 2.0
#: What a busy machine may add to a deadline before a call counts as late.
SLACK_S = 1.5
_PAUSE_S = 0.05
#: Each act is a policy that every node is sent.
_ACT_PAUSE_S = 0.3
#: Of one namespace; all of them together fit, so that nothing is evicted.
_KEYS_MAX = 250


@dataclass
class Journal:
    """When calls of one kind went well and when not, on the monotonic clock.

    Attributes:
        outcomes: (end of the call, how long it took, what went wrong or an empty text).
    """

    deadline_s: float
    outcomes: list[tuple[float, float, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, began_s: float, problem: str) -> None:
        now_s = time.monotonic()
        with self.lock:
            self.outcomes.append((now_s, now_s - began_s, problem))
        if now_s - began_s > self.deadline_s + SLACK_S:
            self.violations.append(f"a call took {now_s - began_s:.2f} s, its deadline was {self.deadline_s:.0f} s")

    def is_well(self, for_s: float) -> bool:
        """Whether nothing but success is in the last ``for_s`` seconds."""
        since_s = time.monotonic() - for_s
        with self.lock:
            recent = [problem for end_s, _, problem in self.outcomes if end_s > since_s]
        return len(recent) >= 3 and not any(recent)

    def felt(self, since_s: float) -> dict[str, object]:
        """What was felt from ``since_s`` on: from the first failure to the last, the longest time without a success."""
        with self.lock:
            outcomes = [outcome for outcome in self.outcomes if outcome[0] >= since_s]
        bad = [end_s for end_s, _, problem in outcomes if problem]
        good = [end_s for end_s, _, problem in outcomes if not problem]
        gaps = [after - before for before, after in zip([since_s, *good], good, strict=False)]
        return {
            "calls": len(outcomes),
            "failed": len(bad),
            "first_to_last_failure_s": round(bad[-1] - bad[0], 2) if bad else 0.0,
            "longest_gap_s": round(max(gaps, default=0.0), 2),
            "slowest_s": round(max((took_s for _, took_s, _ in outcomes), default=0.0), 2),
            "why": dict(Counter(problem for _, _, problem in outcomes if problem).most_common(3)),
        }


class Driver(ABC):
    """A thread that makes one call after another. ``step`` returns what went wrong, or an empty text."""

    def __init__(self, name: str, deadline_s: float, pause_s: float = _PAUSE_S) -> None:
        self.name = name
        self.journal = Journal(deadline_s)
        self._pause_s = pause_s
        self._stop = threading.Event()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def pause(self) -> None:
        """Returns when no call is in progress; :meth:`start` goes on."""
        self._stop.set()
        self._thread.join()

    def stop(self) -> None:
        """For good."""
        self.pause()

    @abstractmethod
    def step(self) -> str:
        """Do one thing; says what came of it."""

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                problem = self.step()
            except Exception as error:  # a client raises nothing of the kind (I10)
                problem = type(error).__name__
                self.journal.violations.append(f"{self.name}: {error!r}")
            self.journal.note(began_s, problem)
            self._stop.wait(self._pause_s)


class PinnedCredentials(ApiKeyCredentials):
    """Grants that name one node, whether it lives or not: what is felt there is not what a stand-in does."""

    def __init__(self, node: str, **arguments: str) -> None:
        self._node = node
        self._endpoint: NodeEndpoint | None = None
        super().__init__(**arguments)

    def grant(self, deadline: Deadline) -> Grant:
        grant = super().grant(deadline)
        self._endpoint = next((node for node in grant.nodes if node.node_id == self._node), self._endpoint)
        return replace(grant, nodes=(self._endpoint,) if self._endpoint is not None else ())


class DataDriver(Driver):
    """Stores and reads entries of one namespace; what was acknowledged is remembered.

    Args:
        node: the only one that is asked; None for wherever the SDK goes.
    """

    def __init__(self, control: str, api_key: str, namespace: str, node: str | None = None) -> None:
        super().__init__(f"{namespace} on {node or 'any node'}", CALL_DEADLINE_S)
        self.node = node
        arguments = {"control": control, "api_key": api_key, "namespace": namespace}
        credentials = ApiKeyCredentials(**arguments) if node is None else PinnedCredentials(node, **arguments)
        self.client = Client.from_credentials(credentials, deadline_ms=CALL_DEADLINE_S * 1000, transport="tcp")
        self.stored: set[BlockKey] = set()
        self._number = 0

    def step(self) -> str:
        """By turns: store a new entry, read an old one."""
        self._number += 1
        if self._number % 2 and len(self.stored) < _KEYS_MAX:
            return self._store(key_of(self.name, self._number))
        keys = sorted(self.stored)
        return self._read(keys[self._number * 7919 % len(keys)]) if keys else ""

    def _store(self, key: BlockKey) -> str:
        (result,) = self.client.put_many([(key, content_of(key))])
        match result:
            case Stored() | AlreadyStored():
                self.stored.add(key)
                return ""
            case refused:
                return str(refused.error.reason)

    def _read(self, key: BlockKey) -> str:
        """A miss of what the node does not have is an answer; that a node could not be asked is a failure."""
        match self.client.get_many([key])[0]:
            case Hit(payload):
                if not is_right(key, payload):
                    self.journal.violations.append(f"I7: {self.name}: other bytes than were stored")
                return ""
            case Miss(None):
                return ""
            case Miss(cause) if cause is not None:
                return str(cause.reason)
            case other:
                return str(getattr(getattr(other, "error", None), "reason", other))

    def missing(self, keys: list[BlockKey]) -> list[BlockKey]:
        """Which of ``keys`` are not there; for who waits until nothing is."""
        found = self.client.exists(keys, deadline_ms=5000)
        return [key for key, is_there in zip(keys, found, strict=True) if not is_there]

    def stop(self) -> None:
        super().stop()
        self.client.close()


class ExchangeDriver(Driver):
    """Exchanges an API key for a token, again and again, with a retry each: what every engine's client does."""

    def __init__(self, controls: Callable[[int], str], api_key: str, namespace: str) -> None:
        super().__init__("exchange", 2 * CONTROL_DEADLINE_S)
        self._controls = controls
        self._api_key = api_key
        self._namespace = NamespaceId(namespace)
        self._number = 0

    def step(self) -> str:
        problem = ""
        for _ in range(2):
            self._number += 1
            try:
                timeout_ms = int(CONTROL_DEADLINE_S * 1000)
                exchange_api_key(self._controls(self._number), self._api_key, self._namespace, timeout_ms=timeout_ms)
                return ""
            except SalternError as error:
                problem = error.reason
        return problem


class AdminDriver(Driver):
    """Raises a quota by a byte, again and again; each act that was acknowledged must be in the audit trail."""

    def __init__(self, controls: Callable[[int], str], open_client: Callable[[str], AdminClient]) -> None:
        super().__init__("administration", 2 * CONTROL_DEADLINE_S, _ACT_PAUSE_S)
        self._clients = [open_client(controls(number)) for number in range(2)]
        self._limit_bytes = LIMIT_BYTES
        self.acknowledged: list[int] = []

    def step(self) -> str:
        self._limit_bytes += 1
        tiers = [TierQuota(tier=TIER_DRAM, limit_bytes=self._limit_bytes)]
        request = UpdateQuotaRequest(quota=Quota(name=quota_name(TenantId(ACTS)), tiers=tiers))
        problem = ""
        for client in self._clients:
            try:
                client.call(client.quotas.UpdateQuota, request, deadline_ms=int(CONTROL_DEADLINE_S * 1000))
            except SalternError as error:
                problem = error.reason
            else:
                self.acknowledged.append(self._limit_bytes)
                return ""
        return problem

    def stop(self) -> None:
        super().stop()
        for client in self._clients:
            client.close()
