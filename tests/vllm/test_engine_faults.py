"""The cache fails in every way and at every moment: the engine never hangs, never crashes, never says a wrong token.

Each test ends with the same four questions: are the tokens those of a run without cache, are all blocks free again, is
nothing of a request left in the scheduler, and were there no more gets than requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from saltern.chain import Chain
from tests.vllm.deployment import Engines, Store, chains_recorded
from tests.vllm.engine import prompt, tokens_of
from tests.vllm.scenes import (
    ALL,
    NONE,
    SOME_BYTES,
    Scene,
    hold_replies_to_puts,
    meanwhile,
    new_seed,
    scene_of,
)
from tests.vllm.stack import CacheNode, Stack

pytestmark = pytest.mark.timeout(600)

#: Short, because these tests wait for them; a lookup is given more, so that a busy machine does not miss.
_IMPATIENT = {"transport": "tcp", "lookup_deadline_ms": 2000, "load_deadline_ms": 1500, "save_deadline_ms": 1500}


@pytest.fixture
def node(stack: Stack) -> Iterator[CacheNode]:
    """The node, in whatever state the test leaves it; the next one finds it well."""
    yield stack.node
    stack.node.door.delay_s = 0.0
    stack.node.door.release()
    stack.node.restart_if_dead()


@pytest.fixture(scope="module")
def _shared(stack: Stack) -> Store:
    return Store(stack, "faults")


@pytest.fixture
def scene(engines: Engines, _shared: Store, node: CacheNode) -> Scene:
    """The engine that most tests share."""
    return scene_of(engines.get(_shared, options=_IMPATIENT))


def test_all_is_well_before_the_faults(scene: Scene) -> None:
    assert scene.serves() == ALL


# ---- a node that dies ------------------------------------------------------------------------------------------------


def test_a_dead_node_is_a_miss_and_a_restarted_one_is_used_again(scene: Scene, node: CacheNode) -> None:
    node.kill()
    scene.serves_without_the_store()
    node.start()
    assert scene_of(scene.engine).serves() == ALL


def _die(node: CacheNode) -> None:
    node.kill()
    node.door.cut()
    node.door.release()


def test_a_node_that_dies_within_a_load(scene: Scene, node: CacheNode) -> None:
    node.door.hold_replies(SOME_BYTES)
    with meanwhile(node.door.held, lambda: _die(node)):
        scene.serves()
    scene.engine.forget()
    scene.serves_without_the_store()


def test_a_node_that_dies_within_a_save(scene: Scene, node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_replies_to_puts(node, monkeypatch)
    with meanwhile(node.door.held, lambda: _die(node)):
        scene.stores_more()
    scene.engine.forget()
    scene.serves_without_the_store()


# ---- a node that is silent or slow -----------------------------------------------------------------------------------


def test_a_node_that_stands_still(scene: Scene, node: CacheNode) -> None:
    with node.paused():
        scene.serves_without_the_store()


def test_a_node_that_stands_still_within_a_load(scene: Scene, node: CacheNode) -> None:
    node.door.hold_replies(SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_a_node_that_stands_still_within_a_save(scene: Scene, node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_replies_to_puts(node, monkeypatch)
    scene.stores_more()
    # The save has ended by its deadline; on a busy machine the reply that is held back may still be on its way.
    assert node.door.held.wait(60), "no save was under way"
    scene.engine.forget()
    scene.serves()


def test_a_slow_load_does_not_hold_up_other_requests(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(SOME_BYTES)
    slow = engine.start(scene.prompts[0])
    engine.step_until(node.door.held.is_set)
    quick = engine.start(prompt(20, new_seed()))
    engine.finish([quick])
    assert slow not in engine.ended, "the slow one is ahead: nothing was held up"
    node.door.release()
    engine.finish([slow])
    assert tokens_of(engine.ended.pop(slow)) == scene.expected[0]


def test_a_node_that_is_slower_than_its_deadlines_is_a_miss(scene: Scene, node: CacheNode) -> None:
    node.door.delay_s = 2.5
    scene.serves()


# ---- a store that does not have what it said, or takes nothing -------------------------------------------------------


def test_entries_that_go_between_lookup_and_load_are_asked_for_once(
    scene: Scene, _shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that lists what it cannot give: some stores are asked for it hundreds of times in a second."""
    original = Chain.get_each
    with _shared.client() as client, chains_recorded() as chains:

        def get_each(self: Chain, *arguments: object, **options: object) -> object:
            client.delete({key for hashes in list(chains) for key in client.block_keys(hashes)[2:]})
            return original(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Chain, "get_each", get_each)
        scene.serves()


# ---- requests that end early -----------------------------------------------------------------------------------------


def test_a_request_that_is_aborted_within_its_load_gives_its_blocks_back(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(SOME_BYTES)
    name = engine.start(scene.prompts[0])
    engine.step_until(node.door.held.is_set)
    engine.abort(name)
    node.door.release()
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    engine.forget()
    assert scene.serves() == ALL


def test_a_request_that_is_aborted_within_its_load_when_the_node_dies(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(SOME_BYTES)
    name = engine.start(scene.prompts[0])
    engine.step_until(node.door.held.is_set)
    engine.abort(name)
    _die(node)
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    engine.forget()
    scene.serves_without_the_store()


def test_requests_that_are_aborted_before_they_run(scene: Scene) -> None:
    engine = scene.engine
    for each in [engine.start(wanted) for wanted in scene.prompts]:
        engine.abort(each)
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    assert scene.serves() == ALL


# ---- what a tenant has changes: an engine of its own ----------------------------------------------------------------


@pytest.fixture
def own_scene(engines: Engines, store: Store, node: CacheNode) -> Scene:
    """An engine whose tenant nobody else uses."""
    return scene_of(engines.new(store, options=_IMPATIENT))


def test_a_limit_that_is_lowered_and_a_namespace_that_is_made_anew_while_the_engine_works(
    own_scene: Scene, store: Store
) -> None:
    store.stack.set_limit(store.tenant, 64 * 1024)
    store.stack.admin.wait_for_policy()
    own_scene.serves()
    own_scene.stores_more()
    own_scene.engine.forget()
    store.stack.delete_namespace(store.tenant)
    own_scene.serves_without_the_store()
    store.stack.add_namespace(store.tenant, "chat")
    store.stack.admin.wait_for_policy()
    own_scene.serves_without_the_store()


# ---- other ways to load ----------------------------------------------------------------------------------------------


def test_a_node_that_stands_still_within_a_load_over_shared_memory(
    engines: Engines, _shared: Store, node: CacheNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(engines.get(_shared, options=_IMPATIENT | {"transport": "shm"}))
    original = Chain.get_each

    def get_each(self: Chain, *arguments: object, **options: object) -> object:
        node.pause()
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "get_each", get_each)
    try:
        assert scene.serves() == NONE
    finally:
        node.resume()


def test_a_node_that_stands_still_within_a_synchronous_load(engines: Engines, _shared: Store, node: CacheNode) -> None:
    scene = scene_of(engines.get(_shared, options=_IMPATIENT | {"load": "sync"}))
    node.door.hold_replies(SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_a_load_that_fails_for_a_model_with_sliding_windows(
    engines: Engines, new_store: Callable[..., Store], node: CacheNode
) -> None:
    store = new_store(block_tokens=5)
    scene = scene_of(engines.get(store, options=_IMPATIENT, model="windows", dtype="bfloat16"))
    node.door.hold_replies(SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_without_recomputing_a_request_whose_load_failed_ends_with_an_error(
    engines: Engines, _shared: Store, node: CacheNode
) -> None:
    """vLLM's own default, ``kv_load_failure_policy="fail"``: why the docs say ``recompute``."""
    scene = scene_of(engines.get(_shared, options=_IMPATIENT, policy="fail"))
    engine = scene.engine
    node.door.hold_replies(SOME_BYTES)
    [output] = engine.run(scene.prompts[:1])
    assert output.outputs[0].finish_reason == "error"
    node.door.release()
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    assert engine.generate([prompt(20, new_seed())])
