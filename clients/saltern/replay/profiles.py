"""What a model and a machine cost and can do, as data: ``profiles.json`` here, and files of the same form from users.

::

    {"models":   {"mine": {"linearFlopsPerToken": 1.4e10, "attentionFlopsPerPair": 524288, "kvBytesPerToken": 131072,
                           "weightBytes": 1.6e10, "source": "measured by us"}},
     "hardware": {"mine": {"gpus": 1, "flopsPerS": 9.9e14, ...}}}

A name in a user's file takes the place of the same name here.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from saltern.errors import InvalidArgumentError

_GIB: Final = 2**30
#: Where the prices that no file gives come from.
PRICE_SOURCE: Final = (
    "public price lists of 2024. GPU: AWS EC2 Capacity Blocks, United States, until 1 January 2025 (L40S: g6e on "
    "demand); DRAM: r6i.32xlarge on demand / 1024 GiB; SSD: i4i.32xlarge on demand / 27.3 TiB; network: none within a "
    "zone. Prices change: give your own by --profile"
)

#: Of the speed of an SSD that no file gives.
SSD_SOURCE: Final = (
    "Samsung's announcement of the PM9A3 (U.2, PCIe 4.0, May 2020): up to 6,500 MB/s sequential read and 3,500 MB/s "
    "write; one for each node"
)


class _Profile(msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True):
    pass


class ModelProfile(_Profile, frozen=True):
    """A model, by what prefill and its cache cost.

    Attributes:
        linear_flops_per_token: of everything but attention, for one token.
        attention_flops_per_pair: of attention in all layers, for one pair of tokens; a prompt of n has n^2 of them.
        kv_bytes_per_token: keys and values in all layers.
        weight_bytes: read once for every decoded token.
    """

    linear_flops_per_token: float
    attention_flops_per_pair: float
    kv_bytes_per_token: int
    weight_bytes: float = 0.0
    name: str = ""
    source: str = ""


class HardwareProfile(_Profile, frozen=True):
    """One engine's machine, and one cache node's link and prices.

    Attributes:
        gpus: of one engine.
        flops_per_s: peak of one GPU.
        efficiency: share of the peak that prefill reaches.
        memory_bytes_per_s: of one GPU.
        decode_efficiency: share of it that decoding reaches.
        overhead_s: of every prefill, whatever its length.
        link_bytes_per_s: of a cache node, shared by all that it reads and writes.
        ssd_read_bytes_per_s, ssd_write_bytes_per_s: of a cache node's SSD.
        latency_s: of a request to nodes, asked for each prompt once, and once more if blocks are read.
        gpu_usd_per_hour: of one GPU.
        dram_usd_per_gib_hour, ssd_usd_per_gib_hour: of the store's memory.
        node_usd_per_hour: of a cache node beside its memory.
        network_usd_per_gib: of bytes moved.
        operations_usd_per_hour: of people and systems that look after the cache.
    """

    flops_per_s: float
    link_bytes_per_s: float
    gpus: int = 1
    efficiency: float = 0.5
    memory_bytes_per_s: float = 0.0
    decode_efficiency: float = 0.6
    overhead_s: float = 0.0
    ssd_read_bytes_per_s: float = 6.5e9
    ssd_write_bytes_per_s: float = 3.5e9
    latency_s: float = 0.0005
    gpu_usd_per_hour: float = 0.0
    dram_usd_per_gib_hour: float = 0.0079
    ssd_usd_per_gib_hour: float = 0.00039
    node_usd_per_hour: float = 0.0
    network_usd_per_gib: float = 0.0
    operations_usd_per_hour: float = 0.0
    name: str = ""
    source: str = ""

    @property
    def peak_flops_per_s(self) -> float:
        """Of all GPUs of one engine."""
        return self.gpus * self.flops_per_s

    @property
    def dram_usd_per_byte_s(self) -> float:
        return self.dram_usd_per_gib_hour / _GIB / 3600

    @property
    def ssd_usd_per_byte_s(self) -> float:
        return self.ssd_usd_per_gib_hour / _GIB / 3600


class Profiles(_Profile, frozen=True):
    """Profiles by name."""

    models: dict[str, ModelProfile] = {}
    hardware: dict[str, HardwareProfile] = {}

    def over(self, others: Profiles) -> Profiles:
        """Both; of one name these."""
        return Profiles(models=others.models | self.models, hardware=others.hardware | self.hardware)

    def model(self, name: str) -> ModelProfile:
        """Raises InvalidArgumentError (UNKNOWN_PROFILE)."""
        return _named(self.models, name, "model")

    def machine(self, name: str) -> HardwareProfile:
        """Raises InvalidArgumentError (UNKNOWN_PROFILE)."""
        return _named(self.hardware, name, "hardware")


_P = TypeVar("_P", ModelProfile, HardwareProfile)


def builtin_profiles() -> Profiles:
    """Those that come with the program."""
    return _decode(resources.files(__package__).joinpath("profiles.json").read_bytes(), "profiles.json")


def read_profiles(path: Path) -> Profiles:
    """Those of a user's file.

    Raises:
        InvalidArgumentError: reason INVALID_PROFILE: it cannot be read, or a field is unknown or no positive number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read profiles {str(path)!r} ({error.strerror})", reason="INVALID_PROFILE", hint="name a JSON file"
        ) from None
    return _decode(content, str(path))


def _decode(content: bytes, source: str) -> Profiles:
    hint = "docs/replay.md shows the fields of a profile"
    try:
        profiles = msgspec.json.decode(content, type=Profiles)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(f"{source}: {str(error)[:300]}", reason="INVALID_PROFILE", hint=hint) from None
    for kind in (profiles.models, profiles.hardware):
        for name, profile in kind.items():
            _check_numbers(profile, f"{source}: {name}", hint)
    return profiles


def _check_numbers(profile: ModelProfile | HardwareProfile, where: str, hint: str) -> None:
    rates = {"flops_per_s", "link_bytes_per_s", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s"}
    positive = rates | {"linear_flops_per_token", "kv_bytes_per_token", "gpus", "efficiency"}
    for field, value in msgspec.structs.asdict(profile).items():
        if isinstance(value, str):
            continue
        if value < 0 or value == float("inf") or (field in positive and value == 0):
            raise InvalidArgumentError(
                f"{where}: {field} is {value:g}, which it cannot be", reason="INVALID_PROFILE", hint=hint
            )


def _named(profiles: dict[str, _P], name: str, kind: str) -> _P:
    profile = profiles.get(name)
    if profile is None:
        raise InvalidArgumentError(
            f"there is no {kind} profile {name[:64]!r}",
            reason="UNKNOWN_PROFILE",
            hint=f"choose one of: {', '.join(profiles)}; or give one by --profile FILE",
        )
    return msgspec.structs.replace(profile, name=name)
