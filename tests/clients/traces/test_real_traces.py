"""The published traces: what is in them, and hit rates that others computed."""

from __future__ import annotations

import json
import os
from itertools import islice, pairwise
from pathlib import Path

import pytest

from saltern.traces.hit_rates import Policy, accesses_of, hit_rate, infinite_hit_rate
from saltern.traces.load import load_trace
from saltern.traces.options import LoadOptions
from saltern.traces.request import Identity

pytestmark = pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")
FOLDER = Path(os.environ.get("SALTERN_TRACES", "."))

#: File: requests, prompt tokens, block size, arrival of the last (s).
WHOLE = {
    "mooncake/synthetic_trace.jsonl.gz": (3993, 61_194_628, 512, 1022.025),
    "lmcache_agent/miniswe_hash64.jsonl.gz": (402, 2_418_721, 64, 552.131),
    "lmcache_agent/magagent_hash64.jsonl.gz": (746, 1_475_506, 64, 6448.642),
    "lmcache_agent/taubench_hash64.jsonl.gz": (471, 78_233, 64, 180.918),
    "azure2023/AzureLLMInferenceTrace_code.csv.gz": (8819, 18_059_974, 0, 3435.948),
    "ragpulse/0_trace.jsonl.gz": (7106, 20_917_099, 64, 1_209_403.0),
}


@pytest.mark.parametrize("file", WHOLE)
def test_a_published_trace_is_read_whole(file: str) -> None:
    manifest = {entry["file"]: entry for entry in json.loads((FOLDER / "MANIFEST.json").read_text())}
    trace = load_trace(FOLDER / file)
    assert trace.sha256 == manifest[file]["sha256"]
    requests, tokens, block_tokens, last_s = WHOLE[file]
    lengths, at_s = [], 0.0
    for request in trace:
        lengths.append(request.input_tokens)
        at_s = request.arrival_s
    assert (len(lengths), sum(lengths), trace.block_tokens) == (requests, tokens, block_tokens)
    assert at_s == pytest.approx(last_s, abs=0.001)
    assert (trace.identity is Identity.NONE) == (not block_tokens)


def test_sessions_of_claude_code_begin_as_they_were_published() -> None:
    requests = list(islice(load_trace(FOLDER / "weka/claude_code_sessions_159.jsonl.gz"), 200))
    assert len({request.session for request in requests}) > 1
    assert all(later.arrival_s >= earlier.arrival_s for earlier, later in pairwise(requests))
    assert any(request.think_s is not None for request in requests)
    assert {request.stop for request in requests} & {"tool_use", "end_turn"}
    assert all(-(-request.input_tokens // 64) >= len(request.block_ids) > 0 for request in requests)


def test_servegen_arrivals_follow_a_published_client() -> None:
    path = FOLDER / "servegen/m-large-client-61-trace.csv.gz"
    requests = list(islice(load_trace(path, LoadOptions(seed=1, input_tokens=100)), 500))
    assert len(requests) == 500
    assert all(later.arrival_s >= earlier.arrival_s for earlier, later in pairwise(requests))
    assert {request.input_tokens for request in requests} == {100}


def test_blocks_derived_from_text_are_those_of_its_published_hash_trace() -> None:
    texts = accesses_of(load_trace(FOLDER / "lmcache_agent/taubench_text.jsonl.gz", LoadOptions(sort=True)))
    hashes = accesses_of(load_trace(FOLDER / "lmcache_agent/taubench_hash64.jsonl.gz"))
    assert texts == hashes


@pytest.mark.parametrize("policy", list(Policy))
def test_golden_hit_rates_to_four_digits(policy: Policy) -> None:
    golden = json.loads((FOLDER / "golden_hit_rates.json").read_text())["traces"]["mc_synth"]
    accesses = accesses_of(load_trace(FOLDER / golden["file"]))
    assert round(infinite_hit_rate(accesses), 4) == golden["hit"]
    points = [point for point in golden["points"] if point["policy"] == policy]
    assert len(points) == 5
    for point in points:
        assert round(hit_rate(accesses, policy, point["capacity_blocks"]), 4) == point["hit_rate"], point
