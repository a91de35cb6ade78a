"""Composition keeps order, counts and prefix relations; it is recorded, and it is the same every time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError
from saltern.traces import compose
from saltern.traces.compositions import build, composition_from, read_composition
from saltern.traces.load import load_trace
from saltern.traces.request import Arrival, Identity, Provenance, Trace, TraceRequest, block_ids
from saltern.traces.write import write_trace

#: Prompts as lists of token values: two prompts share what their lists begin with.
prompts = st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=1, max_size=12)
times = st.floats(0, 1e6, allow_nan=False)


def trace_of(requests: list[TraceRequest], block_tokens: int = 4, identity: Identity = Identity.RECORDED) -> Trace:
    return Trace(
        name="made",
        provenance=Provenance(source="made", format="generated", sha256="0" * 64),
        block_tokens=block_tokens,
        arrival=Arrival.ABSOLUTE,
        identity=identity,
        opener=lambda: iter(requests),
    )


def hashed(tokens: list[list[int]], block_tokens: int) -> list[TraceRequest]:
    """Requests whose ids are true prefix identities of the prompts."""
    ids: dict[tuple[int, ...], int] = {}

    def ids_of(prompt: list[int]) -> list[int]:
        ends = range(block_tokens, len(prompt) + block_tokens, block_tokens)
        return [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in ends]

    return [
        TraceRequest(arrival_s=float(n), input_tokens=len(prompt), block_ids=block_ids(ids_of(prompt)))
        for n, prompt in enumerate(tokens)
    ]


def shared(a: TraceRequest, b: TraceRequest) -> int:
    """Blocks that two requests begin with together."""
    both = zip(a.block_ids, b.block_ids, strict=False)
    return next((n for n, (x, y) in enumerate(both) if x != y), min(len(a.block_ids), len(b.block_ids)))


@settings(deadline=None)
@given(tokens=prompts, block_tokens=st.integers(1, 4), times_larger=st.integers(1, 5))
def test_reblocking_to_a_multiple_is_exact(tokens: list[list[int]], block_tokens: int, times_larger: int) -> None:
    larger = block_tokens * times_larger
    made = list(compose.reblock(trace_of(hashed(tokens, block_tokens), block_tokens), larger))
    true = hashed(tokens, larger)
    for (a, true_a), (b, true_b) in combinations(zip(made, true, strict=True), 2):
        assert len(a.block_ids) == len(true_a.block_ids)
        assert shared(a, b) == shared(true_a, true_b)


@settings(deadline=None)
@given(tokens=prompts, block_tokens=st.integers(1, 8), new_tokens=st.integers(1, 12))
def test_reblocking_never_invents_sharing_and_keeps_what_was_shared(
    tokens: list[list[int]], block_tokens: int, new_tokens: int
) -> None:
    old = hashed(tokens, block_tokens)
    made = list(compose.reblock(trace_of(old, block_tokens), new_tokens))
    true = hashed(tokens, new_tokens)
    assert all(len(set(request.block_ids)) == len(request.block_ids) for request in made), "blocks of a prompt differ"
    for a, b in combinations(range(len(made)), 2):
        assert len(made[a].block_ids) == len(true[a].block_ids)
        kept_tokens = min(shared(old[a], old[b]) * block_tokens, len(tokens[a]), len(tokens[b]))
        assert kept_tokens // new_tokens <= shared(made[a], made[b]) <= shared(true[a], true[b])
        assert not set(made[a].block_ids[shared(made[a], made[b]) :]) & set(
            made[b].block_ids[shared(made[a], made[b]) :]
        ), "once apart, prompts stay apart"


@settings(deadline=None)
@given(parts=st.lists(st.lists(times, max_size=20), min_size=1, max_size=4))
def test_interleaving_keeps_order_counts_and_tenants(parts: list[list[float]]) -> None:
    traces = {
        f"t{n}": trace_of([TraceRequest(arrival_s=at, input_tokens=n) for at in sorted(part)])
        for n, part in enumerate(parts)
    }
    whole = compose.interleave(traces)
    requests = list(whole)
    assert requests == list(whole)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(requests))
    for n, part in enumerate(parts):
        assert [r.arrival_s for r in requests if r.tenant == f"t{n}"] == sorted(part)


@settings(deadline=None)
@given(
    at=st.lists(times, min_size=1, max_size=30).map(sorted),
    factor=st.floats(0.01, 100),
    every_s=st.floats(1, 1000),
    part=st.floats(0.01, 1),
)
def test_changes_of_time_keep_order_and_counts(at: list[float], factor: float, every_s: float, part: float) -> None:
    trace = trace_of([TraceRequest(arrival_s=moment, input_tokens=1) for moment in at])
    for changed in (
        compose.scale_time(trace, factor),
        compose.shift(trace, factor),
        compose.burst(trace, every_s=every_s, length_s=every_s * part),
    ):
        made = [request.arrival_s for request in changed]
        assert len(made) == len(at)
        assert all(a <= b for a, b in pairwise(made))
        assert len(changed.provenance.steps) == 1


@settings(deadline=None)
@given(at=st.lists(times, min_size=1, max_size=30).map(sorted), cut=times)
def test_two_halves_of_a_trace_are_all_of_it(at: list[float], cut: float) -> None:
    trace = trace_of([TraceRequest(arrival_s=moment, input_tokens=1) for moment in at])
    before = list(compose.clip(trace, end_s=cut)) if cut else []
    after = list(compose.clip(trace, start_s=cut))
    assert len(before) + len(after) == len(at)
    assert all(request.arrival_s >= 0 for request in after)


def test_clipping_starts_sessions_whose_beginning_is_cut_off() -> None:
    requests = [TraceRequest(arrival_s=at, input_tokens=1, session="s", think_s=at or None) for at in (0.0, 4.0, 9.0)]
    assert [r.think_s for r in compose.clip(trace_of(requests), start_s=2, requests=2)] == [None, 9.0]


def test_think_times_are_scaled_and_capped_and_the_cap_is_said() -> None:
    requests = [TraceRequest(arrival_s=0, input_tokens=1, think_s=think) for think in (None, 1.0, 100.0)]
    limited = compose.limit_think(trace_of(requests), scale=2, cap_s=60)
    assert [r.think_s for r in limited] == [None, 2.0, 60.0]
    assert limited.notes == ("think times scaled by 2, capped at 60 s",)


def test_a_scan_asks_for_nothing_twice_and_invented_ids_are_labelled() -> None:
    scan = compose.scan(rate_per_s=5, duration_s=20, input_tokens=1000, block_tokens=512, seed=1)
    ids = [block for request in scan for block in request.block_ids]
    assert len(ids) == len(set(ids)) > 100
    lengths = trace_of([TraceRequest(arrival_s=n, input_tokens=100) for n in range(50)], 0, Identity.NONE)
    made = compose.synthesise_ids(lengths, block_tokens=16, shared_tokens=40, groups=3, seed=2)
    assert {len(request.block_ids) for request in made} == {7}
    assert len({request.block_ids[:2].tobytes() for request in made}) == 3
    assert len({block for request in made for block in request.block_ids[2:]}) == 50 * 5
    assert made.identity is Identity.SYNTHESISED
    assert "SYNTHESISED" in made.identity_note
    assert made.provenance.seed == 2


def test_what_cannot_be_composed_is_refused() -> None:
    plain, lengths = trace_of([]), trace_of([], 0, Identity.NONE)
    large = trace_of([TraceRequest(arrival_s=0, input_tokens=8, block_ids=block_ids([2**62, 5]))])
    for refused in (
        lambda: compose.interleave({}),
        lambda: compose.interleave({"a": plain, "b": trace_of([], 8)}),
        lambda: compose.interleave({"a": plain, "b": lengths}),
        lambda: compose.interleave({"a": plain, "a-b": plain}),
        lambda: compose.reblock(lengths, 8),
        lambda: list(compose.reblock(large, 1)),
        lambda: compose.synthesise_ids(plain, block_tokens=4, shared_tokens=4),
        lambda: compose.shift(plain, -1.0),
        lambda: compose.scale_time(plain, float("nan")),
        lambda: compose.scale_time(plain, 0.0),
        lambda: compose.clip(plain, start_s=2, end_s=1),
        lambda: compose.burst(plain, every_s=1, length_s=2),
        lambda: compose.scan(rate_per_s=1, duration_s=float("inf"), input_tokens=1, block_tokens=1),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            refused()
        assert caught.value.reason == "INVALID_COMPOSITION"
        assert caught.value.hint


MIX = """
seed: 7
block_tokens: 128
clip: {end_s: 50}
tenants:
  chat: {trace: chat.jsonl, clip: {start_s: 1}, scale_time: 0.5, shift_s: 2}
  code: {trace: azure.csv, synthesise: {shared_tokens: 256}}
  scan: {scan: {rate_per_s: 1, duration_s: 90, input_tokens: 300}}
"""


def mix(folder: Path) -> Path:
    rows = [{"timestamp": 1000 * n, "input_length": 200, "hash_ids": [1, 2, 3, n + 4]} for n in range(9)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    (folder / "mix.yaml").write_text(MIX)
    return folder / "mix.yaml"


def test_a_composition_from_yaml_is_the_same_wherever_its_files_lie(tmp_path: Path) -> None:
    wholes = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        path = mix(tmp_path / name)
        wholes.append(build(read_composition(path), path.parent))
    here, there = wholes
    assert list(here) == list(there)
    assert here.sha256 == there.sha256
    assert here.tenants == ("chat", "code", "scan")
    assert [r.arrival_s for r in here if r.tenant == "chat"] == [2 + n / 2 for n in range(8)]
    assert {len(r.block_ids) for r in here if r.tenant == "chat"} == {2}, "200 tokens in blocks of 128"
    assert max(r.arrival_s for r in here) < 50
    assert here.identity is Identity.SYNTHESISED


def test_another_seed_is_another_trace(tmp_path: Path) -> None:
    fields = {"tenants": {"scan": {"scan": {"rate_per_s": "1", "duration_s": 9, "input_tokens": 300}}}}
    one, two = (build(composition_from({**fields, "seed": seed}, "x"), tmp_path) for seed in (1, 2))
    assert one.sha256 != two.sha256
    assert list(one) != list(two)


def test_a_written_trace_is_whole_keeps_its_labels_and_is_the_same_bytes_again(tmp_path: Path) -> None:
    whole = build(read_composition(mix(tmp_path)), tmp_path)
    first, second = write_trace(whole, tmp_path / "a.jsonl.gz"), write_trace(whole, tmp_path / "b.jsonl.gz")
    assert first.sha256 == second.sha256
    again = load_trace(tmp_path / "a.jsonl.gz")
    assert [(r.tenant, r.input_tokens, r.block_ids) for r in again] == [
        (r.tenant, r.input_tokens, r.block_ids) for r in whole
    ]
    assert (again.identity, again.identity_note, again.block_tokens) == (whole.identity, whole.identity_note, 128)
    with pytest.raises(InvalidArgumentError):
        write_trace(replace(trace_of([]), opener=_broken), tmp_path / "c.jsonl")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("c.jsonl")], "whole or not at all"


def _broken() -> Iterator[TraceRequest]:
    yield TraceRequest(arrival_s=0, input_tokens=1)
    raise InvalidArgumentError("damaged")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tenants": {"a": {}}}, "a trace or a scan"),
        ({"tenants": {}}, "compose no traces"),
        ({"tenants": {"a": {"speed": 2}}}, "unknown field"),
        ({"tenants": {"a": {"shift_s": "soon"}}}, "shift_s"),
        ({"tenants": {"A b": {"trace": "x"}}}, "A b"),
    ],
)
def test_a_composition_that_makes_no_sense_is_refused(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        build(composition_from(fields, "mix.yaml"), tmp_path)
