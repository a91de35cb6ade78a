"""The machine's limit for memory: a process that copies blocks with one thread and does nothing else.

Run as ``python -m saltern.bench.memcpy_peer``: for each line ``BLOCK_BYTES COUNT`` it copies that many blocks between
two areas that are far larger than any cache, and prints the seconds. A process of its own, because glibc reads at start
from which size on a copy goes around the caches (non-temporal stores; GLIBC_TUNABLES).
"""

from __future__ import annotations

import os
import sys
import time

from saltern.bench.bare_peer import BUFFER_BYTES


def main() -> None:
    source = memoryview(bytearray(os.urandom(1024 * 1024)) * (BUFFER_BYTES // (1024 * 1024)))
    target = memoryview(bytearray(BUFFER_BYTES))
    start = 0
    for line in sys.stdin:
        block_bytes, count = map(int, line.split())
        begin = time.perf_counter()
        for _ in range(count):
            target[start : start + block_bytes] = source[start : start + block_bytes]
            start = (start + block_bytes) % BUFFER_BYTES
        sys.stdout.write(f"{time.perf_counter() - begin}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
