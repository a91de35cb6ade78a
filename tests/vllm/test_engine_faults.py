"""The cache fails in every way and at every moment: the engine never hangs, never crashes, never says a wrong token.

Each test ends with the same four questions: are the tokens those of a run without cache, are all blocks free again, is
nothing of a request left in the scheduler, and were there no more gets than requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from saltern.chain import Chain
from tests.vllm.deployment import Engines, Store, chains_recorded, drain
from tests.vllm.engine import Engine, Prompt, hit_tokens, prompt
from tests.vllm.stack import CacheNode, Stack, wait_until

pytestmark = pytest.mark.timeout(600)

_PROMPTS = [prompt(260, 100 + seed) for seed in range(3)]
#: Part of a reply with blocks in it: the load stands still in the middle of an entry.
_SOME_BYTES = 100_000
#: Short, because these tests wait for them; a lookup is given more, so that a busy machine does not miss.
_IMPATIENT = {
    "transport": "tcp",
    "lookup_deadline_ms": 2000,
    "load_deadline_ms": 1500,
    "save_deadline_ms": 1500,
}


@pytest.fixture(scope="module")
def reference(engines: Engines) -> list[list[int]]:
    """What an engine without any store generates."""
    return engines.get().generate(_PROMPTS)


@pytest.fixture
def node(stack: Stack) -> Iterator[CacheNode]:
    """The node, in whatever state the test leaves it; the next one finds it well."""
    yield stack.node
    stack.node.door.delay_s = 0.0
    stack.node.door.release()
    stack.node.restart_if_dead()


@pytest.fixture
def engine(reference: object, engines: Engines, store: Store, node: CacheNode) -> Engine:
    """An engine that has stored all prompts and has forgotten them itself."""
    fresh = engines.new(store, options=_IMPATIENT)
    fresh.generate(_PROMPTS)
    drain(fresh)
    fresh.forget()
    return fresh


@contextmanager
def gets_counted() -> Iterator[list[int]]:
    """The number of entries of each get that is made in the block, in this process."""
    sizes: list[int] = []
    original = Chain.get_into

    def get_into(self: Chain, positions: list[int], *arguments: object, **options: object) -> object:
        sizes.append(len(positions))
        return original(self, positions, *arguments, **options)  # type: ignore[arg-type]

    Chain.get_into = get_into  # type: ignore[assignment, method-assign]
    try:
        yield sizes
    finally:
        Chain.get_into = original  # type: ignore[method-assign]


@contextmanager
def meanwhile(event: threading.Event, act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread once ``event`` is set; fails if it never is."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert event.wait(60), "the moment for the fault never came"
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(90)
    assert not thread.is_alive()
    assert not errors, errors


def serves(engine: Engine, reference: list[list[int]], prompts: list[Prompt] = _PROMPTS) -> list[int]:
    """Ask all four questions; returns how many tokens of each prompt were found."""
    with gets_counted() as gets:
        outputs = engine.run(prompts)
    assert [list(output.outputs[0].token_ids) for output in outputs] == reference
    engine.settle()
    assert engine.running_requests == 0
    assert engine.free_blocks == engine.all_blocks
    assert len(gets) <= len(prompts)
    return [hit_tokens(output) for output in outputs]


_ALL = [256, 256, 256]
_NONE = [0, 0, 0]


def test_all_is_well_before_the_faults(engine: Engine, reference: list[list[int]]) -> None:
    assert serves(engine, reference) == _ALL


# ---- a node that dies ------------------------------------------------------------------------------------------------


def test_a_dead_node_is_a_miss_and_a_restarted_one_is_used_again(
    engine: Engine, reference: list[list[int]], node: CacheNode
) -> None:
    node.kill()
    assert serves(engine, reference) == _NONE
    node.start()

    def is_used_again() -> bool:
        engine.forget()
        return serves(engine, reference) == _ALL

    wait_until(is_used_again, 60, "the engine goes back to the node")


def test_a_node_that_dies_within_a_load(engine: Engine, reference: list[list[int]], node: CacheNode) -> None:
    node.door.hold_replies(_SOME_BYTES)

    def die() -> None:
        node.kill()
        node.door.cut()
        node.door.release()

    with meanwhile(node.door.held, die):
        serves(engine, reference)
    engine.forget()
    assert serves(engine, reference) == _NONE


def test_a_node_that_dies_within_a_save(
    engines: Engines, store: Store, reference: list[list[int]], node: CacheNode
) -> None:
    fresh = engines.new(store, options=_IMPATIENT)
    node.door.hold_replies(200)

    def die() -> None:
        node.kill()
        node.door.cut()
        node.door.release()

    with meanwhile(node.door.held, die):
        serves(fresh, reference)
        drain(fresh)
    fresh.forget()
    assert serves(fresh, reference) == _NONE


# ---- a node that is silent or slow -----------------------------------------------------------------------------------


def test_a_node_that_stands_still(engine: Engine, reference: list[list[int]], node: CacheNode) -> None:
    with node.paused():
        assert serves(engine, reference) == _NONE
        drain(engine)


def test_a_node_that_stands_still_within_a_load(engine: Engine, reference: list[list[int]], node: CacheNode) -> None:
    node.door.hold_replies(_SOME_BYTES)
    serves(engine, reference)
    assert node.door.held.is_set(), "no load was under way"


def test_a_node_that_stands_still_within_a_load_over_shared_memory(
    engines: Engines, store: Store, reference: list[list[int]], node: CacheNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = engines.new(store, options=_IMPATIENT | {"transport": "shm"})
    fresh.generate(_PROMPTS)
    drain(fresh)
    fresh.forget()
    original = Chain.get_into

    def get_into(self: Chain, *arguments: object, **options: object) -> object:
        node.pause()
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "get_into", get_into)
    try:
        assert serves(fresh, reference) == _NONE
    finally:
        node.resume()


def test_a_node_that_stands_still_within_a_save(
    engines: Engines, store: Store, reference: list[list[int]], node: CacheNode
) -> None:
    fresh = engines.new(store, options=_IMPATIENT)
    node.door.hold_replies(200)
    serves(fresh, reference)
    drain(fresh)
    assert node.door.held.is_set(), "no save was under way"


def test_a_slow_load_does_not_hold_up_other_requests(
    engine: Engine, reference: list[list[int]], node: CacheNode
) -> None:
    node.door.hold_replies(_SOME_BYTES)
    slow = engine.start(_PROMPTS[0])
    engine.step_until(node.door.held.is_set)
    quick = engine.start(prompt(20, 500))
    engine.finish([quick])
    assert slow not in engine.ended, "the slow one is ahead: nothing was held up"
    node.door.release()
    engine.finish([slow])
    assert list(engine.ended.pop(slow).outputs[0].token_ids) == reference[0]


def test_a_slow_node_is_a_miss_where_it_is_slower_than_its_deadline(
    engine: Engine, reference: list[list[int]], node: CacheNode
) -> None:
    node.door.delay_s = 2.5
    serves(engine, reference)


# ---- a store that does not have what it said, or takes nothing -------------------------------------------------------


def test_entries_that_go_between_lookup_and_load_are_asked_for_once(
    engine: Engine, reference: list[list[int]], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that lists what it cannot give: some stores are asked for it hundreds of times in a second."""
    with chains_recorded() as chains:
        engine.generate(_PROMPTS)
    engine.forget()
    original = Chain.get_into
    with store.client() as client:
        keys = {key for hashes in chains for key in client.block_keys(hashes)[2:]}

        def get_into(self: Chain, *arguments: object, **options: object) -> object:
            client.delete(keys)
            return original(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Chain, "get_into", get_into)
        serves(engine, reference)


def test_a_full_store_refuses_and_the_engine_goes_on(
    engines: Engines, new_store: Callable[..., Store], reference: list[list[int]], node: CacheNode
) -> None:
    small = new_store(limit_bytes=64 * 1024)
    fresh = engines.new(small, options=_IMPATIENT)
    for _ in range(2):
        serves(fresh, reference)
        drain(fresh)
        fresh.forget()


# ---- trust that ends -------------------------------------------------------------------------------------------------


def test_a_revoked_key_ends_hits_and_saves_and_nothing_else(
    engine: Engine, reference: list[list[int]], store: Store
) -> None:
    store.stack.revoke_key(store.tenant)
    assert serves(engine, reference) == _NONE
    drain(engine)


def test_a_key_that_is_revoked_within_a_load(
    engine: Engine, reference: list[list[int]], store: Store, node: CacheNode
) -> None:
    node.door.hold_replies(_SOME_BYTES)

    def revoke() -> None:
        store.stack.revoke_key(store.tenant)
        node.door.release()

    with meanwhile(node.door.held, revoke):
        serves(engine, reference)
    engine.forget()
    assert serves(engine, reference) == _NONE


def test_a_namespace_that_is_deleted_and_made_anew_is_empty(
    engine: Engine, reference: list[list[int]], store: Store
) -> None:
    store.stack.delete_namespace(store.tenant)
    assert serves(engine, reference) == _NONE
    store.stack.add_namespace(store.tenant, "chat")
    store.stack.admin.wait_for_policy()
    engine.forget()
    assert serves(engine, reference) == _NONE


def test_a_limit_that_is_lowered_while_the_engine_works(
    engine: Engine, reference: list[list[int]], store: Store
) -> None:
    store.stack.set_limit(store.tenant, 0)
    store.stack.admin.wait_for_policy()
    serves(engine, reference)
    drain(engine)


# ---- requests that end early -----------------------------------------------------------------------------------------


def test_a_request_that_is_aborted_within_its_load_gives_its_blocks_back(
    engine: Engine, reference: list[list[int]], node: CacheNode
) -> None:
    node.door.hold_replies(_SOME_BYTES)
    name = engine.start(_PROMPTS[0])
    engine.step_until(node.door.held.is_set)
    engine.abort(name)
    node.door.release()
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    engine.forget()
    assert serves(engine, reference) == _ALL


def test_a_request_that_is_aborted_within_its_load_when_the_node_dies(
    engine: Engine, reference: list[list[int]], node: CacheNode
) -> None:
    node.door.hold_replies(_SOME_BYTES)
    name = engine.start(_PROMPTS[0])
    engine.step_until(node.door.held.is_set)
    node.kill()
    node.door.cut()
    engine.abort(name)
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    node.door.release()
    assert serves(engine, reference) == _NONE


def test_requests_that_are_aborted_before_they_run(engine: Engine, reference: list[list[int]]) -> None:
    for each in [engine.start(wanted) for wanted in _PROMPTS]:
        engine.abort(each)
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    assert serves(engine, reference) == _ALL


# ---- sync loads and models of several groups -------------------------------------------------------------------------


def test_a_node_that_stands_still_within_a_synchronous_load(
    engines: Engines, store: Store, reference: list[list[int]], node: CacheNode
) -> None:
    fresh = engines.new(store, options=_IMPATIENT | {"load": "sync"})
    fresh.generate(_PROMPTS)
    drain(fresh)
    fresh.forget()
    node.door.hold_replies(_SOME_BYTES)
    serves(fresh, reference)
    assert node.door.held.is_set(), "no load was under way"


def test_a_load_that_fails_for_a_model_with_sliding_windows(
    engines: Engines, new_store: Callable[..., Store], node: CacheNode
) -> None:
    expected = engines.get(model="windows", dtype="bfloat16").generate(_PROMPTS)
    store = new_store(block_tokens=5)
    fresh = engines.new(store, options=_IMPATIENT, model="windows", dtype="bfloat16")
    fresh.generate(_PROMPTS)
    drain(fresh)
    fresh.forget()
    node.door.hold_replies(_SOME_BYTES)
    serves(fresh, expected)
    assert node.door.held.is_set(), "no load was under way"
    node.door.release()
    fresh.forget()
    serves(fresh, expected)


def test_without_recomputing_a_request_whose_load_failed_ends_with_an_error(
    engines: Engines, store: Store, reference: list[list[int]], node: CacheNode
) -> None:
    """vLLM's own default, ``kv_load_failure_policy="fail"``: why the docs say ``recompute``."""
    fresh = engines.new(store, options=_IMPATIENT, policy="fail")
    fresh.generate(_PROMPTS)
    drain(fresh)
    fresh.forget()
    node.door.hold_replies(_SOME_BYTES)
    [output] = fresh.run(_PROMPTS[:1])
    assert output.outputs[0].finish_reason == "error"
    node.door.release()
    fresh.settle()
    assert fresh.free_blocks == fresh.all_blocks
    assert fresh.generate([prompt(20, 501)])
