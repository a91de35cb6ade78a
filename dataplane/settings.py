"""What an operator sets on a node, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dataplane.core.eviction import DEFAULT_EVICTION, Eviction
from dataplane.core.reservations import DEFAULT_RESERVATIONS, Reservations
from dataplane.io.engines import MooncakeSettings
from dataplane.io.host_memory import HugePages
from saltern.endpoints import Endpoint, check_plaintext
from saltern.errors import InvalidArgumentError
from saltern.names import NodeId
from saltern.rdma import DeviceChoice
from saltern.tls import ServerTls

MIB: Final = 1024 * 1024
_MODE: Final = re.compile(r"0?[0-7]{3}", re.ASCII)
DRAM_MIN_BYTES: Final = MIB
METRICS_TENANTS_MAX: Final = 200
#: Moves most evictions out of the way of puts, for up to 0.6 points of hit rate (docs/eviction.md has the figures).
SSD_SOFT_MARK_PERCENT: Final = 98
NO_SOFT_MARK: Final = 100
SSD_MIN_BYTES: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds on what one session, and all of them together, may cost (WIRE.md, sections 5 and 8).

    Attributes:
        hello_s: from connect to a successful HELLO.
        stall_s: a frame or a reply that has begun, without a byte of progress.
        frame_s: a frame or a reply in all, plus one second for each ``payload_bytes_per_s`` of its payload.
        idle_s: between frames.
        lapsed_s: a session whose token or partition is refused, until a REFRESH: it holds one of its tenant's places.
        linger_s: how long the node waits for a client to read an error reply before it closes.
        sweep_s: how often sessions are compared with their deadlines; a deadline may be missed by this much.
        turn_bytes: what one session may move before the others get their turn, while they are of its own tenant.
        short_turn_bytes: the same while another tenant waits: about 0.2 ms.
        unopened_weight: what all connections before HELLO together weigh beside tenants, whose default is 100.
        rate_wait_s: how long a request may be delayed that finds its tenant above its rates; beyond that it is refused.
        in_flight_share: a request that moves entries begins while all transfers hold less than this part of the arena,
            and its own tenant's less than half of that. A tenant that holds nothing may always begin.
        tenant_in_flight_share: and while its own tenant's hold less than this part of the tenant's limit.
        sessions_max, tenant_sessions_max: open sessions in all, and of one tenant.
        unopened_max: connections before HELLO; the oldest gives way to a new one, or whoever says nothing would keep
            everybody out.
    """

    hello_s: float = 5.0
    stall_s: float = 10.0
    frame_s: float = 10.0
    payload_bytes_per_s: int = 4 * MIB
    idle_s: float = 600.0
    lapsed_s: float = 60.0
    sweep_s: float = 0.5
    turn_bytes: int = 4 * MIB
    short_turn_bytes: int = MIB // 2
    unopened_weight: int = 20
    rate_wait_s: float = 0.25
    in_flight_share: float = 0.5
    tenant_in_flight_share: float = 0.5
    linger_s: float = 2.0
    sessions_max: int = 1024
    unopened_max: int = 128
    tenant_sessions_max: int = 256

    def transfer_s(self, payload_bytes: int) -> float:
        """The longest that a frame or a reply with this payload may take."""
        return self.frame_s + payload_bytes / self.payload_bytes_per_s


@dataclass(frozen=True, slots=True)
class SsdSettings:
    """The tier below DRAM: files on SSD, or a store that others reach too (docs/engines.md).

    Attributes:
        folder: for segments only; one node at a time uses it.
        capacity_bytes: what all tenants together may have in it, in bytes of files.
        node_key_folder: where the key that wraps the tenants' data keys is kept.
        write_bytes_per_s: how fast a tenant may write whose policy does not say, against wear; 0 for no bound.
        mooncake: the store that keeps the records; ``folder`` then has keys and lists alone. None for files in it.

    Raises:
        InvalidArgumentError: SSD_TOO_SMALL.
    """

    folder: Path
    capacity_bytes: int
    node_key_folder: Path
    write_bytes_per_s: int = 0
    mooncake: MooncakeSettings | None = None

    def __post_init__(self) -> None:
        if self.capacity_bytes < SSD_MIN_BYTES:
            raise InvalidArgumentError(
                f"--ssd-bytes {self.capacity_bytes} is below the minimum of {SSD_MIN_BYTES}",
                reason="SSD_TOO_SMALL",
                hint="give the SSD tier some space, such as --ssd-bytes 100GiB, or leave --ssd-dir out",
            )


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """The memory of the DRAM tier, beyond its length.

    Attributes:
        folder: in memory (tmpfs, hugetlbfs), of this node alone: a clean restart serves the same entries again; None
            for private memory, which ends with the process.
        index_folder: where the index of entries is written if ``folder`` cannot hold it; needed with ``folder``.
        huge_pages: what pages to ask the system for.
        numa_node: where all of it shall be; None for wherever the system puts it.
    """

    folder: Path | None = None
    index_folder: Path | None = None
    huge_pages: HugePages = HugePages.TRANSPARENT
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Everything that a node process is started with.

    Attributes:
        shm_path: path of the unix socket of the shared-memory door; None for no such door.
        shm_mode: permission bits of that socket: who on the host may try a token.
        dram_bytes: length of the arena.
        eviction: the order in which a tenant's entries leave.
        reservations: what of a reservation nobody else may take (I5).
        soft_mark_percent: of its limit, above which a tenant's own coldest entries leave in the background; 100 for
            never, None for :attr:`soft_mark` to choose. What it has reserved stays.
        prefault: take the arena's memory at start instead of at first use.
        allow_plaintext: permit listening on other than loopback addresses without TLS.
        tls: for the wire door over TCP and the gRPC door; None for plain text. Metrics are plain text in any case.
        tls_server_name: what clients verify the certificate by; the advertised host if empty.
        metrics_listen: where metrics and health are served over HTTP; None for nowhere.
        metrics_tenants_max: how many tenants metrics name; the others are summed up.
        advertise_host: name or address that clients reach this host by; the listen addresses' own if empty.
        drain_s: how long transfers that have begun may take after SIGTERM.
        ssd: the tier below DRAM; None for none.
        arena: what memory the DRAM tier has.
        trace_batches: the share of batches, 0 to 1, that get a span where the process is traced.
        rdma: device, port and GID that entries may travel over as well; None for no RDMA. A device that cannot be used
            is logged, and the node serves without; so is one that TLS stands against because it was not named.
    """

    node_id: NodeId
    listen: Endpoint
    grpc_listen: Endpoint
    dram_bytes: int
    shm_path: Path | None = None
    shm_mode: int = 0o600
    eviction: Eviction = DEFAULT_EVICTION
    reservations: Reservations = DEFAULT_RESERVATIONS
    soft_mark_percent: int | None = None
    prefault: bool = True
    allow_plaintext: bool = False
    tls: ServerTls | None = None
    tls_server_name: str = ""
    metrics_listen: Endpoint | None = None
    metrics_tenants_max: int = METRICS_TENANTS_MAX
    advertise_host: str = ""
    drain_s: float = 5.0
    limits: SessionLimits = field(default_factory=SessionLimits)
    ssd: SsdSettings | None = None
    arena: ArenaSettings = field(default_factory=ArenaSettings)
    trace_batches: float = 0.0
    rdma: DeviceChoice | None = None

    def __post_init__(self) -> None:
        """Raises FailedPreconditionError: an address needs TLS; InvalidArgumentError: the arena is too small."""
        for option, endpoint in self.listening_in_plain_text.items():
            check_plaintext(endpoint, allow_plaintext=self.allow_plaintext, what=option)
        if self.dram_bytes < DRAM_MIN_BYTES:
            raise InvalidArgumentError(
                f"--dram-bytes {self.dram_bytes} is below the minimum of {DRAM_MIN_BYTES}",
                reason="DRAM_TOO_SMALL",
                hint="give the node some memory, such as --dram-bytes 1GiB",
            )

    @property
    def soft_mark(self) -> int:
        """The soft mark in per cent, also where none was set.

        Without SSD an eviction costs a put a few microseconds, and a mark would only make the cache smaller.
        """
        if self.soft_mark_percent is not None:
            return self.soft_mark_percent
        return NO_SOFT_MARK if self.ssd is None else SSD_SOFT_MARK_PERCENT

    @property
    def listening(self) -> dict[str, Endpoint]:
        """Every address that the node listens at, by the option that sets it."""
        listening = {"--listen": self.listen, "--grpc-listen": self.grpc_listen}
        return listening if self.metrics_listen is None else listening | {"--metrics-listen": self.metrics_listen}

    @property
    def listening_in_plain_text(self) -> dict[str, Endpoint]:
        """Those of them whose traffic anybody on the path can read."""
        if self.tls is None:
            return self.listening
        return {} if self.metrics_listen is None else {"--metrics-listen": self.metrics_listen}


def parse_mode(text: str) -> int:
    """Parse octal permission bits such as ``0660``; raises InvalidArgumentError for anything else."""
    if _MODE.fullmatch(text) is None:
        raise InvalidArgumentError(
            f"{text[:16]!r} is not a mode", reason="INVALID_MODE", hint="write octal permission bits, such as 0660"
        )
    return int(text, 8)
