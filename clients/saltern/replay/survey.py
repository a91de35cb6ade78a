"""What must be known of a trace before it is served, and what a setup draws by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass

from saltern.errors import SalternError
from saltern.replay.setup import ReplaySetup
from saltern.traces.request import Trace


@dataclass(frozen=True, slots=True)
class Survey:
    """Of a trace.

    Attributes:
        longest_blocks: of the prompt that has most.
    """

    requests: int
    recorded_s: float
    tenants: tuple[str, ...]
    longest_blocks: int


def survey(trace: Trace) -> Survey:
    """Read a trace once; a damaged one up to the damage."""
    requests, first_s, last_s, longest_blocks = 0, 0.0, 0.0, 0
    tenants = dict.fromkeys(trace.tenants)
    try:
        for request in trace:
            first_s = request.arrival_s if not requests else first_s
            last_s = request.arrival_s
            requests += 1
            longest_blocks = max(longest_blocks, len(request.block_ids))
            tenants.setdefault(request.tenant)
    except SalternError:
        pass  # serving finds it again, after what comes before
    return Survey(requests, last_s - first_s, tuple(tenants), longest_blocks)


def loss_after(setup: ReplaySetup, found: Survey) -> int:
    """Requests that have arrived when nodes restart or one is lost."""
    return int(found.requests * setup.loss_at)


def lost_node(setup: ReplaySetup) -> int:
    """Number of the node that is lost, drawn from the seed."""
    return random.Random(setup.seed).randrange(setup.nodes)  # noqa: S311 - which node, not a secret
