"""The calls that one prompt needs, as an engine's connector makes them, and the memory that they move.

A prompt is one :class:`saltern.chain.Chain`: one lookup, one batch of what can be read, one batch of what was missing
(and of second copies that the rule wants). Blocks are pieces of one random region, each block's at an offset of its
own: there is nothing to fill before a put, and what is read is compared with it by a checksum. Both regions are shared
with nodes on this host, so that the driver copies nothing.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from saltern.chain import Chain
from saltern.client import Client
from saltern.replay.naming import block_hash
from saltern.results import AlreadyStored, Hit, PutResult, Stored
from saltern.transport.memory import RegisteredBuffer

#: Places that a block's bytes can begin at, one cache line apart.
_PLACES: Final = 4096
_LINE_BYTES: Final = 64
_FACTOR: Final = 0x9E3779B97F4A7C15
_REFUSED_BY_BOOKS: Final = frozenset({"QUOTA_EXCEEDED", "NODE_FULL", "TRANSFERS_FULL", "NAMESPACE_LIMIT"})
#: Of one call of a get; longer prompts are read in several, tail first, so that the order of use is the same.
READ_MAX_BYTES: Final = 256 * 2**20


class Payloads:
    """Bytes of every block of every tenant.

    Args:
        is_shared: nodes of this host are to read them where they are.

    Attributes:
        region: where they are; clients have to know it (:meth:`saltern.Client.register`).
    """

    def __init__(self, block_bytes: int, *, is_shared: bool) -> None:
        self.block_bytes = block_bytes
        self.region: Final = RegisteredBuffer(block_bytes + _PLACES * _LINE_BYTES, shared=is_shared)
        self.region.view[:] = os.urandom(self.region.size_bytes)
        self._sums = array("Q", bytes(8 * _PLACES))
        self._views = [self.region[place * _LINE_BYTES : place * _LINE_BYTES + block_bytes] for place in range(_PLACES)]

    def of(self, tenant: int, block_id: int) -> memoryview:
        """What tenant number ``tenant`` stores for a block."""
        return self._views[_place(tenant, block_id)]

    def is_right(self, tenant: int, block_id: int, payload: memoryview) -> bool:
        place = _place(tenant, block_id)
        expected = self._sums[place]
        if not expected:  # not known yet (or it is 0, and is worked out each time)
            expected = self._sums[place] = xxhash.xxh3_64_intdigest(self._views[place])
        return payload.nbytes == self.block_bytes and xxhash.xxh3_64_intdigest(payload) == expected


def _place(tenant: int, block_id: int) -> int:
    return ((block_id * _FACTOR + tenant * (_FACTOR >> 7)) >> 20) % _PLACES


@dataclass(frozen=True, slots=True)
class Read:
    """What came of looking a prompt up and reading it.

    Attributes:
        prefix: blocks from the first one on that are there, those that the engine had itself included.
        extra: positions below it that are to be stored once more.
        read_s: that both calls took.
        read_blocks: that were moved.
        failed_blocks, wrong_blocks: see :class:`saltern.replay.measures.Measures`.
    """

    chain: Chain
    prefix: int
    extra: Sequence[int]
    read_s: float
    read_blocks: int
    failed_blocks: int
    wrong_blocks: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """What came of storing blocks: seconds, blocks that are stored, blocks that could not be sent."""

    write_s: float
    stored_blocks: int
    failed_blocks: int


class PromptCalls:
    """Calls of one tenant; thread-safe, one ``room`` for each thread.

    Args:
        number: tells its blocks from those of other tenants.
    """

    def __init__(self, client: Client, payloads: Payloads, number: int) -> None:
        self._client, self._payloads, self._number = client, payloads, number

    def read(self, ids: Sequence[int], local_blocks: int, room: RegisteredBuffer) -> Read:
        """Look a prompt up and read what is there beyond the blocks that the engine has itself."""
        hashes = list(map(block_hash, ids))
        began_s = time.perf_counter()
        chain = self._client.chain(hashes)
        found = chain.lookup()
        size_bytes = self._payloads.block_bytes
        at_once = room.size_bytes // size_bytes
        hits: dict[int, memoryview] = {}
        failed = len(ids) - found.prefix if found.error is not None else 0
        for end in range(found.prefix, local_blocks, -at_once):
            positions = range(max(local_blocks, end - at_once), end)
            buffers = [room[number * size_bytes : (number + 1) * size_bytes] for number in range(len(positions))]
            for position, result in zip(positions, chain.get_into(positions, buffers), strict=True):
                if isinstance(result, Hit):
                    hits[position] = result.payload
                elif getattr(result, "cause", None) is not None:
                    failed += 1
        read_s = time.perf_counter() - began_s
        prefix = next((at for at in range(local_blocks, found.prefix) if at not in hits), found.prefix)
        wrong = sum(not self._payloads.is_right(self._number, ids[at], payload) for at, payload in hits.items())
        extra = [at for at in found.copies_wanted if at < max(prefix, local_blocks)]
        if local_blocks > prefix:  # what the engine had itself is reuse as well, which the lookup cannot know
            chain = self._client.chain(hashes, reused_blocks=local_blocks)
        return Read(chain, prefix, extra, read_s, len(hits), failed, wrong)

    def write(self, ids: Sequence[int], read: Read) -> Wrote:
        """Store what was not there, head first, in one batch."""
        positions = [*read.extra, *range(read.prefix, len(ids))]
        if not positions:
            return Wrote(0.0, 0, 0)
        items = [(at, self._payloads.of(self._number, ids[at])) for at in positions]
        began_s = time.perf_counter()
        results = read.chain.put_many(items)
        write_s = time.perf_counter() - began_s
        stored = sum(isinstance(result, Stored) for result in results)
        return Wrote(write_s, stored, sum(map(_has_failed, results)))


def _has_failed(result: PutResult) -> bool:
    """Whether a block was not stored for another reason than that there was no room for it."""
    return not isinstance(result, Stored | AlreadyStored) and result.error.reason not in _REFUSED_BY_BOOKS
