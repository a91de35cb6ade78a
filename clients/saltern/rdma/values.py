"""What crosses the seam: values without behaviour of their own, the same whichever binding is below.

Addresses, keys and queue pair numbers are plain integers on purpose. A binding's own objects never leave it: some of
them read freed memory when they are asked for a key after their region is closed.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from typing import Final

from saltern.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ProtocolError,
    SalternError,
    UnavailableError,
)

_ENDPOINT: Final = struct.Struct("!IIHH16s")
ENDPOINT_BYTES: Final = _ENDPOINT.size
MTUS_BYTES: Final = (256, 512, 1024, 2048, 4096)
_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")
_NUMBER_MAX: Final = 2**24 - 1  #: queue pair and packet sequence numbers are of 24 bits


class Access(IntFlag):
    """What a region or a queue pair lets the other side do: ``ibv_access_flags`` of the same values.

    ``LOCAL_WRITE`` lets this side's device write, as it does for a READ that it issues. The node uses nothing else
    (I3). A client's buffer has ``REMOTE_READ`` for a put, ``REMOTE_WRITE | LOCAL_WRITE`` for a get.
    """

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ


class GidType(StrEnum):
    INFINIBAND = "InfiniBand"
    ROCE_V1 = "RoCE v1"
    ROCE_V2 = "RoCE v2"


class LinkLayer(StrEnum):
    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class Gid:
    """Address of a port: 128 bits, written as an IPv6 address; RoCE over IPv4 is ``::ffff:a.b.c.d``."""

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != 16:
            raise InvalidArgumentError(f"a GID has 16 bytes, not {len(self.value)}", reason="RDMA_GID_INVALID")

    @classmethod
    def parse(cls, text: str) -> Gid:
        try:
            return cls(ipaddress.IPv6Address(text.strip()).packed)
        except ValueError as error:
            raise InvalidArgumentError(f"{text[:64]!r} is no GID", reason="RDMA_GID_INVALID") from error

    @property
    def is_zero(self) -> bool:
        return not any(self.value)

    @property
    def is_ipv4(self) -> bool:
        return self.value[:12] == bytes(10) + b"\xff\xff"

    @property
    def is_link_local(self) -> bool:
        return self.value[0] == 0xFE and self.value[1] & 0xC0 == 0x80

    @property
    def is_of_many(self) -> bool:
        """Multicast, or IPv4's broadcast: nothing that one queue pair could be at."""
        if self.is_ipv4:
            address = ipaddress.IPv4Address(self.value[12:])
            return address.is_multicast or address == _BROADCAST
        return self.value[0] == 0xFF

    @property
    def exploded(self) -> str:
        """Eight groups of four digits, as every binding reads it."""
        digits = self.value.hex()
        return ":".join(digits[at : at + 4] for at in range(0, 32, 4))

    def __str__(self) -> str:
        return (
            f"::ffff:{ipaddress.IPv4Address(self.value[12:])}"
            if self.is_ipv4
            else str(ipaddress.IPv6Address(self.value))
        )


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One row of a port's GID table. ``network_device`` is empty where this network namespace does not have it."""

    index: int
    gid: Gid
    gid_type: GidType
    network_device: str = ""


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A port as the kernel describes it, without opening the device."""

    device: str
    port: int
    is_active: bool
    link_layer: LinkLayer
    gids: tuple[GidEntry, ...]


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What one device and port can carry, in the verbs' own terms: counts and bytes."""

    max_message_bytes: int  #: of one work request (port max_msg_sz)
    max_region_bytes: int  #: of one registration (max_mr_size)
    max_requests: int  #: of one queue (max_qp_wr)
    max_spans: int  #: scatter/gather entries of one request (max_sge)
    max_completions: int  #: of one completion queue (max_cqe)
    max_reads: int  #: READs under way at once on one queue pair (max_qp_rd_atom)
    active_mtu_bytes: int
    max_mtu_bytes: int
    lid: int  #: 0 on Ethernet


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the other side needs to reach one queue pair; exchanged over the authenticated session.

    Attributes:
        qpn: queue pair number, 24 bits.
        gid: address of the port.
        psn: first packet sequence number that this side sends, 24 bits, random.
        mtu_bytes: the largest payload of a packet here; the smaller of both is used.
        lid: local identifier on InfiniBand; 0 on Ethernet.
    """

    qpn: int
    gid: Gid
    psn: int
    mtu_bytes: int
    lid: int = 0

    def __post_init__(self) -> None:
        wrong = (
            (not 0 < self.qpn <= _NUMBER_MAX and f"queue pair number {self.qpn}")
            or (not 0 <= self.psn <= _NUMBER_MAX and f"packet sequence number {self.psn}")
            or (self.mtu_bytes not in MTUS_BYTES and f"MTU {self.mtu_bytes}")
            or (not 0 <= self.lid < 2**16 and f"LID {self.lid}")
            or (self.gid.is_zero and "GID ::")
            or (self.gid.is_of_many and f"GID {self.gid}, which is of many ports")
        )
        if wrong:
            raise ProtocolError(f"an RDMA endpoint cannot have {wrong}", reason="RDMA_ENDPOINT_INVALID")

    def pack(self) -> bytes:
        """``ENDPOINT_BYTES`` bytes, big-endian: qpn u32, psn u32, lid u16, mtu_bytes u16, gid 16 bytes."""
        return _ENDPOINT.pack(self.qpn, self.psn, self.lid, self.mtu_bytes, self.gid.value)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Endpoint:
        """Raises ProtocolError (RDMA_ENDPOINT_INVALID) on anything that no endpoint packs to."""
        if len(data) != ENDPOINT_BYTES:
            raise ProtocolError(
                f"an RDMA endpoint has {ENDPOINT_BYTES} bytes, not {len(data)}", reason="RDMA_ENDPOINT_INVALID"
            )
        qpn, psn, lid, mtu_bytes, gid = _ENDPOINT.unpack(data)
        return cls(qpn=qpn, gid=Gid(gid), psn=psn, mtu_bytes=mtu_bytes, lid=lid)


@dataclass(frozen=True, slots=True)
class LocalSpan:
    """Bytes of a region of this side. Made by ``Region.local``, which checks the bounds."""

    address: int
    length_bytes: int
    local_key: int


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Bytes of a region of the other side, as it described them; only its device can check that they are right."""

    address: int
    length_bytes: int
    remote_key: int


@dataclass(frozen=True, slots=True)
class Read:
    """RDMA READ: ``remote`` into ``local``, in order; the lengths agree."""

    local: tuple[LocalSpan, ...]
    remote: RemoteSpan


@dataclass(frozen=True, slots=True)
class Write:
    """RDMA WRITE: ``local`` into ``remote``, in order; the lengths agree.

    With ``immediate`` (32 bits) the last byte of it ends one receive of the other side, whose completion says that
    these bytes and those of every earlier WRITE of this queue pair are visible there.
    """

    local: tuple[LocalSpan, ...]
    remote: RemoteSpan
    immediate: int | None = None


Operation = Read | Write


class CompletionStatus(IntEnum):
    """``ibv_wc_status``: what became of a chain or a receive."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_QUEUE_PAIR_OPERATION = 2
    LOCAL_EE_CONTEXT_OPERATION = 3
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    WINDOW_BIND = 6
    BAD_RESPONSE = 7
    LOCAL_ACCESS = 8
    REMOTE_INVALID_REQUEST = 9
    REMOTE_ACCESS = 10
    REMOTE_OPERATION = 11
    RETRIES_EXCEEDED = 12
    RECEIVER_NOT_READY = 13
    LOCAL_RDD_VIOLATION = 14
    REMOTE_INVALID_READ_REQUEST = 15
    REMOTE_ABORTED = 16
    INVALID_EE_CONTEXT = 17
    INVALID_EE_CONTEXT_STATE = 18
    FATAL = 19
    RESPONSE_TIMEOUT = 20
    GENERAL = 21

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


_REFUSED: Final = {
    CompletionStatus.REMOTE_INVALID_REQUEST,
    CompletionStatus.REMOTE_ACCESS,
    CompletionStatus.REMOTE_INVALID_READ_REQUEST,
}
_GONE: Final = {CompletionStatus.FLUSHED, CompletionStatus.REMOTE_ABORTED, CompletionStatus.REMOTE_OPERATION}


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one posted chain, or of one receive.

    Attributes:
        token: what the poster gave with it.
        qpn: of the queue pair that it was posted to.
        is_receive: a receive ended, by the other side's ``Write`` with an immediate.
        immediate: its 32 bits, for a receive that has them.
        byte_count: bytes that a receive was told of; 0 for a chain.
    """

    token: Hashable
    qpn: int
    status: CompletionStatus
    is_receive: bool = False
    immediate: int | None = None
    byte_count: int = 0
    vendor_error: int = 0

    @property
    def ok(self) -> bool:
        return self.status is CompletionStatus.SUCCESS

    def to_error(self) -> SalternError:
        """The error that this completion stands for; the queue pair is of no more use: close it, then free buffers."""
        text, metadata = f"RDMA transfer ended with: {self.status.words}", {"status": self.status.name}
        if self.status in _REFUSED:
            return InvalidArgumentError(
                f"{text}: the other side's device refused the address, length or key",
                reason="RDMA_REMOTE_ACCESS",
                hint="describe buffers that are registered in this session, then connect again",
                metadata=metadata,
            )
        if self.status in (CompletionStatus.RETRIES_EXCEEDED, CompletionStatus.RESPONSE_TIMEOUT):
            return DeadlineExceededError(
                f"{text}: the other side's device does not answer",
                reason="RDMA_PEER_SILENT",
                hint="the peer is gone, or the path drops large packets: compare GID, routes and MTU of both sides",
                metadata=metadata,
            )
        if self.status is CompletionStatus.RECEIVER_NOT_READY:
            return UnavailableError(
                f"{text}: it had no receive posted",
                reason="RDMA_RECEIVER_NOT_READY",
                hint="connect again",
                metadata=metadata,
            )
        if self.status in _GONE:
            return UnavailableError(
                text, reason="RDMA_QUEUE_PAIR_ENDED", hint="connect again", metadata=metadata, retry_after_ms=0
            )
        return InternalError(text, reason="RDMA_LOCAL_FAULT", hint="report it with this line", metadata=metadata)
