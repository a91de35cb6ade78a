"""A scene that a fault breaks into: an engine that has stored prompts, and the questions that follow every fault.

Are the tokens those of a run without cache, are all blocks free again, is nothing of a request left in the scheduler,
and were there no more gets than requests?
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from saltern.chain import Chain
from tests.vllm.deployment import drain
from tests.vllm.engine import Engine, Prompt, hit_tokens, prompt, tokens_of
from tests.vllm.stack import CacheNode, wait_until

#: Part of a reply with blocks in it: the load stands still in the middle of an entry.
SOME_BYTES = 100_000
ALL, NONE = [256, 256, 256], [0, 0, 0]

_seeds = itertools.count(10_000)


def new_seed() -> int:
    """Of a prompt that nobody has seen yet."""
    return next(_seeds)


def new_prompts(salt: str = "s") -> list[Prompt]:
    """Prompts that nobody has seen yet."""
    return [prompt(260, new_seed(), salt=salt) for _ in range(3)]


class Scene:
    """An engine that has stored prompts and has forgotten them itself.

    What it generated for them when nobody knew them, and so without any cache, is what it has to say again.

    Args:
        salt: ``cache_salt`` of all requests.
        transfer_params: gives each request's ``kv_transfer_params``, or None for none.
    """

    def __init__(
        self, engine: Engine, *, salt: str = "s", transfer_params: Callable[[], Mapping[str, Any] | None] = lambda: None
    ) -> None:
        self.engine = engine
        self.salt = salt
        self.transfer_params = transfer_params
        self.prompts = new_prompts(salt)
        outputs = engine.run(self.prompts, kv_transfer_params=transfer_params())
        assert [hit_tokens(output) for output in outputs] == NONE
        self.expected = [tokens_of(output) for output in outputs]
        drain(engine)
        engine.forget()

    def serves(self) -> list[int]:
        """Ask all four questions; returns how many tokens of each prompt were found."""
        engine = self.engine
        with gets_counted() as gets:
            outputs = engine.run(self.prompts, kv_transfer_params=self.transfer_params())
        assert [tokens_of(output) for output in outputs] == self.expected
        engine.settle()
        assert engine.free_blocks == engine.all_blocks
        assert len(gets) <= len(self.prompts)
        return [hit_tokens(output) for output in outputs]

    def serves_without_the_store(self) -> None:
        assert self.serves() == NONE
        drain(self.engine)
        self.engine.forget()

    def stores_more(self) -> None:
        """Compute prompts that are new and wait until they are stored or refused."""
        self.engine.run(new_prompts(self.salt), kv_transfer_params=self.transfer_params())
        drain(self.engine)


def scene_of(engine: Engine, **scene: Any) -> Scene:
    """A scene; waits until the engine uses the node again after the test before, as it does by itself."""
    salt, params = scene.get("salt", "s"), scene.get("transfer_params", lambda: None)

    def is_used() -> bool:
        probe = [prompt(70, new_seed(), salt=salt)]
        engine.run(probe, kv_transfer_params=params())
        drain(engine)
        engine.forget()
        return hit_tokens(engine.run(probe, kv_transfer_params=params())[0]) == 64

    wait_until(is_used, 90, "the engine goes back to the node")
    return Scene(engine, **scene)


@contextmanager
def gets_counted() -> Iterator[list[int]]:
    """The number of entries of each get that is made in the block, in this process."""
    sizes: list[int] = []
    original = Chain.get_each

    def get_each(self: Chain, positions: Collection[int], *arguments: object, **options: object) -> object:
        sizes.append(len(positions))
        return original(self, positions, *arguments, **options)  # type: ignore[arg-type]

    Chain.get_each = get_each  # type: ignore[assignment, method-assign]
    try:
        yield sizes
    finally:
        Chain.get_each = original  # type: ignore[method-assign]


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


def hold_replies_to_puts(node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next put on the node's replies stand still, until :meth:`Door.release`."""
    original = Chain.put_many
    first = threading.Lock()

    def put_many(self: Chain, *arguments: object, **options: object) -> object:
        if first.acquire(blocking=False):  # again, and the door would forget that a reply stands still already
            node.door.hold_replies()
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Chain, "put_many", put_many)
