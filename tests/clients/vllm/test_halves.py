"""Bytes that one engine stores are the bytes that another one loads, through a real node; and only those."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from saltern.client import Client
from saltern.vllm.layout import ChainLayout
from saltern.vllm.pages import HostPages
from saltern.vllm.scheduling import SchedulingRules
from saltern.vllm.tenancy import Ticket
from tests.clients.vllm.halves import BLOCK_TOKENS, EngineMemory, Halves, Request, StagedPages, engine
from tests.support.static_node import MIB, StaticNode, static_node, tenant_policy


@pytest.fixture(scope="module")
def node() -> Iterator[StaticNode]:
    with static_node({"acme": tenant_policy(limit_bytes=24 * MIB)}, dram_bytes=32 * MIB) as running:
        yield running


def _request(name: str, blocks: int, *, extra: int = 1, seed: int = 0) -> Request:
    return Request(name, [seed, *range(1, blocks * BLOCK_TOKENS + extra)])


def _compute(halves: Halves, request: Request, block_ids: list[int]) -> None:
    """A prefill of a whole request: every block that it fills is its hash."""
    assert halves.matched(request) == (0, False)
    tables = [block_ids] * len(halves.memory.layers)
    halves.scheduler.allocated(request, tables, 0)
    for group in range(len(tables)):
        for block_hash, block_id in zip(request.block_hashes, block_ids, strict=False):
            halves.memory.fill(group, block_id, bytes([group]) + block_hash)
    halves.step((request, 0, request.num_tokens, tables))
    assert halves.worker.drain(30)


def _serve(halves: Halves, request: Request) -> None:
    halves.scheduler.arrived(request)


@pytest.mark.parametrize("pages", [HostPages, StagedPages])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_one_engine_has_computed_another_one_loads(
    node: StaticNode, transport: str, pages: type[HostPages]
) -> None:
    request = _request("r", 5, seed=ord(transport[0]) + ord(pages.__name__[0]))
    with engine(node, transport=transport) as first:
        _serve(first, request)
        _compute(first, request, [7, 3, 9, 1, 4, 8])
        stored = [first.memory.read(0, block_id) for block_id in [7, 3, 9, 1, 4]]
        assert first.tally.take()["save_blocks"] == 5
    with engine(node, transport=transport, memory=EngineMemory(kind=pages)) as second:
        again = replace(request, request_id="again")
        _serve(second, again)
        assert second.matched(again) == (5 * BLOCK_TOKENS, True)
        second.scheduler.allocated(again, [[11, 12, 13, 14, 15, 16]], 5 * BLOCK_TOKENS)
        second.step()
        assert second.ended() == ({"again"}, set(), set())
        assert [second.memory.read(0, block_id) for block_id in range(11, 16)] == stored
        assert second.worker.take_load_results().done == set(), "an end is reported once"


def test_a_local_hit_is_not_loaded_again(node: StaticNode) -> None:
    request = _request("r", 4, seed=2)
    with engine(node) as halves:
        _serve(halves, request)
        _compute(halves, request, [1, 2, 3, 4, 5])
        again = replace(request, request_id="again")
        _serve(halves, again)
        assert halves.matched(again, 3 * BLOCK_TOKENS) == (BLOCK_TOKENS, True)
        halves.scheduler.allocated(again, [[1, 2, 3, 24, 25]], BLOCK_TOKENS)
        halves.step()
        halves.ended()
        assert halves.memory.read(0, 24) == halves.memory.read(0, 4)
        assert halves.tally.take()["load_blocks"] == 1


def test_other_bindings_are_a_miss(node: StaticNode) -> None:
    request = _request("r", 3, seed=3)
    with engine(node) as halves:
        _serve(halves, request)
        _compute(halves, request, [1, 2, 3, 4])
    with engine(node, binding=b"c" * 31) as other:
        again = replace(request, request_id="again")
        _serve(other, again)
        assert other.matched(again) == (0, False)


def test_groups_of_layers_are_entries_of_their_own_and_blocks_out_of_a_window_are_skipped(node: StaticNode) -> None:
    layout, layers = ChainLayout(BLOCK_TOKENS, groups=2), (2, 3)
    request = _request("r", 4, seed=4)
    with engine(node, layout=layout, memory=EngineMemory(layers=layers)) as first:
        _serve(first, request)
        _compute(first, request, [1, 2, 3, 4, 5])
        stored = [[first.memory.read(group, block_id) for block_id in range(1, 5)] for group in range(2)]
    with engine(node, layout=layout, memory=EngineMemory(layers=layers)) as second:
        again = replace(request, request_id="again")
        _serve(second, again)
        assert second.matched(again) == (4 * BLOCK_TOKENS, True)
        second.scheduler.allocated(again, [[11, 12, 13, 14, 15], [0, 0, 23, 24, 25]], 4 * BLOCK_TOKENS)
        second.step()
        assert second.ended() == ({"again"}, set(), set())
        assert [second.memory.read(0, block_id) for block_id in (11, 12, 13, 14)] == stored[0]
        assert [second.memory.read(1, block_id) for block_id in (23, 24)] == stored[1][2:]
        assert second.tally.take()["load_bytes"] == (4 * 2 + 2 * 3) * 512


def test_a_block_counts_only_when_every_rank_has_stored_its_part(node: StaticNode) -> None:
    layout = ChainLayout(BLOCK_TOKENS, shards=2)
    request = _request("r", 3, seed=5)
    with engine(node, layout=layout, shard=0) as rank_0:
        _serve(rank_0, request)
        _compute(rank_0, request, [1, 2, 3, 4])
        stored = [rank_0.memory.read(0, block_id) for block_id in (1, 2, 3)]
        half = replace(request, request_id="half")
        _serve(rank_0, half)
        assert rank_0.matched(half) == (0, False)
    with engine(node, layout=layout, shard=1) as rank_1:
        _serve(rank_1, request)
        for block_id, content in ((1, b"x"), (2, b"y"), (3, b"z")):
            rank_1.memory.fill(0, block_id, content)
        rank_1.matched(request)
        rank_1.scheduler.allocated(request, [[1, 2, 3, 4]], 0)
        rank_1.step((request, 0, request.num_tokens, [[1, 2, 3, 4]]))
        assert rank_1.worker.drain(30)
    with engine(node, layout=layout, shard=0) as rank_0:
        whole = replace(request, request_id="whole")
        _serve(rank_0, whole)
        assert rank_0.matched(whole) == (3 * BLOCK_TOKENS, True)
        rank_0.scheduler.allocated(whole, [[11, 12, 13, 14]], 3 * BLOCK_TOKENS)
        rank_0.step()
        rank_0.ended()
        assert [rank_0.memory.read(0, block_id) for block_id in (11, 12, 13)] == stored


def test_a_load_larger_than_the_staging_area_goes_in_pieces(node: StaticNode) -> None:
    request = _request("r", 9, seed=6)
    with engine(node) as first:
        _serve(first, request)
        _compute(first, request, list(range(1, 11)))
        stored = [first.memory.read(0, block_id) for block_id in range(1, 10)]
    with engine(node, memory=EngineMemory(kind=StagedPages), load_staging_bytes=4096) as second:  # four slots
        again = replace(request, request_id="again")
        _serve(second, again)
        assert second.matched(again)[0] == 9 * BLOCK_TOKENS
        second.scheduler.allocated(again, [list(range(21, 31))], 9 * BLOCK_TOKENS)
        second.step()
        second.ended()
        assert [second.memory.read(0, block_id) for block_id in range(21, 30)] == stored


def test_a_save_queue_that_is_full_drops_and_counts_and_leaves_no_gap_behind(node: StaticNode) -> None:
    request = _request("r", 6, seed=7)
    with engine(node, save_staging_bytes=4096) as halves:  # four slots
        _serve(halves, request)
        _compute(halves, request, list(range(1, 8)))
        counts = halves.tally.take()
        assert (counts["save_blocks"], counts["save_dropped_blocks"]) == (4, 2)
        request.tokens += range(BLOCK_TOKENS)
        halves.step((request, 6 * BLOCK_TOKENS, BLOCK_TOKENS, [list(range(1, 9))]))
        assert halves.worker.drain(30)
        assert halves.tally.take()["save_dropped_blocks"] == 1, "nothing behind a gap is stored"


def test_blocks_may_be_overwritten_as_soon_as_the_step_is_over(node: StaticNode) -> None:
    request = _request("r", 4, seed=8)
    with engine(node) as halves:
        _serve(halves, request)
        assert halves.matched(request) == (0, False)
        halves.scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
        for block_id in range(1, 5):
            halves.memory.fill(0, block_id, b"mine")
        expected = halves.memory.read(0, 1)
        halves.step((request, 0, request.num_tokens, [[1, 2, 3, 4, 5]]))
        for block_id in range(1, 5):
            halves.memory.fill(0, block_id, b"the next request's")
        assert halves.worker.drain(30)
        again = replace(request, request_id="again")
        _serve(halves, again)
        assert halves.matched(again)[0] == 4 * BLOCK_TOKENS
        halves.scheduler.allocated(again, [[11, 12, 13, 14, 15]], 4 * BLOCK_TOKENS)
        halves.step()
        halves.ended()
        assert [halves.memory.read(0, block_id) for block_id in range(11, 15)] == [expected] * 4


def test_a_load_without_a_client_fails_at_once_and_is_not_asked_for_again(node: StaticNode) -> None:
    request = _request("r", 3, seed=9)
    with engine(node) as halves:
        _serve(halves, request)
        _compute(halves, request, [1, 2, 3, 4])
        again = replace(request, request_id="again")
        _serve(halves, again)
        assert halves.matched(again)[0] == 3 * BLOCK_TOKENS
        halves.scheduler.allocated(again, [[11, 12, 13, 14]], 3 * BLOCK_TOKENS)
        halves.tenancy.only = None
        halves.step()
        assert halves.ended() == ({"again"}, {"again"}, {11, 12, 13})
        lookups = halves.tally.take()["lookup_requests"]
        assert halves.matched(again) == (0, False)
        assert lookups == 2
        assert "lookup_requests" not in halves.tally.take()


def test_what_was_lost_since_the_lookup_is_computed_from_the_first_lost_block_on(node: StaticNode) -> None:
    request = _request("r", 5, seed=10)
    with engine(node) as halves:
        _serve(halves, request)
        _compute(halves, request, [1, 2, 3, 4, 5, 6])
        again = replace(request, request_id="again")
        _serve(halves, again)
        assert halves.matched(again)[0] == 5 * BLOCK_TOKENS
        client = halves.tenancy.only
        assert client is not None
        lost = client.block_keys(halves.layout.hashes(again.block_hashes[3:4], halves.bindings))
        assert client.delete(lost).count == 1
        halves.scheduler.allocated(again, [[11, 12, 13, 14, 15, 16]], 5 * BLOCK_TOKENS)
        halves.step()
        assert halves.ended() == ({"again"}, {"again"}, {14, 15})
        assert halves.memory.read(0, 13) == halves.memory.read(0, 3)
        # Computed after all, and stored again: the chain is whole once more.
        halves.step((again, 3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, [[11, 12, 13, 14, 15, 16]]))
        assert halves.worker.drain(30)
        third = replace(request, request_id="third")
        _serve(halves, third)
        assert halves.matched(third)[0] == 5 * BLOCK_TOKENS


def test_an_entry_of_another_length_is_not_loaded(node: StaticNode) -> None:
    request = _request("r", 2, seed=11)
    with engine(node) as halves:
        _serve(halves, request)
        client = halves.tenancy.only
        assert client is not None
        chain = client.chain(halves.layout.hashes(request.block_hashes, halves.bindings))
        chain.put_many([(0, b"short"), (1, b"x" * 1024)])
        late = replace(request, request_id="late")
        _serve(halves, late)
        assert halves.matched(late)[0] == 2 * BLOCK_TOKENS
        halves.scheduler.allocated(late, [[11, 12, 13]], 2 * BLOCK_TOKENS)
        halves.step()
        assert halves.ended() == ({"late"}, {"late"}, {11, 12})


def test_a_namespace_that_does_not_fit_is_a_miss_and_the_log_says_which_one_would(
    node: StaticNode, caplog: pytest.LogCaptureFixture
) -> None:
    request = _request("r", 3, seed=12)
    memory = EngineMemory(blocks=4, layers=(2 * MIB // 512,))
    with engine(node, memory=memory, load_staging_bytes=4096, save_staging_bytes=4096) as halves:
        _serve(halves, request)
        for name in ("r", "s", "t"):
            assert halves.matched(replace(request, request_id=name)) == (0, False)
    [line] = [record.getMessage() for record in caplog.records if "does not fit" in record.getMessage()]
    assert "saltern namespace create acme NAME" in line
    assert f"--block-bytes {2 * MIB}" in line
    assert "--block-tokens 16" in line


def test_loads_in_the_step_are_over_when_the_forward_pass_begins(node: StaticNode) -> None:
    request = _request("r", 3, seed=13)
    with engine(node) as first:
        _serve(first, request)
        _compute(first, request, [1, 2, 3, 4])
        stored = first.memory.read(0, 2)
    rules = SchedulingRules(load_async=False, lookup_wait_s=30.0)
    with engine(node, rules=rules, load="sync") as second:
        again = replace(request, request_id="again")
        _serve(second, again)
        assert second.matched(again) == (3 * BLOCK_TOKENS, False)
        second.scheduler.allocated(again, [[11, 12, 13, 14]], 3 * BLOCK_TOKENS)
        second.step((again, 3 * BLOCK_TOKENS, 1, [[11, 12, 13, 14]]))
        assert second.memory.read(0, 12) == stored


def test_i10_a_client_that_is_not_trusted_any_more_finds_and_stores_nothing() -> None:
    request = _request("r", 3, seed=14)
    with static_node({"acme": tenant_policy(limit_bytes=MIB)}, dram_bytes=32 * MIB) as alone:
        with engine(alone) as halves:
            alone.apply({})
            _serve(halves, request)
            _compute(halves, request, [1, 2, 3, 4])
            counts = halves.tally.take()
            assert counts["lookup_failed"] == 1
            assert not {"copy_out_seconds", "save_blocks", "save_refused_blocks"} & counts.keys(), counts


def test_i10_a_load_that_waits_too_long_for_a_thread_is_computed(node: StaticNode) -> None:
    request = _request("r", 3, seed=15)
    with engine(node) as first:
        _serve(first, request)
        _compute(first, request, [1, 2, 3, 4])
    with engine(node, load_threads=1, load_deadline_ms=1000.0) as second:
        held, entered = threading.Event(), threading.Event()
        serve, busy, late = (
            second.tenancy.client,
            replace(request, request_id="busy"),
            replace(request, request_id="late"),
        )
        for number, one in enumerate((busy, late)):
            _serve(second, one)
            assert second.matched(one)[0] == 3 * BLOCK_TOKENS
            second.scheduler.allocated(one, [[11 + 4 * number, 12 + 4 * number, 13 + 4 * number]], 3 * BLOCK_TOKENS)

        def slow(ticket: Ticket) -> Client | None:
            entered.set()
            assert held.wait(60)
            return serve(ticket)

        second.tenancy.client = slow  # type: ignore[method-assign]
        second.step()
        assert entered.wait(60)
        threading.Timer(1.1, held.set).start()
        _, failed, invalid = second.ended(2)
        assert failed == {"late"}
        assert invalid == {15, 16, 17}
