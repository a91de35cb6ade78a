"""Memory of a client as it described it, and batches over it cut into chains: pure arithmetic, no I/O.

Nothing here protects the client's memory: its own device does, which knows what was really registered. What is checked
is that a request stays inside the region that the same session has registered, in integers that cannot wrap (I3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.keys import BlockKey
from saltern.wire import REGION_MAX_BYTES

_ADDRESSES: Final = 2**64
_KEYS: Final = 2**32


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """``size_bytes`` at ``address`` of the client's process, by the key of its registration.

    Raises:
        InvalidArgumentError: REGION_OUT_OF_RANGE: no such memory can be: it is empty, above 64 GiB, ends past 2^64, or
            its key does not fit 32 bits.
    """

    address: int
    size_bytes: int
    remote_key: int

    def __post_init__(self) -> None:
        if (
            not 1 <= self.size_bytes <= REGION_MAX_BYTES
            or not 0 <= self.address <= _ADDRESSES - self.size_bytes
            or not 0 <= self.remote_key < _KEYS
        ):
            raise InvalidArgumentError(
                f"no region of {self.size_bytes} bytes can be at this address under this key",
                reason="REGION_OUT_OF_RANGE",
                hint="send address, length and key of a registered buffer of 1 byte to 64 GiB",
            )

    def check(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise InvalidArgumentError (OUT_OF_REGION) unless every entry lies inside the region."""
        check_inside(self.size_bytes, offsets, sizes)

    def close(self) -> None:
        """The registration is the client's; there is nothing to give back."""


def check_inside(region_bytes: int, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise InvalidArgumentError (OUT_OF_REGION) unless every entry lies inside ``region_bytes``."""
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if offset < 0 or offset + size > region_bytes:
            raise InvalidArgumentError(
                f"entry {index} reaches byte {offset + size} of a region of {region_bytes}",
                reason="OUT_OF_REGION",
                hint="register a larger region or correct the offsets",
            )


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """How much one chain may be.

    Attributes:
        requests_max: work requests; the queue of a session holds as many.
        bytes_max: bytes of entries; an entry that is longer is a chain of its own.
        message_bytes: what one work request carries.
    """

    requests_max: int
    bytes_max: int
    message_bytes: int

    def requests_of(self, size_bytes: int) -> int:
        """Work requests that an entry takes."""
        return -(-size_bytes // self.message_bytes)


def plan_chains(limits: ChainLimits, sizes: Sequence[int], keys: Sequence[BlockKey] = ()) -> Iterator[slice]:
    """Cut a batch into consecutive chains, each of one entry at least.

    Args:
        keys: where given, a chain has no key twice: the second of two is judged after the first was published, as it
            is where entries come one by one.
    """
    start = requests = size_bytes = 0
    seen: set[BlockKey] = set()
    for index, size in enumerate(sizes):
        more = limits.requests_of(size)
        is_full = requests + more > limits.requests_max or size_bytes + size > limits.bytes_max
        if index > start and (is_full or (keys and keys[index] in seen)):
            yield slice(start, index)
            start, requests, size_bytes = index, 0, 0
            seen.clear()
        requests += more
        size_bytes += size
        if keys:
            seen.add(keys[index])
    if sizes:
        yield slice(start, len(sizes))
