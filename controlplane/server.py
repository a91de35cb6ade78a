"""The control plane's process: what it starts with, the services it serves, and how it drains.

::

    migrate ─> database ─> keys, bootstrap token ─> services behind the door ─> listen ─> ready file
                                                        SIGTERM: NOT_SERVING ─> end streams ─> finish calls ─> close
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from sqlalchemy.exc import SQLAlchemyError

import migrations
from controlplane import admin
from controlplane.audit import DenialLog
from controlplane.audit.checkpoint_keys import CheckpointKeys, load_checkpoint_key
from controlplane.audit.checkpoint_sinks import CheckpointSink, FolderSink
from controlplane.audit.checkpoints import CheckpointWriter
from controlplane.audit.object_sink import ObjectSink
from controlplane.auth.bootstrap import ensure_bootstrap
from controlplane.auth.door import AuthenticationDoor
from controlplane.auth.key_keeper import KeyKeeper
from controlplane.auth.service import AuthService
from controlplane.auth.signing_keys import SigningKeys, load_key_ring
from controlplane.auth.verifier import TokenVerifier
from controlplane.clock import Clock, utc_now
from controlplane.console.part import ConsolePart
from controlplane.db import Database, connect
from controlplane.db.catalogue import require_row_security
from controlplane.db.durability import require_durable_commits
from controlplane.files import announced, make_folder
from controlplane.key_encryption.encryption_keys import EncryptionKeys, load_encryption_keys
from controlplane.key_encryption.keeper import KeyEncryptionKeeper
from controlplane.key_encryption.kms import KmsClient
from controlplane.metering import HourCloser
from controlplane.metrics import ControlMetrics, serving_metrics
from controlplane.node.lease_keeper import LeaseKeeper
from controlplane.node.policy_feed import PolicyFeed
from controlplane.node.registry import LOST_AFTER
from controlplane.node.service import NodeService
from controlplane.restored import RestoreWatch
from controlplane.rpc import database_failure
from controlplane.salts.keeper import SaltKeeper
from controlplane.secrets import KeyEncryptionKey
from controlplane.settings import ControlSettings
from controlplane.tracing import interceptors
from controlplane.trust import TrustWatch
from saltern.auth.v1 import auth_pb2, auth_pb2_grpc
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError
from saltern.node.v1 import node_pb2, node_pb2_grpc
from saltern.objects import ObjectFolder
from saltern.rpc_connections import connection_limits, raise_descriptor_limit
from saltern.rpc_tls import server_credentials
from saltern.tls_reload import ReloadingTls

DRAIN_TIMEOUT_S: Final = 10.0
#: In the state directory, where no other place is named.
CHECKPOINT_FOLDER: Final = "audit-checkpoints"
#: Room for the usage of 10,000 tenants in one report; administrative requests have a lower limit of their own.
MESSAGE_MAX_BYTES: Final = 4 * 1024 * 1024
_METADATA_MAX_BYTES: Final = 16 * 1024
_STREAMS_PER_CONNECTION_MAX: Final = 128
_CALLS_MAX: Final = 2048
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
_KEEPALIVE_TIME_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_CLIENT_PING_INTERVAL_MIN_MS: Final = 5_000

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port takes half of the calls instead of an error
    ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
    ("grpc.max_metadata_size", _METADATA_MAX_BYTES),
    ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION_MAX),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),  # a peer that connects and says nothing
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _CLIENT_PING_INTERVAL_MIN_MS),
)
SERVICE_NAMES: Final = (
    auth_pb2.DESCRIPTOR.services_by_name["AuthService"].full_name,
    node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name,
    *admin.SERVICE_NAMES,
)
_BIND_HINTS: Final = {
    errno.EADDRINUSE: "stop what uses it (`ss -ltnp` shows it), or choose another port; port 0 takes any free one",
    errno.EADDRNOTAVAIL: "choose an address that this host has",
    errno.EACCES: "choose a port above 1023, or run with the right to use this one",
}

_log = structlog.get_logger(__name__)


class ControlPlane:
    """A running control plane.

    Attributes:
        endpoint: where it listens; the port is the real one.
        metrics_endpoint: where it serves metrics; empty for nowhere.
        console_url: where it serves the console; empty for nowhere.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: grpc.aio.Server,
        health_service: health.aio.HealthServicer,
        feed: PolicyFeed,
        *,
        metrics: ControlMetrics,
        metrics_endpoint: str,
    ) -> None:
        self.endpoint = endpoint
        self.metrics_endpoint = metrics_endpoint
        self.console_url = ""
        self._metrics = metrics
        self._server = server
        self._health = health_service
        self._feed = feed

    async def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Say NOT_SERVING, end the policy streams, let other calls finish for ``timeout_s`` seconds, then stop."""
        self._metrics.is_draining = True
        await self._health.enter_graceful_shutdown()
        await self._feed.drain()
        await self._server.stop(timeout_s)


async def serve(settings: ControlSettings, *, ready_file: Path | None = None) -> None:
    """Run the control plane until SIGTERM or SIGINT.

    Args:
        ready_file: written when the process serves (JSON: ``endpoint``, ``metrics_endpoint``, ``console_url`` and
            ``pid``), removed at the end.

    Raises:
        SalternError: it cannot start; one line that says what, why and what to do.
    """
    raise_descriptor_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as control_plane:
        announcement = {
            "endpoint": str(control_plane.endpoint),
            "metrics_endpoint": control_plane.metrics_endpoint,
            "console_url": control_plane.console_url,
            "pid": os.getpid(),
        }
        with announced(ready_file, announcement):
            await stop.wait()
            _log.info("draining")


@asynccontextmanager
async def running(settings: ControlSettings, clock: Clock = utc_now) -> AsyncIterator[ControlPlane]:
    """Start a control plane; drain and close it at the end of the block. Raises as :func:`serve`."""
    _prepare_state_dir(settings.state_dir)
    await asyncio.to_thread(migrations.upgrade, _migration_url(settings))
    async with AsyncExitStack() as stack:
        database = await _open_database(settings, stack)
        kms = None if settings.kms_endpoint is None else KmsClient(settings.kms_endpoint)
        if kms is not None:
            stack.push_async_callback(kms.close)
        encryption_keys, keys = await _load_keys(settings, database, kms, clock)
        key_encryption_key = encryption_keys.ring
        wrapping = KeyEncryptionKeeper(database, encryption_keys, clock)
        denials = DenialLog(database, clock)
        restored = RestoreWatch(database, settings.state_dir, clock)
        await _look_whether_restored(restored)
        feed = PolicyFeed(settings.database_url.get_secret_value())
        leases = LeaseKeeper(database, clock, lease_duration=timedelta(seconds=settings.lease_duration_s))
        console = ConsolePart(settings, database, clock)
        metrics = ControlMetrics(database, clock, console.metrics)
        server = grpc.aio.server(
            interceptors=[
                *interceptors(),
                metrics,
                AuthenticationDoor(TokenVerifier(database, keys, clock), denials, console.voucher),
            ],
            options=(*_OPTIONS, *connection_limits()),
            maximum_concurrent_rpcs=_CALLS_MAX,
        )
        auth_pb2_grpc.add_AuthServiceServicer_to_server(
            AuthService(
                database=database,
                key_encryption_key=key_encryption_key,
                keys=keys,
                denials=denials,
                state_dir=settings.state_dir,
                token_lifetime_s=settings.token_lifetime_s,
                clock=clock,
            ),
            server,
        )
        admin.add_services(
            server,
            admin.AdminParts(
                database=database,
                key_encryption_key=key_encryption_key,
                denials=denials,
                feed=feed,
                clock=clock,
                node_lost_after=LOST_AFTER,
                encryption_keys=encryption_keys,
                allow_unbound_node_keys=settings.allow_unbound_node_keys,
            ),
        )
        node_service = NodeService(
            database=database,
            feed=feed,
            keeper=leases,
            denials=denials,
            restored=restored,
            allow_unbound_keys=settings.allow_unbound_node_keys,
            clock=clock,
        )
        stack.push_async_callback(node_service.finish_reports)
        node_pb2_grpc.add_NodeServiceServicer_to_server(node_service, server)
        health_service = await _add_health_and_reflection(server, SERVICE_NAMES)
        tls = None if settings.tls is None else ReloadingTls(settings.tls, _log)
        endpoint = bind(server, settings.listen, tls)
        console.bind(server, stack)

        background = partial(_in_background, stack, metrics)
        background(feed.run(), "policy feed")
        background(leases.run(), "leases")
        retention = timedelta(days=settings.usage_retention_days)
        background(HourCloser(database, clock, retention=retention).run(), "closing of usage")
        background(restored.run(), "restore watch")
        keeper = KeyKeeper(
            database,
            key_encryption_key,
            keys,
            age_max=timedelta(seconds=settings.signing_key_max_age_s),
            token_lifetime=timedelta(seconds=settings.token_lifetime_s),
            clock=clock,
        )
        background(keeper.run(), "key keeper")
        background(SaltKeeper(database, key_encryption_key, clock).run(), "salt keeper")
        stack.push_async_callback(wrapping.leave)
        background(wrapping.run(), "key-encryption keeper")
        signing = await _start_checkpoints(settings, database, key_encryption_key, clock)
        stack.push_async_callback(signing.stop)  # after the drain: the last acts are signed too
        metrics.watch(TrustWatch(signing, wrapping))
        metrics_endpoint = await stack.enter_async_context(serving_metrics(metrics, settings.metrics_listen))
        await server.start()
        control_plane = ControlPlane(
            endpoint, server, health_service, feed, metrics=metrics, metrics_endpoint=metrics_endpoint
        )
        stack.push_async_callback(control_plane.drain)
        control_plane.console_url = await console.serve(stack, tls)
        _warn_of_plaintext(settings)
        _log.info("serving", endpoint=str(endpoint), issuer=keys.ring.key_set.issuer)
        yield control_plane


def _warn_of_plaintext(settings: ControlSettings) -> None:
    plain = (settings.listen, settings.console_listen) if settings.tls is None else ()
    for listening in (*plain, settings.metrics_listen):
        if listening is not None and not listening.is_loopback:
            _log.warning("listening in plain text beyond this host", endpoint=str(listening))


async def _open_database(settings: ControlSettings, stack: AsyncExitStack) -> Database:
    """Connect; raise FailedPreconditionError if row-level security does not bind us (I2) or acts may get lost (I11)."""
    database = connect(settings.database_url.get_secret_value())
    stack.push_async_callback(database.close)
    try:
        await require_row_security(database)
        await require_durable_commits(database)
    except SQLAlchemyError as error:
        raise database_failure(error) or error from None
    return database


async def _look_whether_restored(restored: RestoreWatch) -> None:
    """Before anybody is served: what nodes hold from after the backup must be older than all they get from here."""
    try:
        await restored.look()
    except SQLAlchemyError as error:
        raise database_failure(error) or error from None


async def _load_keys(
    settings: ControlSettings, database: Database, kms: KmsClient | None, clock: Clock
) -> tuple[EncryptionKeys, SigningKeys]:
    """Load what the deployment's secrets hang off; on a fresh database make it, and the bootstrap token."""
    try:
        encryption_keys = await load_encryption_keys(database, settings.state_dir, kms, clock)
        key_encryption_key = encryption_keys.ring
        if await ensure_bootstrap(database, settings.state_dir, clock):
            _log.info("fresh deployment: redeem the bootstrap token", state_dir=str(settings.state_dir))
        ring = await load_key_ring(database, key_encryption_key, clock)
        return encryption_keys, SigningKeys(database, key_encryption_key, ring, clock)
    except SQLAlchemyError as error:
        raise database_failure(error) or error from None


async def _start_checkpoints(
    settings: ControlSettings, database: Database, key_encryption_key: KeyEncryptionKey, clock: Clock
) -> CheckpointWriter:
    sink: CheckpointSink
    if settings.audit_checkpoint_url is not None:
        sink = await asyncio.to_thread(ObjectSink, ObjectFolder(settings.audit_checkpoint_url))
    else:
        sink = FolderSink(settings.audit_checkpoint_dir or settings.state_dir / CHECKPOINT_FOLDER)
    try:
        key = await load_checkpoint_key(database, key_encryption_key, clock)
    except SQLAlchemyError as error:
        raise database_failure(error) or error from None
    _log.info("checkpoints of audit chains", key_id=key.id)
    keys = CheckpointKeys(database, key_encryption_key, key)
    writer = CheckpointWriter(database, keys.current, sink, clock)
    writer.start(settings.audit_checkpoint_interval_s)
    return writer


def bind(server: grpc.aio.Server, listen: Endpoint, tls: ReloadingTls | None = None) -> Endpoint:
    """Bind ``server``, in plain text without ``tls``; return the endpoint with the real port.

    Raises:
        FailedPreconditionError: reason CANNOT_LISTEN: the port is taken, or not one to have.
    """
    try:
        if tls is None:
            port = server.add_insecure_port(str(listen))
        else:
            port = server.add_secure_port(str(listen), server_credentials(tls))
    except RuntimeError:
        port = 0
    if port == 0:
        number = _bind_error(listen)
        why = os.strerror(number) if number else "the address is not usable"
        raise FailedPreconditionError(
            f"cannot listen on {listen}: {why.lower()}",
            reason="CANNOT_LISTEN",
            hint=_BIND_HINTS.get(number, "choose another address"),
        )
    return Endpoint(listen.host, port)


def _bind_error(listen: Endpoint) -> int:
    """gRPC does not say why a bind failed: try it ourselves and return the errno, 0 if it works now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(*listen, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return error.errno if error.errno and error.errno > 0 else errno.EADDRNOTAVAIL
    return 0


async def _add_health_and_reflection(server: grpc.aio.Server, services: tuple[str, ...]) -> health.aio.HealthServicer:
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    for name in ("", *services):
        await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return health_service


def _prepare_state_dir(state_dir: Path) -> None:
    try:
        make_folder(state_dir, 0o700)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot use the state directory {state_dir}: {(error.strerror or 'unusable').lower()}",
            reason="STATE_DIR_UNUSABLE",
            hint="give --state-dir a folder that this user can write",
        ) from None


def _migration_url(settings: ControlSettings) -> str:
    return (settings.migration_database_url or settings.database_url).get_secret_value()


def _in_background(
    stack: AsyncExitStack, metrics: ControlMetrics, work: Coroutine[None, None, None], name: str
) -> None:
    """Do ``work`` until the end of ``stack``. What ends before that is a fault of ours, and the process unready."""

    def note_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            metrics.ended_task = name
            _log.error("background work ended", task=name, exc_info=task.exception())

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(note_end)
    stack.push_async_callback(_cancel, task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
