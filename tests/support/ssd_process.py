"""A process that writes and deletes on an SSD tier as fast as it can, to be killed; and what it says before it dies.

Run as a script: ``ssd_process.py FOLDER SEED``. Lines on standard output: ``put N`` once entry N is on SSD, ``gone N``
once its deletion is. The bytes of entry N are those of :func:`content`.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import structlog

from dataplane.io.ssd_files import Files
from tenants.quota import TierQuota
from tests.support.cache_node import key_of
from tests.support.ssd_node import KIB, SsdNode, policy_of

LIMIT_BYTES = 24 * 1024 * KIB
DRAM_BYTES = 256 * KIB


def content(number: int) -> bytes:
    """Bytes that no other number has; 1 to 80 KiB."""
    generator = random.Random(number)
    return generator.randbytes(generator.choice([1, 100, 4096, 10_000, 30_000, 81_920]))


def make_node(folder: Path) -> SsdNode:
    """The node of one life, over real files."""
    node = SsdNode(folder, dram_bytes=DRAM_BYTES, ssd_bytes=2 * LIMIT_BYTES, files=Files()).recover()
    node.apply(policy_of(1, {"a": (TierQuota(0, DRAM_BYTES), TierQuota(0, LIMIT_BYTES))}))
    return node


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    generator = random.Random(seed)
    node = make_node(folder)
    partition = node.partition("a")
    say = sys.stdout.write
    told: set[int] = set()
    say("ready\n")
    sys.stdout.flush()
    for number in range(seed * 100_000, (seed + 1) * 100_000):
        node.put(partition, key_of(number), content(number))
        if generator.random() < 0.3:
            for _ in range(generator.randrange(4)):
                node.workers.step()
        if number % 16 == 0:
            node.workers.drain()
            books = node.tier.index(partition)
            for key in books.entries if books else ():
                which = int.from_bytes(key, "big")
                if which not in told:
                    told.add(which)
                    say(f"put {which}\n")
        if number % 48 == 0 and told:
            victim = generator.choice(sorted(told))
            node.core.delete(partition, [key_of(victim)])
            node.workers.drain()
            say(f"gone {victim}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
