"""Generated agent traffic: coding agents that come back after every tool call with almost their whole context.

Each tenant has one system prompt (instructions and tool descriptions) that starts every session of it. A session is a
task followed by turns: the model answers, a tool runs, and the next request holds the whole context so far plus the
answer and the tool's output. So a block, once full, is asked for again in every later turn, while the last block,
which is partial, is new each time. Lengths and think times are log-normal: many short tool results, few long ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from saltern.errors import InvalidArgumentError
from saltern.traces.mooncake import BLOCK_TOKENS, TraceRequest

_REQUESTS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Shape of the generated sessions; medians of log-normal distributions unless they say otherwise.

    Attributes:
        system_blocks: blocks of the system prompt that all sessions of a tenant share (exact).
        task_tokens, answer_tokens, tool_tokens: what the first turn and every further one add.
        think_ms: time from one request of a session to the next: model, tool and user.
        turns_mean: mean number of requests in one session (geometric).
        context_max_tokens: a session ends before it would pass this (exact).
        sessions_active: sessions of one tenant that run at the same time (exact).
        spread: sigma of the log-normal distributions.
    """

    system_blocks: int = 8
    task_tokens: int = 1200
    answer_tokens: int = 180
    tool_tokens: int = 700
    think_ms: int = 9000
    turns_mean: int = 12
    context_max_tokens: int = 40_000
    sessions_active: int = 4
    spread: float = 0.8


@dataclass(slots=True)
class _Session:
    tenant: str
    block_ids: list[int]  # of full blocks
    context_tokens: int
    answer_tokens: int


def generate_agent_requests(
    *,
    seed: int,
    tenants: Sequence[str],
    requests: int,
    workload: AgentWorkload | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[TraceRequest, ...]:
    """Generate ``requests`` requests in order of time; the same arguments give the same requests on every machine.

    Raises:
        InvalidArgumentError: no tenant, or a number of requests outside 1..1,000,000.
    """
    if not tenants or not 1 <= requests <= _REQUESTS_MAX:
        raise InvalidArgumentError(
            f"cannot generate {requests} requests of {len(tenants)} tenants",
            reason="INVALID_WORKLOAD",
            hint=f"ask for 1 to {_REQUESTS_MAX} requests of at least one tenant",
        )
    shape = workload or AgentWorkload()
    chance = random.Random(seed)  # noqa: S311 - traffic, not a secret
    fresh_ids = count()
    system_prompts = {tenant: [next(fresh_ids) for _ in range(shape.system_blocks)] for tenant in tenants}

    def sample(median: int) -> int:
        return max(1, round(chance.lognormvariate(0.0, shape.spread) * median))

    def start(tenant: str) -> _Session:
        system = system_prompts[tenant]
        task_tokens = min(sample(shape.task_tokens), shape.context_max_tokens)
        return _Session(tenant, list(system), len(system) * block_tokens + task_tokens, sample(shape.answer_tokens))

    order = count()  # ties in time are broken by age, never by comparing sessions
    due = [
        (sample(shape.think_ms), next(order), start(tenant)) for tenant in tenants for _ in range(shape.sessions_active)
    ]
    heapq.heapify(due)
    made: list[TraceRequest] = []
    while len(made) < requests:
        now_ms, _, session = heapq.heappop(due)
        made.append(_request(session, now_ms, fresh_ids, block_tokens))
        grown_tokens = session.context_tokens + session.answer_tokens + sample(shape.tool_tokens)
        if grown_tokens > shape.context_max_tokens or chance.random() < 1 / shape.turns_mean:
            session = start(session.tenant)
        else:
            session.context_tokens, session.answer_tokens = grown_tokens, sample(shape.answer_tokens)
        heapq.heappush(due, (now_ms + sample(shape.think_ms), next(order), session))
    return tuple(made)


def _request(session: _Session, now_ms: int, fresh_ids: count[int], block_tokens: int) -> TraceRequest:
    """The session's next request: full blocks keep their ids, a partial last one gets a fresh one."""
    full_blocks, partial_tokens = divmod(session.context_tokens, block_tokens)
    while len(session.block_ids) < full_blocks:
        session.block_ids.append(next(fresh_ids))
    tail = [next(fresh_ids)] if partial_tokens else []
    return TraceRequest(
        timestamp_ms=now_ms,
        input_tokens=session.context_tokens,
        output_tokens=session.answer_tokens,
        block_ids=(*session.block_ids, *tail),
        tenant=session.tenant,
    )
