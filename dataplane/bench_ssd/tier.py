"""The whole tier on a node's own objects, without doors: core, arena, store, worker threads, files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dataplane.bench_ssd.report import Span, timed
from dataplane.core.admission import open_partition
from dataplane.core.cache import CacheCore
from dataplane.core.entry import PutRefused
from dataplane.core.ssd_tier import SsdTier
from dataplane.core.usage import SsdUsage
from dataplane.io.arena import Arena
from dataplane.io.clock import Clock
from dataplane.io.ssd import SsdLimits, SsdStatus, SsdStore
from dataplane.io.ssd_disk import Disk
from dataplane.io.ssd_files import Files
from dataplane.io.ssd_keys import load_node_key
from dataplane.io.ssd_outdated import OutdatedPartitions
from dataplane.io.workers import ThreadWorkers
from saltern import wire
from saltern.keys import KEY_BYTES, BlockKey
from saltern.names import NamespaceId, TenantId
from tenants.policy import NamespacePolicy, NodePolicy, TenantPolicy, TenantState
from tenants.quota import Tier, TierQuota

_TENANT: Final = TenantId("bench")
_NAMESPACE: Final = NamespaceId("bench")
#: Keys of one get, and gets at a time: enough that the reading threads never wait for the loop.
_GET_KEYS: Final = 16
_GETS: Final = 2


class BenchTier:
    """One tenant's DRAM and the tier below; make it and use it inside a running event loop.

    Args:
        disk: what keeps the records of the tier below; files in ``folder`` by default.
    """

    def __init__(
        self, folder: Path, *, block_bytes: int, blocks: int, dram_bytes: int, disk: Disk | None = None
    ) -> None:
        self._block_bytes = block_bytes
        self._keys = [BlockKey(number.to_bytes(KEY_BYTES, "big")) for number in range(blocks)]
        self._source = os.urandom(block_bytes)
        self._digest = wire.checksum(self._source)
        ssd_bytes = 2 * blocks * (block_bytes + 8192) + (256 << 20)
        clock = Clock()
        self._tier = SsdTier(ssd_bytes)
        self._core = CacheCore(dram_bytes, ssd=self._tier)
        self._arena = Arena(dram_bytes, prefault=True)
        self._workers = ThreadWorkers(asyncio.get_running_loop())
        files = Files()
        disk = disk or Disk(folder / "tier", load_node_key(folder, files), files)
        self._store = SsdStore(
            self._core,
            self._tier,
            arena=self._arena,
            disk=disk,
            clock=clock,
            workers=self._workers,
            outdated=OutdatedPartitions(folder, files),
            limits=SsdLimits(prefault=True),
        )
        self._store.recover()
        self._now = clock.monotonic_ns
        self._quotas = {Tier.DRAM: TierQuota(0, dram_bytes), Tier.SSD: TierQuota(0, ssd_bytes)}
        self._version = 0
        self._policy(epoch=1)

    @property
    def status(self) -> SsdStatus:
        return self._store.status

    async def begin_anew(self) -> None:
        """Forget everything, by a new epoch; returns when the files are gone."""
        self._policy(epoch=self._version + 1)
        await self._idle()

    async def put_all(self) -> tuple[int, Span]:
        """Put every block, never faster than the device takes what DRAM gives up; returns (bytes written, span)."""
        low_bytes = self.status.staging_bytes * 3 // 8
        before_bytes = self._usage().counters.demoted_bytes
        with timed() as span:
            for key in self._keys:
                self._put(key)
                while self.status.staged_bytes > low_bytes:  # noqa: ASYNC110 - a real node does not wait for its tier
                    await asyncio.sleep(0.0005)
            self._tier.seal_all()
            await self._idle()
        return self._usage().counters.demoted_bytes - before_bytes, span

    async def get_all(self) -> tuple[int, Span]:
        """Get every block in order; returns (bytes read from SSD, span).

        What DRAM still holds from the puts goes to SSD first: a get that evicts what is on SSD already writes nothing.
        """
        in_dram = self._arena.capacity_bytes // self._block_bytes
        await self._get(self._keys[:in_dram])
        await self._idle()
        before_bytes = self._usage().counters.read_bytes
        with timed() as span:
            await self._get(self._keys[in_dram:] + self._keys[:in_dram])
        return self._usage().counters.read_bytes - before_bytes, span

    async def _get(self, keys: Sequence[BlockKey]) -> None:
        batches = iter([keys[at : at + _GET_KEYS] for at in range(0, len(keys), _GET_KEYS)])

        async def client() -> None:
            for wanted in batches:
                pins = self._core.get_start(self._partition, wanted, self._now(), counts_misses=False)
                fetch = self._store.fetch(self._partition, wanted, pins, None)
                if fetch is not None:
                    arrived = asyncio.Event()
                    fetch.on_done(arrived.set)
                    if not fetch.is_done:
                        await arrived.wait()
                    fetch.close()
                self._core.get_end(pins)

        await asyncio.gather(*(client() for _ in range(_GETS)))

    async def close(self) -> None:
        """Remove everything from the device and give all back."""
        self._core.apply_policy(NodePolicy(self._version + 1), 0)
        await self._idle()
        self._workers.close()
        self._store.release()
        self._arena.close()

    def _put(self, key: BlockKey) -> None:
        ticket = self._core.put_start(self._partition, key, self._block_bytes, self._now())
        assert not isinstance(ticket, PutRefused), ticket
        self._arena.view(ticket.offset, self._block_bytes)[:] = self._source
        self._core.put_commit(ticket, self._digest, self._now())

    async def _idle(self) -> None:
        while not self._store.is_idle:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.0005)

    def _usage(self) -> SsdUsage:
        usage = self._core.usage().tenants[_TENANT].ssd
        assert usage is not None
        return usage

    def _policy(self, epoch: int) -> None:
        self._version += 1
        namespace = NamespacePolicy("bench", self._block_bytes, (epoch,))
        rules = TenantPolicy(TenantState.ACTIVE, self._quotas, {_NAMESPACE: namespace})
        self._core.apply_policy(NodePolicy(self._version, {_TENANT: rules}), 0)
        self._partition = open_partition(
            self._core.policy,
            claims_tenant=_TENANT,
            claims_namespace=_NAMESPACE,
            requested_namespace=_NAMESPACE,
            epoch=epoch,
        )
