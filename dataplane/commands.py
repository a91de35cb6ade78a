"""``saltern serve node``: the process of one cache node, from options to exit."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import click

from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.reservations import DEFAULT_RESERVATIONS, Reservations
from dataplane.io import garbage
from dataplane.io.engines import EngineName, MooncakeSettings
from dataplane.io.host_memory import HugePages
from dataplane.log import configure_logging
from dataplane.policy_file import PolicyFile
from dataplane.serving import serve
from dataplane.settings import METRICS_TENANTS_MAX, ArenaSettings, NodeSettings, SsdSettings, parse_mode
from dataplane.state_folder import hold_state_folder
from saltern import tracing
from saltern.admin_client import read_api_key
from saltern.cli.parameters import DURATION
from saltern.copy_tuning import restart_tuned
from saltern.core_files import forbid_core_files
from saltern.endpoints import parse_endpoint
from saltern.errors import InvalidArgumentError
from saltern.names import parse_node_id
from saltern.rdma import DeviceChoice
from saltern.rpc_connections import raise_descriptor_limit
from saltern.sizes import parse_size
from saltern.tls import client_tls, server_tls


@click.command("node", context_settings={"show_default": True})
@click.option("--node-id", envvar="SALTERN_NODE_ID", required=True, help="Name of the node; unique in the deployment.")
@click.option("--control", envvar="SALTERN_CONTROL", required=True, metavar="HOST:PORT", help="The control plane.")
@click.option(
    "--api-key-file",
    envvar="SALTERN_API_KEY_FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="File with an API key of the role node.",
)
@click.option("--listen", envvar="SALTERN_NODE_LISTEN", default="127.0.0.1:7701", help="Wire protocol over TCP.")
@click.option("--grpc-listen", envvar="SALTERN_NODE_GRPC_LISTEN", default="127.0.0.1:7702", help="gRPC CacheService.")
@click.option(
    "--metrics-listen",
    envvar="SALTERN_NODE_METRICS_LISTEN",
    default="127.0.0.1:7703",
    help="Metrics and health over HTTP; 'off' for none.",
)
@click.option(
    "--metrics-tenants-max",
    envvar="SALTERN_NODE_METRICS_TENANTS_MAX",
    type=click.IntRange(0, 10_000),
    default=METRICS_TENANTS_MAX,
    help="How many tenants metrics name; the others are summed up.",
)
@click.option(
    "--trace-batches",
    envvar="SALTERN_NODE_TRACE_BATCHES",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Share of batches, 0 to 1, of which a span is made where OTEL_EXPORTER_OTLP_ENDPOINT is set.",
)
@click.option(
    "--shm-path",
    envvar="SALTERN_NODE_SHM_PATH",
    type=click.Path(path_type=Path),
    help="Unix socket for clients on this host. [default: STATE_DIR/node.sock]",
)
@click.option("--shm-mode", envvar="SALTERN_NODE_SHM_MODE", default="0600", help="Permissions of that socket, octal.")
@click.option("--dram-bytes", envvar="SALTERN_NODE_DRAM_BYTES", default="1GiB", metavar="SIZE", help="Cache memory.")
@click.option(
    "--arena-dir",
    envvar="SALTERN_NODE_ARENA_DIR",
    type=click.Path(path_type=Path),
    help="Folder in memory (tmpfs, hugetlbfs), of this node alone: keeps DRAM over a clean restart. [default: none]",
)
@click.option(
    "--huge-pages",
    envvar="SALTERN_NODE_HUGE_PAGES",
    type=click.Choice([pages.value for pages in HugePages]),
    default=HugePages.TRANSPARENT.value,
    help="Pages of the cache memory; 2MiB and 1GiB come from the pool that nr_hugepages reserves.",
)
@click.option(
    "--numa-node",
    envvar="SALTERN_NODE_NUMA_NODE",
    type=click.IntRange(min=0),
    help="NUMA node that the cache memory is bound to. [default: wherever the system puts it]",
)
@click.option(
    "--rdma-device",
    envvar="SALTERN_NODE_RDMA_DEVICE",
    default="auto",
    metavar="DEVICE[:PORT[:GID_INDEX]]",
    help="Let entries travel over this RDMA device too, in the clear; 'auto': one that can be used, if there is any and"
    " TLS is off; 'off': none.",
)
@click.option(
    "--ssd-dir",
    envvar="SALTERN_NODE_SSD_DIR",
    type=click.Path(path_type=Path),
    help="Folder for the SSD tier, of this node alone. [default: no SSD tier]",
)
@click.option("--ssd-bytes", envvar="SALTERN_NODE_SSD_BYTES", metavar="SIZE", help="What the SSD tier may take.")
@click.option(
    "--ssd-write-bytes",
    envvar="SALTERN_NODE_SSD_WRITE_BYTES",
    metavar="SIZE",
    help="What one tenant may write to SSD in a second. [default: no bound]",
)
@click.option(
    "--engine",
    envvar="SALTERN_NODE_ENGINE",
    type=click.Choice([engine.value for engine in EngineName]),
    default=EngineName.LOCAL.value,
    help="Who keeps the bytes of the tier below DRAM: files in --ssd-dir, or a Mooncake store, sealed.",
)
@click.option(
    "--mooncake-master",
    envvar="SALTERN_NODE_MOONCAKE_MASTER",
    metavar="HOST:PORT",
    help="Master of the Mooncake store; --ssd-bytes says what this node may have in it.",
)
@click.option(
    "--mooncake-metadata",
    envvar="SALTERN_NODE_MOONCAKE_METADATA",
    default="P2PHANDSHAKE",
    metavar="URI",
    help="Its metadata service, as all of its clients are told.",
)
@click.option(
    "--mooncake-protocol",
    envvar="SALTERN_NODE_MOONCAKE_PROTOCOL",
    type=click.Choice(["tcp", "rdma"]),
    default="tcp",
    help="How bytes travel to and from it.",
)
@click.option(
    "--mooncake-device",
    envvar="SALTERN_NODE_MOONCAKE_DEVICE",
    default="",
    metavar="NAMES",
    help="RDMA devices for that, as Mooncake names them. [default: none]",
)
@click.option(
    "--eviction",
    envvar="SALTERN_NODE_EVICTION",
    type=click.Choice([order.value for order in Eviction]),
    default=DEFAULT_EVICTION.value,
    help="Which of a tenant's entries leave first.",
)
@click.option(
    "--reservations",
    envvar="SALTERN_NODE_RESERVATIONS",
    type=click.Choice([rule.value for rule in Reservations]),
    default=DEFAULT_RESERVATIONS.value,
    help="Protect all that a tenant reserved, or only what earns it hits and lend the rest.",
)
@click.option(
    "--soft-mark-percent",
    envvar="SALTERN_NODE_SOFT_MARK_PERCENT",
    type=click.IntRange(1, 100),
    metavar="PERCENT",
    help="Share of its limit that a tenant is trimmed to in the background; 100: off. [default: 98 with SSD, else 100]",
)
@click.option(
    "--state-dir",
    envvar="SALTERN_NODE_STATE_DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of the node.",
)
@click.option("--prefault/--no-prefault", default=True, help="Take the memory at start instead of at first use.")
@click.option(
    "--copy-tuning/--no-copy-tuning",
    default=True,
    help="Start again with glibc told to copy past the caches: faster gets over shared memory on x86-64.",
)
@click.option(
    "--tls-cert",
    envvar="SALTERN_NODE_TLS_CERT",
    type=click.Path(path_type=Path),
    help="Certificate and chain, PEM, of the TCP and gRPC doors; read again when it changes. [default: plain text]",
)
@click.option(
    "--tls-key", envvar="SALTERN_NODE_TLS_KEY", type=click.Path(path_type=Path), help="Its private key; nobody else's."
)
@click.option(
    "--tls-client-ca",
    envvar="SALTERN_NODE_TLS_CLIENT_CA",
    type=click.Path(path_type=Path),
    help="Turn away clients without a certificate of this authority; tokens are needed besides.",
)
@click.option(
    "--tls-name",
    envvar="SALTERN_NODE_TLS_NAME",
    default="",
    metavar="NAME",
    help="Name that clients verify the certificate by. [default: the advertised host]",
)
@click.option(
    "--tls-ca",
    envvar="SALTERN_TLS_CA",
    metavar="FILE",
    help="Call the control plane over TLS, trusting this authority; 'system': the system's. [default: plain text]",
)
@click.option(
    "--allow-plaintext",
    envvar="SALTERN_ALLOW_PLAINTEXT",
    is_flag=True,
    help="Listen beyond this host without TLS, on a network that is trusted as a whole.",
)
@click.option(
    "--advertise-host",
    envvar="SALTERN_NODE_ADVERTISE_HOST",
    default="",
    metavar="HOST",
    help="What clients call this host, if not by the listen addresses. [default: the host's name if those are 0.0.0.0]",
)
@click.option(
    "--control-wait",
    "control_wait_s",
    type=click.FloatRange(min=0),
    default=15.0,
    metavar="SECONDS",
    help="How long a starting node waits for a control plane that is starting as well.",
)
@click.option(
    "--policy-max-age",
    envvar="SALTERN_NODE_POLICY_MAX_AGE",
    type=DURATION,
    default="24h",
    metavar="DURATION",
    help="How long the last policy is served without the control plane, over restarts too.",
)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written when the node serves.")
def serve_node(
    *,
    node_id: str,
    control: str,
    api_key_file: Path,
    listen: str,
    grpc_listen: str,
    metrics_listen: str,
    metrics_tenants_max: int,
    trace_batches: float,
    shm_path: Path | None,
    shm_mode: str,
    dram_bytes: str,
    arena_dir: Path | None,
    huge_pages: str,
    numa_node: int | None,
    rdma_device: str,
    ssd_dir: Path | None,
    ssd_bytes: str | None,
    ssd_write_bytes: str | None,
    engine: str,
    mooncake_master: str | None,
    mooncake_metadata: str,
    mooncake_protocol: str,
    mooncake_device: str,
    eviction: str,
    reservations: str,
    soft_mark_percent: int | None,
    state_dir: Path,
    prefault: bool,
    copy_tuning: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    tls_name: str,
    tls_ca: str | None,
    allow_plaintext: bool,
    advertise_host: str,
    control_wait_s: float,
    policy_max_age: timedelta,
    ready_file: Path | None,
) -> None:
    """Serve one cache node until SIGTERM or Ctrl-C."""
    if copy_tuning:
        restart_tuned(["serve", "node"])
    mooncake = _mooncake_settings(engine, mooncake_master, mooncake_metadata, mooncake_protocol, mooncake_device)
    settings = NodeSettings(
        node_id=parse_node_id(node_id),
        listen=parse_endpoint(listen, what="--listen"),
        grpc_listen=parse_endpoint(grpc_listen, what="--grpc-listen"),
        metrics_listen=None if metrics_listen == "off" else parse_endpoint(metrics_listen, what="--metrics-listen"),
        metrics_tenants_max=metrics_tenants_max,
        trace_batches=trace_batches,
        dram_bytes=parse_size(dram_bytes, what="--dram-bytes"),
        shm_path=shm_path or state_dir / "node.sock",
        shm_mode=parse_mode(shm_mode),
        eviction=Eviction(eviction),
        reservations=Reservations(reservations),
        soft_mark_percent=soft_mark_percent,
        prefault=prefault,
        allow_plaintext=allow_plaintext,
        tls=server_tls(tls_cert, tls_key, tls_client_ca),
        tls_server_name=tls_name,
        arena=ArenaSettings(arena_dir, state_dir, HugePages(huge_pages), numa_node),
        rdma=None if rdma_device == "off" else DeviceChoice.parse(rdma_device),
        ssd=_ssd_settings(ssd_dir, ssd_bytes, ssd_write_bytes, state_dir, mooncake),
        advertise_host=advertise_host,
    )
    # What the node shows to its clients it also shows to a control plane that asks for a certificate.
    control_tls = None if tls_ca is None else client_tls(tls_ca, tls_cert, tls_key)
    control = str(parse_endpoint(control, what="--control", port_min=1))
    api_key = read_api_key(api_key_file)
    state_id = hold_state_folder(state_dir)
    forbid_core_files()
    configure_logging(settings.node_id)
    raise_descriptor_limit()
    kept = PolicyFile(state_dir, settings.node_id, policy_max_age.total_seconds())
    stop_tracing = tracing.start("saltern-node")
    garbage.settle()
    try:
        asyncio.run(
            serve(
                settings,
                control,
                api_key,
                kept=kept,
                state_id=state_id,
                control_tls=control_tls,
                control_wait_s=control_wait_s,
                ready_file=ready_file,
            )
        )
    finally:
        stop_tracing()


def _mooncake_settings(
    engine: str, master: str | None, metadata: str, protocol: str, device: str
) -> MooncakeSettings | None:
    """Raises InvalidArgumentError: an engine without its store, or a store without its engine."""
    if (engine == EngineName.MOONCAKE) != (master is not None):
        raise InvalidArgumentError(
            "the engine mooncake needs a master" if master is None else f"the engine {engine} has no master",
            reason="ENGINE_OPTIONS_INCOMPLETE",
            hint="give both --engine mooncake and --mooncake-master HOST:PORT, or neither",
        )
    if master is None:
        return None
    return MooncakeSettings(parse_endpoint(master, what="--mooncake-master", port_min=1), metadata, protocol, device)


def _ssd_settings(
    ssd_dir: Path | None,
    ssd_bytes: str | None,
    ssd_write_bytes: str | None,
    state_dir: Path,
    mooncake: MooncakeSettings | None = None,
) -> SsdSettings | None:
    """Raises InvalidArgumentError: one of the options is malformed, or given without the others that it needs."""
    if mooncake is not None:
        if ssd_dir is not None or ssd_bytes is None:
            raise InvalidArgumentError(
                "the engine mooncake needs a size, and no folder",
                reason="ENGINE_OPTIONS_INCOMPLETE",
                hint="give --ssd-bytes for what this node may have in the store, and leave --ssd-dir out",
            )
        ssd_dir = state_dir / EngineName.MOONCAKE  # the ledger, which must not meet the files of the engine local
    if ssd_dir is None and ssd_bytes is None and ssd_write_bytes is None:
        return None
    if ssd_dir is None or ssd_bytes is None:
        raise InvalidArgumentError(
            "the SSD tier needs a folder and a size",
            reason="SSD_OPTIONS_INCOMPLETE",
            hint="give both --ssd-dir and --ssd-bytes, or neither",
        )
    return SsdSettings(
        folder=ssd_dir,
        capacity_bytes=parse_size(ssd_bytes, what="--ssd-bytes"),
        node_key_folder=state_dir,
        write_bytes_per_s=0 if ssd_write_bytes is None else parse_size(ssd_write_bytes, what="--ssd-write-bytes"),
        mooncake=mooncake,
    )
