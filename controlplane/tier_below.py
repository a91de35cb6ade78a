"""The tier below DRAM of a stack's nodes: what ``saltern up`` was told, as options of ``serve node``.

The node has the last word on each of them (:mod:`dataplane.commands`); what can be known before anything starts is
said here, since a node that ends in the middle of a start says it in its log alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from saltern.endpoints import Endpoint, parse_endpoint
from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.sizes import format_size

ENGINES: Final = ("local", "mooncake")


@dataclass(frozen=True, slots=True)
class TierBelow:
    """What each node keeps below DRAM, and where.

    Attributes:
        capacity_bytes: of each node.
        mooncake_master: of the Mooncake store that keeps it; None for files in the node's folder.
    """

    capacity_bytes: int
    mooncake_master: Endpoint | None = None

    def node_options(self, node_folder: Path) -> dict[str, object]:
        """Options of ``saltern serve node``, by name."""
        if self.mooncake_master is None:
            return {"--ssd-dir": node_folder / "ssd", "--ssd-bytes": self.capacity_bytes}
        return {
            "--engine": "mooncake",
            "--mooncake-master": self.mooncake_master,
            "--ssd-bytes": self.capacity_bytes,
        }

    def __str__(self) -> str:
        where = "SSD" if self.mooncake_master is None else f"in the Mooncake store at {self.mooncake_master}"
        return f"{format_size(self.capacity_bytes)} {where}"


def tier_below(engine: str, capacity_bytes: int | None, mooncake_master: str | None) -> TierBelow | None:
    """The tier that these options ask for; None for none.

    Raises:
        InvalidArgumentError: ENGINE_OPTIONS_INCOMPLETE, or ``mooncake_master`` is no address.
        FailedPreconditionError: MOONCAKE_NOT_INSTALLED.
    """
    if engine != "mooncake":
        if mooncake_master is not None:
            raise InvalidArgumentError(
                f"the engine {engine} has no master",
                reason="ENGINE_OPTIONS_INCOMPLETE",
                hint="give both --engine mooncake and --mooncake-master HOST:PORT, or neither",
            )
        return TierBelow(capacity_bytes) if capacity_bytes else None
    if mooncake_master is None or not capacity_bytes:
        raise InvalidArgumentError(
            "the engine mooncake needs the address of its master and a size",
            reason="ENGINE_OPTIONS_INCOMPLETE",
            hint="give --mooncake-master HOST:PORT, and --ssd for what each node may have in the store",
        )
    master = parse_endpoint(mooncake_master, what="--mooncake-master", port_min=1)
    if importlib.util.find_spec("mooncake") is None:
        raise FailedPreconditionError(
            "--engine mooncake needs Mooncake's client, which is not installed",
            reason="MOONCAKE_NOT_INSTALLED",
            hint="pip install 'saltern-server[mooncake]', and Debian's libibverbs1 libnuma1 liburing2",
        )
    return TierBelow(capacity_bytes, master)
