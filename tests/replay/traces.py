"""Real traces as the replays take them: requests in order, block ids made dense, one cache key for each block."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from saltern.keys import BlockKey

#: Name: (file, tokens of a block). ``weka_sample`` and ``mt_sample`` are called as in golden_hit_rates.json.
FILES: Final = {
    "mc_conv": ("mooncake/conversation_trace.jsonl.gz", 512),
    "mc_synth": ("mooncake/synthetic_trace.jsonl.gz", 512),
    "mini_swe": ("lmcache_agent/miniswe_hash64.jsonl.gz", 64),
    "magentic": ("lmcache_agent/magagent_hash64.jsonl.gz", 64),
    "tau": ("lmcache_agent/taubench_hash64.jsonl.gz", 64),
    "mt_sample": ("multitenant/four_tenants_15min.jsonl.gz", 512),
}
WEKA_FILE: Final = "weka/claude_code_sessions_159.jsonl.gz"
_WEKA_BLOCK_TOKENS: Final = 64
_WEKA_SESSION_EVERY_S: Final = 60.0
_WEKA_GAP_MAX_S: Final = 600.0


class Request(NamedTuple):
    """A prompt: its length, and its blocks by number, head first."""

    tokens: int
    blocks: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True)
class ReplayTrace:
    """Requests over blocks 0 to ``unique_blocks`` - 1 of ``block_tokens`` each; blocks of two tenants differ."""

    block_tokens: int
    unique_blocks: int
    requests: list[Request]

    def keys(self) -> list[BlockKey]:
        """A key for each block, hashed as real ones are."""
        return [
            BlockKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest())
            for number in range(self.unique_blocks)
        ]


def load(folder: Path, name: str) -> ReplayTrace:
    """Read a trace by its name in FILES, or ``weka_sample``, or ``weka_every_8th`` (blocks of 512 tokens)."""
    if name == "weka_sample":
        return _dense(_WEKA_BLOCK_TOKENS, _weka(folder / WEKA_FILE, 1))
    if name == "weka_every_8th":
        return _dense(8 * _WEKA_BLOCK_TOKENS, _weka(folder / WEKA_FILE, 8))
    file, block_tokens = FILES[name]
    return _dense(block_tokens, _mooncake(folder / file))


def _dense(block_tokens: int, requests: Iterable[tuple[str, int, list[Any]]]) -> ReplayTrace:
    numbers: dict[Any, int] = {}
    made = [
        Request(tokens, tuple(numbers.setdefault(block, len(numbers)) for block in blocks), tenant)
        for tenant, tokens, blocks in requests
    ]
    return ReplayTrace(block_tokens, len(numbers), made)


def _mooncake(path: Path) -> Iterable[tuple[str, int, list[Any]]]:
    """The Mooncake form; prompts shorter than a block are kept  too: they count as misses."""
    with gzip.open(path, "rt") as lines:
        for request in map(json.loads, lines):
            tenant = request.get("tenant", "")
            yield tenant, request["input_length"], [(tenant, block) for block in request["hash_ids"]]


def _weka(path: Path, every: int) -> list[tuple[str, int, list[Any]]]:
    """Coding sessions, merged by the recipe in golden_hit_rates.json; each ``every``-th block of a prompt is kept."""
    merged: list[tuple[float, int, list[Any]]] = []
    with gzip.open(path, "rt") as lines:
        for session, line in enumerate(lines):
            at_s, before_s = _WEKA_SESSION_EVERY_S * session, None
            for t_s, request in sorted(_weka_requests(json.loads(line)), key=lambda timed: timed[0]):
                at_s += 0.0 if before_s is None else min(t_s - before_s, _WEKA_GAP_MAX_S)
                before_s = t_s
                ids = request["hash_ids"][every - 1 :: every]
                merged.append((at_s, request["in"], [(session, block) for block in ids]))
    merged.sort(key=lambda timed: timed[0])
    return [("", tokens, blocks) for _, tokens, blocks in merged]


def _weka_requests(session: dict[str, Any]) -> Iterable[tuple[float, dict[str, Any]]]:
    for request in session["requests"]:
        if request["type"] == "subagent":
            for inner in request["requests"]:
                yield request["t"] + inner["t"], inner
        else:
            yield request["t"], request
