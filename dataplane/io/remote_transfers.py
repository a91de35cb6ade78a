"""Puts and gets whose bytes go over RDMA: chains of READs into the arena, chains of WRITEs out of it (WIRE.md 10).

A put's entry is published after its chain has completed and the sum was taken over the node's own copy (I7). A get ends
with a WRITE that carries an immediate: its arrival at the client, on the same queue pair, says that every byte before
it is visible there; the reply frame alone, which takes another way, would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog
import xxhash

from dataplane.core.remote_region import RemoteRegion, plan_chains
from dataplane.core.work import PUT_WORK, SEND_WORK
from dataplane.io.batches import NO_ROOM_YET, GetBatch, PutBatch
from dataplane.io.exchange import Exchange
from dataplane.io.rdma import Link
from dataplane.io.stream import TURN, Script
from saltern import wire
from saltern.rdma import Read, RemoteSpan, Write
from saltern.wire import Opcode

_log = structlog.get_logger(__name__)
_PUT: Final = int(Opcode.PUT)
#: One piece of an entry whose sum is taken, between two looks at whose turn it is.
_SUM_BYTES: Final = 256 * 1024


class RemoteTransfers:
    """Moves entries between the arena and the regions of one session's client."""

    __slots__ = ("_exchange", "link")

    def __init__(self, exchange: Exchange, link: Link) -> None:
        self._exchange = exchange
        self.link: Final = link

    def held_bytes(self, put: wire.Put) -> int:
        """What a put holds of the arena at a time: its largest chain."""
        return max((sum(put.sizes[chain]) for chain in self._chains(put)), default=0)

    def put(
        self, request_id: int, put: wire.Put, batch: PutBatch, region: RemoteRegion, held_bytes: int
    ) -> Script[None]:
        exchange, session = self._exchange, self._exchange.session
        moved_bytes = 0
        try:
            for chain in self._chains(put):
                index = chain.start
                while index < chain.stop:
                    started, index = yield from self._start(put, batch, index, chain.stop)
                    if not started:
                        continue
                    yield from self.link.carry_out(exchange, self._reads(put, region, started))
                    for entry, offset in started:
                        moved_bytes += put.sizes[entry]
                        yield from self._finish(put, batch, entry, offset)
            for work in batch.touch():
                if exchange.stream.spend_turn(work):
                    yield TURN
        finally:
            self.end(batch)
            session.release(held_bytes, served_bytes=moved_bytes)
            session.charge_bytes(moved_bytes - sum(put.sizes))
        yield from exchange.reply(wire.encode_reply(_PUT, request_id, wire.encode_body(batch.reply())))

    def write_hits(self, request_id: int, get: wire.Get, batch: GetBatch, region: RemoteRegion) -> Script[None]:
        """Write the hits of a get where the client wants them; the last WRITE tells it so."""
        exchange, hits = self._exchange, batch.hits
        chains = list(plan_chains(self.link.chain_limits, [pin.size_bytes for _, pin in hits]))
        for chain in chains:
            writes = [
                Write(
                    (self.link.local(pin.offset, pin.size_bytes),),
                    _span(region, get.offsets[index], pin.size_bytes),
                    wire.immediate_of(request_id) if at == len(hits) else None,
                )
                for at, (index, pin) in enumerate(hits[chain], chain.start + 1)
            ]
            yield from self.link.carry_out(exchange, writes)
            if exchange.stream.spend_turn(len(writes) * SEND_WORK):
                yield TURN

    def end(self, batch: PutBatch | GetBatch) -> None:
        """Close a batch, unless a transfer that the device did not give up could still touch its memory (I7)."""
        if self.link.is_quiet:
            batch.close()
        else:
            _log.error("entries stay charged: a transfer may still reach them", tenant=self.link.tenant)

    def _chains(self, put: wire.Put) -> Sequence[slice]:
        return list(plan_chains(self.link.chain_limits, put.sizes, wire.split_keys(put.keys)))

    def _start(
        self, put: wire.Put, batch: PutBatch, index: int, stop: int
    ) -> Script[tuple[list[tuple[int, int]], int]]:
        """Admit entries from ``index`` on; returns (index, offset in the arena) of each, and where to go on.

        It stops where one finds no room: once those before it are published, they may make room for it.
        """
        started: list[tuple[int, int]] = []
        while index < stop:
            offset = batch.start_at(index, put.sizes[index], waits=bool(started))
            if offset == NO_ROOM_YET:
                break
            if offset is not None:
                started.append((index, offset))
            index += 1
            if self._exchange.stream.spend_turn(PUT_WORK):
                yield TURN
        return started, index

    def _reads(self, put: wire.Put, region: RemoteRegion, started: Sequence[tuple[int, int]]) -> list[Read]:
        return [
            Read((self.link.local(offset, put.sizes[index]),), _span(region, put.offsets[index], put.sizes[index]))
            for index, offset in started
        ]

    def _finish(self, put: wire.Put, batch: PutBatch, index: int, offset: int) -> Script[None]:
        view = batch.view_at(offset, put.sizes[index])
        digest = xxhash.xxh3_64()
        for start in range(0, len(view), _SUM_BYTES):
            piece = view[start : start + _SUM_BYTES]
            digest.update(piece)
            if self._exchange.stream.spend_turn(len(piece)):
                yield TURN
        (claimed,) = wire.split_sums(put.sums[index * wire.SUM_BYTES : (index + 1) * wire.SUM_BYTES])
        batch.finish(index, digest.intdigest(), claimed)


def _span(region: RemoteRegion, offset: int, size_bytes: int) -> RemoteSpan:
    return RemoteSpan(region.address + offset, size_bytes, region.remote_key)
