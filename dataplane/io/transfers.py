"""The requests that name entries: put, get, lookup, delete, as scripts over one exchange.

The bytes of an entry go from the socket or the client's region straight into the arena, and from the arena straight
out. Each ``begin_`` script passes the tenant's rates and bounds and the gate, and returns what is left to do: nothing
that it raises has had an effect. A batch of thousands of keys is cut into turns, so that it holds up nobody.
"""

from __future__ import annotations

from typing import Final

import xxhash

from dataplane.core.remote_region import RemoteRegion
from dataplane.core.work import DELETE_WORK, LOOKUP_KEY_WORK, PUT_WORK, SEND_WORK
from dataplane.io.batches import SLICE_KEYS, GetBatch, PutBatch
from dataplane.io.exchange import Exchange
from dataplane.io.regions import Region, RegionTable
from dataplane.io.remote_transfers import RemoteTransfers
from dataplane.io.stream import TURN, WAKE, Script
from saltern import wire
from saltern.wire import Opcode

#: Plain integers: an enum's member costs a descriptor call at each use in Python 3.11.
_PUT, _GET, _LOOKUP, _DELETE = map(int, (Opcode.PUT, Opcode.GET, Opcode.LOOKUP, Opcode.DELETE))
#: One piece of a copy out of the arena: far above saltern.copy_tuning.THRESHOLD_BYTES, so it goes around the caches.
_COPY_BYTES: Final = 256 * 1024
#: One piece of a copy into the arena: below that threshold, so it is still in a cache when its sum is taken. In pieces
#: of 256 KiB both take 1.3 to 1.5 times as long while the client sums its next entries.
_COPY_AND_SUM_BYTES: Final = 64 * 1024
#: A region up to this size is a client's staging area, used over and over and read at once: what is copied there stays
#: in a cache. Around the caches, loads of a vLLM engine took 12 to 18% longer.
_REUSED_REGION_MAX_BYTES: Final = 32 * 1024 * 1024


class Transfers:
    """Puts, gets, lookups and deletes of one session.

    Attributes:
        remote: moves entries to and from RDMA regions; None while the session has no queue pair, and so no such region.
    """

    __slots__ = ("_exchange", "_regions", "remote")

    def __init__(self, exchange: Exchange, regions: RegionTable) -> None:
        self._exchange = exchange
        self._regions = regions
        self.remote: RemoteTransfers | None = None

    def begin_put(self, header: wire.Header, body: memoryview) -> Script[Script[None]]:
        exchange = self._exchange
        put = wire.decode_body(wire.Put, body)
        wire.check_put(put, header.payload_bytes)
        region = self._region(put.region, put.offsets, put.sizes)
        yield from exchange.enter(len(put.sizes) or 1, sum(put.sizes), moves_entries=True)
        batch = exchange.session.begin_put(put)
        if isinstance(region, RemoteRegion):
            assert self.remote is not None
            held_bytes = self.remote.held_bytes(put)
            exchange.session.hold(held_bytes)
            return self.remote.put(header.request_id, put, batch, region, held_bytes)
        # Entries come one at a time, and only the one that is coming holds memory.
        held_bytes = max(put.sizes, default=0)
        exchange.session.hold(held_bytes)
        return self._put(header.request_id, put, batch, region, held_bytes)

    def begin_get(self, header: wire.Header, body: memoryview) -> Script[Script[None]]:
        exchange = self._exchange
        get = wire.decode_body(wire.Get, body)
        wire.check_get(get, header.payload_bytes)
        region = self._region(get.region, get.offsets, get.max_sizes)
        yield from exchange.enter(len(get.max_sizes) or 1, moves_entries=True)
        batch = exchange.session.begin_get(get)
        try:
            for work in batch.pin():
                if exchange.stream.spend_turn(work):
                    yield TURN
            exchange.session.check_payload(batch)
        except BaseException:
            batch.close()
            raise
        held_bytes = batch.payload_bytes
        exchange.session.charge_bytes(held_bytes)
        exchange.session.hold(held_bytes)
        return self._get(header.request_id, get, batch, region, held_bytes)

    def lookup(self, header: wire.Header, body: memoryview) -> Script[bytes]:
        exchange = self._exchange
        keys = wire.split_keys(wire.decode_body(wire.Lookup, body).keys)
        yield from exchange.enter(len(keys) or 1)
        exchange.stream.spend_turn(len(keys) * LOOKUP_KEY_WORK)
        return wire.encode_reply(_LOOKUP, header.request_id, wire.encode_body(exchange.session.lookup(keys)))

    def delete(self, header: wire.Header, body: memoryview) -> Script[bytes]:
        exchange = self._exchange
        keys = wire.split_keys(wire.decode_body(wire.Delete, body).keys)
        yield from exchange.enter(len(keys) or 1)
        deleted = exchange.session.delete(keys[:SLICE_KEYS])
        for start in range(SLICE_KEYS, len(keys), SLICE_KEYS):
            if exchange.stream.spend_turn(SLICE_KEYS * DELETE_WORK):
                yield TURN
            deleted += exchange.session.delete(keys[start : start + SLICE_KEYS])
        return wire.encode_reply(_DELETE, header.request_id, wire.encode_body(wire.DeleteReply(deleted)))

    def _region(self, number: int | None, offsets: list[int], sizes: list[int]) -> Region | RemoteRegion | None:
        """The region of a regional batch, every entry inside it; None for an inline one."""
        if number is None:
            return None
        region = self._regions[number]
        region.check(offsets, sizes)
        return region

    def _put(
        self, request_id: int, put: wire.Put, batch: PutBatch, region: Region | None, held_bytes: int
    ) -> Script[None]:
        exchange, session = self._exchange, self._exchange.session
        stream = exchange.stream
        exchange.expect_transfer(0 if region else sum(put.sizes))
        moved_bytes = 0
        try:
            for index, (size, claimed) in enumerate(zip(put.sizes, wire.split_sums(put.sums), strict=True)):
                target = batch.start(index, size)
                if stream.spend_turn(PUT_WORK):
                    yield TURN
                if region is None:
                    moved_bytes += size
                    if target is None:
                        yield from stream.discard(size)
                        continue
                    digest = yield from stream.read_into(target)
                else:
                    if target is None:
                        continue
                    moved_bytes += size
                    digest = yield from self._copy_and_sum(region.view(put.offsets[index], size), target)
                batch.finish(index, digest, claimed)
            for work in batch.touch():
                if stream.spend_turn(work):
                    yield TURN
        finally:
            batch.close()
            session.release(held_bytes, served_bytes=moved_bytes)
            if region is not None:
                session.charge_bytes(moved_bytes - sum(put.sizes))
        yield from exchange.reply(wire.encode_reply(_PUT, request_id, wire.encode_body(batch.reply())))

    def _get(
        self,
        request_id: int,
        get: wire.Get,
        batch: GetBatch,
        region: Region | RemoteRegion | None,
        held_bytes: int,
    ) -> Script[None]:
        exchange = self._exchange
        served_bytes = 0
        try:
            if batch.fetch is not None:
                exchange.expect_transfer(0)
                batch.fetch.on_done(exchange.wake)
                while not batch.fetch.is_done:
                    yield WAKE
                batch.finish()
                exchange.session.charge_bytes(batch.payload_bytes - held_bytes)
            body = wire.encode_body(batch.reply())
            if region is None:
                parts: list[bytes | memoryview] = [wire.encode_reply(_GET, request_id, body, batch.payload_bytes)]
                for start in range(0, len(batch.hits), SLICE_KEYS):
                    hits = batch.hits[start : start + SLICE_KEYS]
                    parts += [batch.view(pin) for _, pin in hits]
                    if exchange.stream.spend_turn(len(hits) * SEND_WORK):
                        yield TURN
                exchange.expect_transfer(batch.payload_bytes)
                yield from exchange.stream.send(parts)
                served_bytes = batch.payload_bytes
                return
            if isinstance(region, RemoteRegion):
                assert self.remote is not None
                yield from self.remote.write_hits(request_id, get, batch, region)
            else:
                piece_bytes = _COPY_BYTES if region.size_bytes > _REUSED_REGION_MAX_BYTES else _COPY_AND_SUM_BYTES
                for index, pin in batch.hits:
                    target = region.view(get.offsets[index], pin.size_bytes)
                    yield from self._copy(batch.view(pin), target, piece_bytes)
            served_bytes = batch.payload_bytes
        finally:
            if self.remote is None:
                batch.close()
            else:
                self.remote.end(batch)
            exchange.session.release(held_bytes, served_bytes=served_bytes)
        yield from exchange.reply(wire.encode_reply(_GET, request_id, body))

    def _copy_and_sum(self, source: memoryview, target: memoryview) -> Script[int]:
        """Copy an entry out of a region and return the sum of the node's own copy: the client may write meanwhile."""
        digest = xxhash.xxh3_64()
        for start in range(0, len(source), _COPY_AND_SUM_BYTES):
            piece = target[start : start + _COPY_AND_SUM_BYTES]
            piece[:] = source[start : start + _COPY_AND_SUM_BYTES]
            digest.update(piece)
            if self._exchange.stream.spend_turn(len(piece)):
                yield TURN
        return digest.intdigest()

    def _copy(self, source: memoryview, target: memoryview, piece_bytes: int) -> Script[None]:
        for start in range(0, len(source), piece_bytes):
            piece = source[start : start + piece_bytes]
            target[start : start + piece_bytes] = piece
            if self._exchange.stream.spend_turn(len(piece)):
                yield TURN
