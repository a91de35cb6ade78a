"""vLLM's view of the connector: ``SalternConnector``, a thin shell around the two halves.

::

    --kv-transfer-config '{"kv_connector": "SalternConnector",
                           "kv_connector_module_path": "saltern.vllm.connector",
                           "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"control": "HOST:7700", "namespace": "llama",
                                                         "api_key_file": "/run/secrets/saltern"}}'

vLLM makes one in the scheduler and one in each worker. What is wrong with the *options* ends the start; whatever else
is in the way of a remote cache is logged once and the engine goes on without one (I10), unless ``strict_start``.
Tested with vLLM 0.32.0 on CPU; docs/vllm.md has options, metrics and what happens when.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from saltern.errors import SalternError
from saltern.vllm.clients_in_use import ClientsInUse
from saltern.vllm.engine_facts import (
    can_load_in_step,
    check_supported,
    entry_bytes_of,
    facts_of,
    has_draft_layers,
    layout_of,
    ranks_of,
)
from saltern.vllm.identity import Identity
from saltern.vllm.lookups import Lookups
from saltern.vllm.metadata import StepWork
from saltern.vllm.opening import open_tenancy
from saltern.vllm.options import parse_options
from saltern.vllm.page_memory import pages_of
from saltern.vllm.prometheus import SalternPromMetrics, SalternStats
from saltern.vllm.scheduling import ScheduledRequest, SchedulerSide, SchedulingRules
from saltern.vllm.stats import Tally
from saltern.vllm.tenancy import InstanceTenancy, Tenancy
from saltern.vllm.weights import default_cache_folder
from saltern.vllm.worker import LoadResults, NoLoads, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


# MultiConnector finds the class of a child's stats by this name.
with suppress(ValueError):  # registered already, by whoever imported this under another path
    KVConnectorFactory.register_connector("SalternConnector", __name__, "SalternConnector")


class SalternMetadata(KVConnectorMetadata):
    """A step's work, in the envelope that vLLM carries."""

    def __init__(self, work: StepWork) -> None:
        self.work = work


class SalternConnector(KVConnectorBase_V1, SupportsHMA):
    """The remote cache of one engine, in its scheduler or in one of its workers."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Open the remote cache, within ``open_wait_ms``.

        Raises:
            InvalidArgumentError: ``kv_connector_extra_config`` is wrong.
            SalternError: the cache cannot be used, with ``strict_start``.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = parse_options(self._kv_transfer_config.kv_connector_extra_config, os.environ)
        self._tally = Tally()
        self._tenancy: Tenancy | None = None
        self._scheduler: SchedulerSide | None = None
        self._lookups: Lookups | None = None
        self._identity: Identity | None = None
        self._worker: WorkerSide | NoLoads = NoLoads()
        self._results = LoadResults(set(), set(), set())
        self._is_hybrid = len(kv_cache_config.kv_cache_groups) > 1
        if self._options.load == "sync" and not can_load_in_step(vllm_config, kv_cache_config):
            logger.warning(
                "loads are asynchronous: in the step they take one rank, one KV cache group, no async scheduling"
            )
            self._options = msgspec.structs.replace(self._options, load="async")
        try:
            check_supported(vllm_config, kv_cache_config)
            self._tenancy = open_tenancy(self._options, os.environ)
            if role is KVConnectorRole.SCHEDULER:
                self._start_scheduler(vllm_config, kv_cache_config, self._tenancy)
        except SalternError as error:
            self._go_without(error)

    # ---- scheduler -------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over: a dropped save is a later miss."""
        return False

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return SalternMetadata(StepWork())
        return SalternMetadata(self._scheduler.plan_step(_scheduled(scheduler_output)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_ended(
                connector_output.finished_recving or (),
                connector_output.failed_recving,
                connector_output.invalid_block_ids,
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may be freed at once: what is stored was copied out when its step ended."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Never find again what was stored so far: the engine's weights may have changed under it.

        The tenant's entries stay, for its other engines. From here on this engine has a name of its own.
        """
        if self._identity is not None and self._scheduler is not None:
            self._identity.renew()
            self._scheduler.forget_names()
        return True

    # ---- worker ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._tenancy is None:
            return
        config, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        ranks, rank = ranks_of(config, self._kv_cache_config), config.parallel_config.rank
        try:
            layers = [group.layer_names for group in groups]
            pages = pages_of(layers, kv_caches, self._kv_cache_config.num_blocks)
            self._worker = WorkerSide(
                self._tenancy,
                pages,
                layout_of(config, self._kv_cache_config),
                self._options,
                self._tally,
                shard=ranks.shard_of(rank),
                stores=ranks.stores(rank) and self._kv_transfer_config.is_kv_producer,
            )
        except SalternError as error:
            self._go_without(error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._work())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_loads(self._work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the forward pass begins, or of requests that are not in it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, all layers together, when the step ends."""

    def wait_for_save(self) -> None:
        self._worker.save(self._work())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Each asynchronous load is reported once, with its failed blocks in the same step at the latest."""
        self._results = results = self._worker.take_load_results()
        if self._options.load == "sync":
            return KVConnectorTransferResults()
        failed = results.failed if self._is_hybrid else set()
        return KVConnectorTransferResults(finished_recving=results.done, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The failed blocks of the loads that ``get_transfer_results`` gave last; none where ids are ambiguous."""
        invalid, self._results = self._results.invalid_block_ids, LoadResults(set(), set(), set())
        return set() if self._is_hybrid else invalid

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was computed so far is stored or refused; returns whether it is."""
        return self._worker.drain(timeout_s)

    # ---- both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> SalternStats | None:
        counts = self._tally.take()
        return SalternStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SalternStats:
        return SalternStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SalternPromMetrics:
        return SalternPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Send what is queued, for a few seconds at most, and close; loads end by their deadline."""
        worker, self._worker = self._worker, NoLoads()
        worker.close()
        self._scheduler = None
        if self._lookups is not None:
            self._lookups.close()
        if self._tenancy is not None:
            self._tenancy.close()
            self._tenancy = None

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _start_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tenancy: Tenancy) -> None:
        options = self._options
        layout, cache_folder = layout_of(vllm_config, kv_cache_config), default_cache_folder()
        identity = Identity(
            lambda: facts_of(vllm_config, kv_cache_config, weights=options.weights_digest, cache_folder=cache_folder),
            layout,
            cache_folder,
        )
        if not identity.wait(options.open_wait_ms / 1000):
            logger.info("the weights are still being read; the remote cache is used as soon as they are")
        if identity.error is not None:
            raise identity.error
        clients = ClientsInUse(tenancy, layout, entry_bytes_of(kv_cache_config))
        if isinstance(tenancy, InstanceTenancy):
            self._check_instance(tenancy, clients)
        self._identity = identity
        self._lookups = Lookups(
            clients.get, identity.bindings, layout, self._tally, deadline_ms=options.lookup_deadline_ms
        )
        rules = SchedulingRules(
            load_async=options.load == "async",
            save=options.save and self._kv_transfer_config.is_kv_producer,
            save_generated=options.save_generated,
            lookup_wait_s=options.lookup_wait_ms / 1000,
            withheld_blocks=int(has_draft_layers(kv_cache_config)),
            save_lags=vllm_config.num_speculative_tokens > 0,
        )
        self._scheduler = SchedulerSide(tenancy, self._lookups, layout, rules, self._tally)

    def _check_instance(self, tenancy: InstanceTenancy, clients: ClientsInUse) -> None:
        """Say at the start what is in the way; only ``strict_start`` ends there, since it may get better."""
        error = tenancy.error or clients.error(tenancy.ticket)
        if error is not None and self._options.strict_start:
            raise error

    def _go_without(self, error: SalternError) -> None:
        """Serve without a remote cache, or end the start if that is what the options say."""
        self.shutdown()
        if self._options.strict_start:
            raise error
        logger.error("this engine runs without a remote cache: %s", error)

    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SalternMetadata)
        return metadata.work


def _scheduled(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """The requests of a step, with what each had computed before it."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    blocks = output.kv_connector_block_state
    for request_id, tokens in output.num_scheduled_tokens.items():
        yield ScheduledRequest(request_id, computed[request_id], tokens, partial(blocks.get_block_ids, request_id))
