"""The tenant that floods: new keys, reads of them and huge look-ups over several sessions, at a pace of its own.

Run as ``python -m tests.noisy.flooder REACH``. A line ``flood SECONDS PACE`` (bytes a second in all; 0: as fast as it
can) or ``burn SECONDS CPU_S`` (spend this much CPU in that time, in as many threads, and leave the node alone) is
answered with one line of JSON.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from saltern.client import Client
from saltern.keys import BlockKey
from saltern.results import Hit, Stored
from tests.noisy.setting import BLOCK_BYTES, Reach, pin

SESSIONS = 4
BATCH = 16
LOOKUP_KEYS = 10_000
#: One in this many calls is a look-up of LOOKUP_KEYS keys.
LOOKUP_EVERY = 8


class Flood(msgspec.Struct):
    """What a flood did; ``cpu_s`` of its process."""

    calls: int = 0
    moved_bytes: int = 0
    stored: int = 0
    refused: int = 0
    hits: int = 0
    looked_up: int = 0
    cpu_s: float = 0.0


class Flooder:
    """Threads with a session each, which share one pace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._value = bytes(range(256)) * (BLOCK_BYTES // 256)
        self._memories = [client.allocate(BATCH * BLOCK_BYTES) for _ in range(SESSIONS)]
        self._many = [BlockKey(n.to_bytes(32, "little")) for n in range(LOOKUP_KEYS)]
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def flood(self, seconds: float, pace_bytes_per_s: float) -> Flood:
        told = Flood()
        began_s = time.perf_counter()

        def work(thread: int) -> None:
            for call in itertools.count():
                now_s = time.perf_counter() - began_s
                if now_s >= seconds:
                    return
                ahead_s = told.moved_bytes / pace_bytes_per_s - now_s if pace_bytes_per_s else 0.0
                if ahead_s > 0:
                    time.sleep(min(ahead_s, seconds - now_s))
                    continue
                self._call(thread, call, told)

        return _measured(told, work)

    def burn(self, seconds: float, cpu_s: float) -> Flood:
        """The same threads take the same CPU, in slices as long as a call takes."""
        told = Flood()
        began_s, share = time.perf_counter(), cpu_s / seconds / SESSIONS

        def work(_: int) -> None:
            while (now_s := time.perf_counter() - began_s) < seconds:
                if time.thread_time() - start_s.setdefault(threading.get_ident(), time.thread_time()) < share * now_s:
                    sum(range(5_000))
                else:
                    time.sleep(0.002)

        start_s: dict[int, float] = {}
        return _measured(told, work)

    def _call(self, thread: int, call: int, told: Flood) -> None:
        number = next(self._numbers)
        keys = [BlockKey((number * BATCH + n + 2**64).to_bytes(32, "big")) for n in range(BATCH)]
        stored = refused = hits = looked_up = 0
        if call % LOOKUP_EVERY == 0:
            self._client.lookup(self._many)
            looked_up = LOOKUP_KEYS
        results = self._client.put_many([(key, self._value) for key in keys])
        stored = sum(isinstance(result, Stored) for result in results)
        refused = len(results) - stored
        memory = self._memories[thread]
        buffers = [memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(BATCH)]
        hits = sum(isinstance(result, Hit) for result in self._client.get_into(keys, buffers))
        with self._lock:
            told.calls += 1
            told.moved_bytes += (stored + refused + hits) * BLOCK_BYTES
            told.stored += stored
            told.refused += refused
            told.hits += hits
            told.looked_up += looked_up


def _measured(told: Flood, work: Callable[[int], None]) -> Flood:
    cpu_s = time.process_time()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.cpu_s = time.process_time() - cpu_s
    return told


def main() -> None:
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    pin(reach.cpus)
    with reach.client(sessions_max=SESSIONS) as client:
        flooder = Flooder(client)
        print("ready", flush=True)
        for line in sys.stdin:
            what, seconds, amount = line.split()
            told = (flooder.flood if what == "flood" else flooder.burn)(float(seconds), float(amount))
            print(msgspec.json.encode(told).decode(), flush=True)


if __name__ == "__main__":
    main()
