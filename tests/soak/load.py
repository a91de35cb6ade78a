"""Who works during a soak: engines that read and write chains, and administrators who never leave anything as it is."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from subprocess import CompletedProcess

from saltern.client import Client
from saltern.errors import SalternError
from saltern.results import AlreadyStored, Hit, Miss, Stored

BLOCK_BYTES = 64 * 1024
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 24
#: Prompts of one tenant; most are asked for seldom, so that the cache is always too small and SSD always in use.
PROMPTS = 400
_CALLS_A_CLIENT = 500
_PAUSE_S = 0.02
_ACT_EVERY_S = 3.0


class Counts:
    """What happened, counted over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.of: Counter[str] = Counter()

    def add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self.of[what] += count


def content(tenant: str, prompt: int, block: int) -> bytes:
    """What a block holds: nobody else's block, and no other block, has it."""
    seed = blake2b(f"{tenant}/{prompt}/{block}".encode(), digest_size=32).digest()
    return seed * (BLOCK_BYTES // 32)


def block_hashes(prompt: int) -> list[bytes]:
    """The same for every tenant, as an engine's are: what tells them apart is the salt."""
    return [blake2b(f"{prompt}/{block}".encode(), digest_size=32).digest() for block in range(CHAIN_BLOCKS)]


class Engine(threading.Thread):
    """One engine of a tenant. A block that is not what was stored, or a call that raises, is a violation."""

    def __init__(
        self, tenant: str, control: str, secret: str, seed: int, counts: Counts, stop: threading.Event
    ) -> None:
        super().__init__(name=f"engine of {tenant}")
        self._tenant, self._control, self._secret = tenant, control, secret
        self._random = random.Random(seed)
        self._counts, self._stop_event = counts, stop
        self.violations: list[str] = []

    def run(self) -> None:
        while not self._stop_event.is_set():
            try:  # a new client now and then, as engines are restarted
                with Client(control=self._control, api_key=self._secret, namespace="chat", deadline_ms=5000) as client:
                    for _ in range(_CALLS_A_CLIENT):
                        if self._stop_event.wait(_PAUSE_S):
                            return
                        self._prompt(client)
            except SalternError as error:
                self.violations.append(f"{self._tenant}: {error.reason}: {error.message}")
                self._stop_event.wait(1)

    def _prompt(self, client: Client) -> None:
        prompt = min(int(self._random.paretovariate(0.6)), PROMPTS)
        chain = client.chain(block_hashes(prompt))
        found = chain.lookup()
        hits = 0
        for position, result in enumerate(chain.get_many(range(found.prefix))):
            match result:
                case Hit(payload=payload):
                    hits += 1
                    if bytes(payload) != content(self._tenant, prompt, position):
                        self.violations.append(
                            f"{self._tenant}: prompt {prompt}, block {position}: other bytes (I2, I7)"
                        )
                case Miss():
                    pass
                case other:
                    self._counts.add(f"get {getattr(getattr(other, 'error', None), 'reason', other)}")
        self._counts.add("blocks asked for", CHAIN_BLOCKS)
        self._counts.add("blocks hit", hits)
        missing = [(block, content(self._tenant, prompt, block)) for block in range(found.prefix, CHAIN_BLOCKS)]
        for stored in chain.put_many(missing):
            match stored:
                case Stored() | AlreadyStored():
                    self._counts.add("blocks stored")
                case refused:
                    error = refused.error
                    self._counts.add(f"put {error.reason}: {error.message}")


class Administrator(threading.Thread):
    """Changes something every few seconds: what is made is removed again, so that nothing has a reason to grow."""

    def __init__(
        self,
        tenants: list[str],
        saltern: Callable[..., CompletedProcess[str]],
        folder: Path,
        counts: Counts,
        stop: threading.Event,
    ) -> None:
        super().__init__(name="administrator")
        self._tenants, self._saltern, self._folder = tenants, saltern, folder
        self._counts, self._stop_event = counts, stop
        self.violations: list[str] = []

    def run(self) -> None:
        for number in self._numbers():
            tenant = self._tenants[number % len(self._tenants)]
            match number % 6:
                case 0:
                    self._do("salt", "rotate", tenant, "--grace", "10s", "--yes")
                case 1:
                    self._do("quota", "set", tenant, "--dram-limit", f"{24 + number % 8}MiB", "--allow-below-use")
                case 2:
                    self._do("key", "create", "passing", "--tenant", tenant, "--role", "reader")
                    self._do("key", "delete", "passing", "--tenant", tenant, "--yes")
                case 3:
                    self._do("tenant", "create", "passing")
                    self._do("tenant", "delete", "passing", "--yes")
                case 4:
                    self._do("usage", tenant, "--by", "hour")
                case 5:
                    self._do("audit", "list", "--tenant", tenant)

    def _numbers(self) -> Iterator[int]:
        number = 0
        while not self._stop_event.wait(_ACT_EVERY_S):
            yield number
            number += 1

    def _do(self, *arguments: str) -> None:
        done = self._saltern(*arguments)
        self._counts.add("acts")
        if done.returncode:
            self.violations.append(f"saltern {' '.join(arguments[:2])}: {done.stderr.strip()[:300]}")


@contextmanager
def working(threads: list[Engine | Administrator], stop: threading.Event) -> Iterator[None]:
    """All of them work for the time of the block."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
