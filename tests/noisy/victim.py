"""The tenant that is measured: an engine's loop at a steady pace, over a working set that fits its reservation.

Each turn comes back to one of its prompts: how much of it is there, read that, store the rest. Now and then a prompt is
new and takes an old one's place. Run as ``python -m tests.noisy.victim REACH``; each line of standard input is a number
of seconds and a seed of what is asked for, answered with one line of JSON when they are over.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time

import msgspec

from saltern.client import Client
from saltern.keys import BlockKey
from saltern.results import Hit
from tests.noisy.setting import BLOCK_BYTES, CHAIN_BLOCKS, CHAINS, Reach, pin

TURNS_PER_S = 100
NEW_PROMPT_SHARE = 0.03
SEED = 1


class Round(msgspec.Struct):
    """What one round was like.

    Attributes:
        lookup_ms, get_ms: the time of every call.
        late: turns that began more than one turn's time after their moment.
        wrong: hits with other bytes than were stored.
    """

    turns: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    wrong: int = 0
    cpu_s: float = 0.0
    lookup_ms: list[float] = msgspec.field(default_factory=list)
    get_ms: list[float] = msgspec.field(default_factory=list)


class Victim:
    """The loop; its prompts live on from round to round."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rng = random.Random(SEED)
        self._made = 0
        self._prompts = [self._new_prompt() for _ in range(CHAINS)]
        self._memory = client.allocate(CHAIN_BLOCKS * BLOCK_BYTES)

    def warm(self) -> None:
        for prompt in self._prompts:
            self._store(prompt)

    def run(self, seconds: float, seed: int) -> Round:
        told = Round()
        self._rng.seed(seed)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        while True:
            due_s = began_s + told.turns / TURNS_PER_S
            now_s = time.perf_counter()
            if due_s - began_s >= seconds:
                break
            if due_s > now_s:
                time.sleep(due_s - now_s)
            told.late += now_s - due_s > 1 / TURNS_PER_S
            self._turn(told)
        told.cpu_s = time.process_time() - cpu_s
        return told

    def _turn(self, told: Round) -> None:
        told.turns += 1
        at = int(
            CHAINS * self._rng.random() ** 2
        )  # some much more often than others, none so seldom that it is evicted
        if self._rng.random() < NEW_PROMPT_SHARE:
            self._prompts[at] = self._new_prompt()
        prompt = self._prompts[at]
        began_s = time.perf_counter()
        found = self._client.longest_prefix(prompt)
        looked_s = time.perf_counter()
        told.lookup_ms.append((looked_s - began_s) * 1e3)
        results = []
        if found:
            buffers = [self._memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(found)]
            results = self._client.get_into(prompt[:found], buffers)
            told.get_ms.append((time.perf_counter() - looked_s) * 1e3)
        hits = sum(isinstance(result, Hit) for result in results)
        told.hits += hits
        told.misses += len(prompt) - hits
        told.wrong += sum(
            isinstance(r, Hit) and bytes(r.payload[:32]) != key for key, r in zip(prompt, results, strict=False)
        )
        if hits < len(prompt):
            self._store(prompt[hits:])

    def _store(self, keys: list[BlockKey]) -> None:
        self._client.put_many([(key, bytes(key) * (BLOCK_BYTES // len(key))) for key in keys])

    def _new_prompt(self) -> list[BlockKey]:
        self._made += 1
        name = f"prompt {self._made}"
        return [BlockKey(hashlib.blake2b(f"{name}/{n}".encode(), digest_size=32).digest()) for n in range(CHAIN_BLOCKS)]


def main() -> None:
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    pin(reach.cpus)
    with reach.client(sessions_max=1) as client:
        victim = Victim(client)
        victim.warm()
        victim.run(0.5, SEED)
        print("ready", flush=True)
        for line in sys.stdin:
            seconds, seed = line.split()
            print(msgspec.json.encode(victim.run(float(seconds), int(seed))).decode(), flush=True)


if __name__ == "__main__":
    main()
