"""What a reservation promises: the rules that a node can be started with (I5)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Reservations(StrEnum):
    """How much of what a tenant reserved nobody else may take.

    STRICT: all of it. A tenant at or below its reservation loses no entry because of anyone else.
    EARNING: what it takes to serve the tenant at least as well as a cache of its own of that size would
    (:mod:`dataplane.core.earning`); the rest is lent, even while the tenant has it filled. A promise of hits, kept
    statistically, in place of one about entries.
    """

    STRICT = "strict"
    EARNING = "earning"


DEFAULT_RESERVATIONS: Final = Reservations.STRICT
