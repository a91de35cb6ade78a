"""The cache fails in every way and at every moment: the engine never hangs, never crashes, never says a wrong token.

Each test ends with the same four questions: are the tokens those of a run without cache, are all blocks free again, is
nothing of a request left in the scheduler, and were there no more gets than requests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from saltern.chain import Chain
from tests.vllm.deployment import Engines, Store, chains_recorded, drain
from tests.vllm.engine import Engine, Prompt, hit_tokens, prompt, tokens_of
from tests.vllm.stack import CacheNode, Stack, wait_until

pytestmark = pytest.mark.timeout(600)

#: Part of a reply with blocks in it: the load stands still in the middle of an entry.
_SOME_BYTES = 100_000
#: Short, because these tests wait for them; a lookup is given more, so that a busy machine does not miss.
_IMPATIENT = {"transport": "tcp", "lookup_deadline_ms": 2000, "load_deadline_ms": 1500, "save_deadline_ms": 1500}
_ALL, _NONE = [256, 256, 256], [0, 0, 0]

_seeds = itertools.count(10_000)


def new_prompts() -> list[Prompt]:
    """Prompts that nobody has seen yet."""
    return [prompt(260, next(_seeds)) for _ in range(3)]


class Scene:
    """An engine that has stored prompts and has forgotten them itself.

    What it generated for them when nobody knew them, and so without any cache, is what it has to say again.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompts = new_prompts()
        outputs = engine.run(self.prompts)
        assert [hit_tokens(output) for output in outputs] == _NONE
        self.expected = [tokens_of(output) for output in outputs]
        drain(engine)
        engine.forget()

    def serves(self) -> list[int]:
        """Ask all four questions; returns how many tokens of each prompt were found."""
        engine = self.engine
        with gets_counted() as gets:
            outputs = engine.run(self.prompts)
        assert [tokens_of(output) for output in outputs] == self.expected
        engine.settle()
        assert engine.free_blocks == engine.all_blocks
        assert len(gets) <= len(self.prompts)
        return [hit_tokens(output) for output in outputs]

    def serves_without_the_store(self) -> None:
        assert self.serves() == _NONE
        drain(self.engine)
        self.engine.forget()


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


def scene_of(engine: Engine) -> Scene:
    """A scene; waits until the engine uses the node again after the test before, as it does by itself."""

    def is_used() -> bool:
        probe = [prompt(70, next(_seeds))]
        engine.run(probe)
        drain(engine)
        engine.forget()
        return hit_tokens(engine.run(probe)[0]) == 64

    wait_until(is_used, 90, "the engine goes back to the node")
    return Scene(engine)


@pytest.fixture
def scene(engines: Engines, _shared: Store, node: CacheNode) -> Scene:
    """The engine that most tests share."""
    return scene_of(engines.get(_shared, options=_IMPATIENT))


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


def test_all_is_well_before_the_faults(scene: Scene) -> None:
    assert scene.serves() == _ALL


# ---- a node that dies ------------------------------------------------------------------------------------------------


def test_a_dead_node_is_a_miss_and_a_restarted_one_is_used_again(scene: Scene, node: CacheNode) -> None:
    node.kill()
    scene.serves_without_the_store()
    node.start()
    assert scene_of(scene.engine).serves() == _ALL


def _die(node: CacheNode) -> None:
    node.kill()
    node.door.cut()
    node.door.release()


def test_a_node_that_dies_within_a_load(scene: Scene, node: CacheNode) -> None:
    node.door.hold_replies(_SOME_BYTES)
    with meanwhile(node.door.held, lambda: _die(node)):
        scene.serves()
    scene.engine.forget()
    scene.serves_without_the_store()


def _hold_replies_to_puts(node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Chain.put_many

    def put_many(self: Chain, *arguments: object, **options: object) -> object:
        node.door.hold_replies()
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "put_many", put_many)


def test_a_node_that_dies_within_a_save(scene: Scene, node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    _hold_replies_to_puts(node, monkeypatch)
    with meanwhile(node.door.held, lambda: _die(node)):
        scene.engine.run(new_prompts())
        drain(scene.engine)
    scene.engine.forget()
    scene.serves_without_the_store()


# ---- a node that is silent or slow -----------------------------------------------------------------------------------


def test_a_node_that_stands_still(scene: Scene, node: CacheNode) -> None:
    with node.paused():
        scene.serves_without_the_store()


def test_a_node_that_stands_still_within_a_load(scene: Scene, node: CacheNode) -> None:
    node.door.hold_replies(_SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_a_node_that_stands_still_within_a_save(scene: Scene, node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    _hold_replies_to_puts(node, monkeypatch)
    scene.engine.run(new_prompts())
    drain(scene.engine)
    assert node.door.held.is_set(), "no save was under way"
    scene.engine.forget()
    scene.serves()


def test_a_slow_load_does_not_hold_up_other_requests(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(_SOME_BYTES)
    slow = engine.start(scene.prompts[0])
    engine.step_until(node.door.held.is_set)
    quick = engine.start(prompt(20, next(_seeds)))
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
    original = Chain.get_into
    with _shared.client() as client, chains_recorded() as chains:

        def get_into(self: Chain, *arguments: object, **options: object) -> object:
            client.delete({key for hashes in list(chains) for key in client.block_keys(hashes)[2:]})
            return original(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Chain, "get_into", get_into)
        scene.serves()


# ---- requests that end early -----------------------------------------------------------------------------------------


def test_a_request_that_is_aborted_within_its_load_gives_its_blocks_back(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(_SOME_BYTES)
    name = engine.start(scene.prompts[0])
    engine.step_until(node.door.held.is_set)
    engine.abort(name)
    node.door.release()
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    engine.forget()
    assert scene.serves() == _ALL


def test_a_request_that_is_aborted_within_its_load_when_the_node_dies(scene: Scene, node: CacheNode) -> None:
    engine = scene.engine
    node.door.hold_replies(_SOME_BYTES)
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
    assert scene.serves() == _ALL


# ---- trust that ends: engines of their own ---------------------------------------------------------------------------


@pytest.fixture
def own_scene(engines: Engines, store: Store, node: CacheNode) -> Scene:
    """An engine whose tenant nobody else uses."""
    return scene_of(engines.new(store, options=_IMPATIENT))


def test_a_key_that_is_revoked_within_a_load(own_scene: Scene, store: Store, node: CacheNode) -> None:
    node.door.hold_replies(_SOME_BYTES)

    def revoke() -> None:
        store.stack.revoke_key(store.tenant)
        node.door.release()

    with meanwhile(node.door.held, revoke):
        own_scene.serves()
    own_scene.engine.forget()
    own_scene.serves_without_the_store()


def test_a_limit_that_is_lowered_and_a_namespace_that_is_made_anew_while_the_engine_works(
    own_scene: Scene, store: Store
) -> None:
    store.stack.set_limit(store.tenant, 64 * 1024)
    store.stack.admin.wait_for_policy()
    own_scene.serves()
    own_scene.engine.run(new_prompts())
    drain(own_scene.engine)
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
    original = Chain.get_into

    def get_into(self: Chain, *arguments: object, **options: object) -> object:
        node.pause()
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "get_into", get_into)
    try:
        assert scene.serves() == _NONE
    finally:
        node.resume()


def test_a_node_that_stands_still_within_a_synchronous_load(engines: Engines, _shared: Store, node: CacheNode) -> None:
    scene = scene_of(engines.get(_shared, options=_IMPATIENT | {"load": "sync"}))
    node.door.hold_replies(_SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_a_load_that_fails_for_a_model_with_sliding_windows(
    engines: Engines, new_store: Callable[..., Store], node: CacheNode
) -> None:
    store = new_store(block_tokens=5)
    scene = scene_of(engines.get(store, options=_IMPATIENT, model="windows", dtype="bfloat16"))
    node.door.hold_replies(_SOME_BYTES)
    scene.serves()
    assert node.door.held.is_set(), "no load was under way"


def test_without_recomputing_a_request_whose_load_failed_ends_with_an_error(
    engines: Engines, _shared: Store, node: CacheNode
) -> None:
    """vLLM's own default, ``kv_load_failure_policy="fail"``: why the docs say ``recompute``."""
    scene = scene_of(engines.get(_shared, options=_IMPATIENT, policy="fail"))
    engine = scene.engine
    node.door.hold_replies(_SOME_BYTES)
    [output] = engine.run(scene.prompts[:1])
    assert output.outputs[0].finish_reason == "error"
    node.door.release()
    engine.settle()
    assert engine.free_blocks == engine.all_blocks
    assert engine.generate([prompt(20, next(_seeds))])
