"""A client process of the chaos run: several threads of one tenant that put, get, look up and delete without end.

Run as ``python -m tests.chaos.worker '{"control": ..., "api_key_file": ..., ...}'``. Standard input takes one word a
line: ``pause`` is answered, once every thread has ended the call that it was in, with one line of JSON: what happened
so far. ``go`` goes on. The end of the input ends the process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from saltern.breaker import BreakerPolicy
from saltern.client import Client
from saltern.credentials import ApiKeyCredentials
from saltern.errors import DeadlineExceededError, UnavailableError
from saltern.keys import BlockKey
from saltern.results import AlreadyStored, Error, Hit, Miss, Stored
from saltern.transport.memory import RegisteredBuffer
from tests.chaos.content import content_of, is_right, key_of

#: Beyond the deadline itself, what a busy machine may add before a call counts as late.
SLACK_S = 2.0
#: A client that leaves a dead node alone answers at once: without a rest that is all that this machine would do.
_GIVEN_UP, _REST_S = "CIRCUIT_OPEN", 0.01
_BATCH_MAX = 16
_ROOM_BYTES = 68 * 1024
_START_S = 60.0


class Orders(msgspec.Struct, frozen=True):
    """What a worker is told.

    Attributes:
        keys: how many keys the tenant uses.
        deadline_ms: of every call.
    """

    control: str
    api_key_file: str
    tenant: str
    transport: str
    seed: int
    keys: int
    threads: int = 2
    deadline_ms: float = 2000.0


class Report(msgspec.Struct):
    """What a worker saw.

    Attributes:
        counts: calls and answers by kind.
        late: calls that came back after their deadline and the slack; each with its kind and seconds.
        wrong: hits with other bytes than belong there (I7).
        slowest_s: the longest call.
        resident_bytes: memory of the process.
    """

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    late: list[str] = msgspec.field(default_factory=list)
    wrong: list[str] = msgspec.field(default_factory=list)
    slowest_s: float = 0.0
    resident_bytes: int = 0


class Load:
    """The threads of one worker. ``turn`` is held by whoever is in a call; pausing takes every turn."""

    def __init__(self, orders: Orders, client: Client) -> None:
        self.orders = orders
        self.client = client
        self.report = Report()
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.may_run = threading.Event()
        self.turns = [threading.Lock() for _ in range(orders.threads)]
        self.stopped = False
        self.memories = [client.allocate(_BATCH_MAX * _ROOM_BYTES) for _ in self.turns]

    def run(self, thread: int) -> None:
        rng = random.Random(f"{self.orders.seed}/{thread}")
        while not self.stopped:
            self.may_run.wait()
            with self.turns[thread]:
                if self.may_run.is_set() and not self.stopped:
                    self._call(rng, thread)

    def pause(self) -> Report:
        """Returns once no call is in progress."""
        self.may_run.clear()
        for turn in self.turns:
            with turn:
                pass
        self.report.counts = dict(self.counts)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.report.resident_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        return self.report

    def _call(self, rng: random.Random, thread: int) -> None:
        keys = self._draw(rng)
        kind = rng.choices(("get", "put", "lookup", "delete", "get_into"), (40, 30, 10, 3, 17))[0]
        began_s = time.monotonic()
        match kind:
            case "get":
                counts = self._get(keys)
            case "get_into":
                counts = self._get_into(keys, self.memories[thread])
            case "put":
                counts = self._put(keys)
            case "lookup":
                counts = self._lookup([*keys, *self._draw(rng), *self._draw(rng)])
            case _:
                counts = self._delete(keys[:2])
        took_s = time.monotonic() - began_s
        with self.lock:
            report = self.report
            self.counts.update(counts)
            self.counts[f"{kind} calls"] += 1
            report.slowest_s = max(report.slowest_s, took_s)
            if took_s > self.orders.deadline_ms / 1000 + SLACK_S:
                report.late.append(f"{kind} of {len(keys)} took {took_s:.2f} s")
        if any(what.endswith(_GIVEN_UP) for what in counts):
            time.sleep(_REST_S)

    def _draw(self, rng: random.Random) -> list[BlockKey]:
        """Some neighbouring keys, low numbers more often: a hot head and a long tail."""
        first = int(self.orders.keys * rng.random() ** 2)
        count = rng.randint(1, _BATCH_MAX)
        return [key_of(self.orders.tenant, (first + number) % self.orders.keys) for number in range(count)]

    # ---- calls; each returns what it counts

    def _get(self, keys: Sequence[BlockKey]) -> Counter[str]:
        """Read, and store what is missing, as an engine does."""
        results = self.client.get_many(keys)
        missing = [key for key, result in zip(keys, results, strict=True) if result == Miss()]
        return self._judge(keys, results) + self._put(missing)

    def _get_into(self, keys: Sequence[BlockKey], memory: RegisteredBuffer) -> Counter[str]:
        buffers = [memory[at * _ROOM_BYTES : (at + 1) * _ROOM_BYTES] for at in range(len(keys))]
        return self._judge(keys, self.client.get_into(keys, buffers))

    def _lookup(self, keys: Sequence[BlockKey]) -> Counter[str]:
        answer = self.client.lookup(keys)
        return Counter({f"lookup: {answer.error.reason}" if answer.error else "lookup answered": 1})

    def _delete(self, keys: Sequence[BlockKey]) -> Counter[str]:
        answer = self.client.delete(keys)
        return Counter({"deleted": answer.count} if not answer.error else {f"delete: {answer.error.reason}": 1})

    def _put(self, keys: Sequence[BlockKey]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for result in self.client.put_many([(key, content_of(key)) for key in keys]) if keys else ():
            match result:
                case Stored():
                    counts["stored"] += 1
                case AlreadyStored():
                    counts["stored already"] += 1
                case Error(error):
                    counts[f"put, not trusted: {error.reason}"] += 1
                case refused:
                    counts[f"put: {refused.error.reason}"] += 1
        return counts

    def _judge(self, keys: Sequence[BlockKey], results: Sequence[object]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for key, result in zip(keys, results, strict=True):
            match result:
                case Hit(payload):
                    counts["hits"] += 1
                    if not is_right(key, payload):
                        self.report.wrong.append(f"{self.orders.tenant}: {key.hex()}: {payload.nbytes} other bytes")
                case Miss(None):
                    counts["misses"] += 1
                case Miss(cause) if cause is not None:
                    counts[f"miss: {cause.reason}"] += 1
                case Error(error):
                    counts[f"get, not trusted: {error.reason}"] += 1
        return counts


def _credentials(orders: Orders) -> ApiKeyCredentials:
    """As an engine does that starts while the control plane is being killed: it tries until it is back."""
    secret = Path(orders.api_key_file).read_text().strip()
    give_up_s = time.monotonic() + _START_S
    while True:
        try:
            return ApiKeyCredentials(control=orders.control, api_key=secret, namespace="chat")
        except (UnavailableError, DeadlineExceededError):
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.1)


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    credentials = _credentials(orders)
    client = Client.from_credentials(
        credentials,
        deadline_ms=orders.deadline_ms,
        transport=orders.transport,
        breaker=BreakerPolicy(backoff_max_s=0.3),  # nodes come back fast here
    )
    with client:
        load = Load(orders, client)
        threads = [threading.Thread(target=load.run, args=(number,), daemon=True) for number in range(orders.threads)]
        for thread in threads:
            thread.start()
        for line in sys.stdin:
            if line.strip() == "pause":
                print(json.dumps(msgspec.to_builtins(load.pause())), flush=True)
            else:
                load.may_run.set()
        load.stopped = True
        load.may_run.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
