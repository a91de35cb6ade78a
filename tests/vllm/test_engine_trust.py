"""Trust that ends while an engine works, and while it loads and stores: a token expires, a key is revoked.

Both ways to be trusted: the engine's own key (``tenancy: instance``), and a token that each request brings. Tokens of
this stack live for seconds, and the way to the control plane can be closed, as when that is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saltern.admin_client import read_api_key
from saltern.client import Client
from saltern.deadline import Deadline
from saltern.exchange import exchange_api_key
from saltern.grant import Grant
from saltern.names import NamespaceId
from saltern.vllm.cache_salts import cache_salts
from saltern.vllm.token_seal import TOKEN_FIELD
from tests.vllm.deployment import Engines, Store
from tests.vllm.door import Door
from tests.vllm.engine import Engine
from tests.vllm.scenes import ALL, SOME_BYTES, Scene, hold_replies_to_puts, meanwhile, scene_of
from tests.vllm.stack import CacheNode, Stack, free_port, running_stack, wait_until

pytestmark = pytest.mark.timeout(600)

LIFETIME_S = 12
#: A load or a save stands still for as long as a token lives, and is not given up meanwhile.
_OPTIONS = {"transport": "tcp", "lookup_deadline_ms": 4000, "load_deadline_ms": 40_000, "save_deadline_ms": 40_000}

How = Callable[["Trust"], None]


class Trust:
    """What an engine is trusted by.

    Args:
        mode: ``instance`` or ``request``, as the connector's option ``tenancy``.
    """

    def __init__(self, stack: Stack, tenant: str, mode: str) -> None:
        self.store = Store(stack, tenant)
        self.mode = mode
        self.engine: Engine | None = None
        self._secret = read_api_key(self.store.key_file).reveal()
        host, port = stack.control.rsplit(":", 1)
        self._inside, self._outside = (host, int(port)), ("127.0.0.1", free_port())
        self._door: Door | None = Door(self._inside, self._outside)
        self._grant = self._exchange()
        self._is_kept = False

    def options(self) -> dict[str, Any]:
        """Of the connector: in ``instance`` mode the control plane is behind the door."""
        if self.mode == "instance":
            return _OPTIONS | {"control": f"{self._outside[0]}:{self._outside[1]}"}
        return _OPTIONS | {"tenancy": "request", "plain_tokens": True, "token_check_s": 1}

    def scene(self) -> Scene:
        assert self.engine is not None
        salt = cache_salts(self._grant)[-1] if self.mode == "request" else "s"
        return scene_of(self.engine, salt=salt, transfer_params=self._transfer_params)

    def keep(self) -> None:
        """From here on the token that there is now is the last one."""
        if self.mode == "request":
            self._grant = self._exchange()
        else:
            for client in self._clients():
                client._router._credentials._renew_at_s = 0.0  # type: ignore[attr-defined]
                wait_until(lambda client=client: _left_s(_grant_of(client)) > LIFETIME_S / 2, 30, "a new token")  # type: ignore[misc]
            assert self._door is not None
            self._door.close()
            self._door = None
        self._is_kept = True

    def expire(self) -> None:
        assert self._is_kept
        grants = [self._grant] if self.mode == "request" else [_grant_of(client) for client in self._clients()]
        time.sleep(max(0.0, *map(_left_s, grants)) + 0.1)

    def revoke(self) -> None:
        self.store.stack.revoke_key(self.store.tenant)

    def renew(self) -> None:
        """The control plane is back; requests bring newer tokens."""
        self._is_kept = False
        if self._door is None:
            self._door = Door(self._inside, self._outside)

    def close(self) -> None:
        if self._door is not None:
            self._door.close()

    def _transfer_params(self) -> dict[str, Any] | None:
        if self.mode == "instance":
            return None
        if not self._is_kept and _left_s(self._grant) < LIFETIME_S / 2:
            self._grant = self._exchange()
        return {TOKEN_FIELD: self._grant.access_token}

    def _exchange(self) -> Grant:
        return exchange_api_key(self.store.stack.control, self._secret, NamespaceId("chat"), timeout_ms=10_000)

    def _clients(self) -> list[Client]:
        """The scheduler's and the worker's."""
        assert self.engine is not None
        tenancies = [half._tenancy for half in (self.engine.scheduler_connector, self.engine.worker_connector)]
        return [tenancy.client(tenancy.ticket) for tenancy in tenancies]


def _grant_of(client: Client) -> Grant:
    return client._router._credentials.grant(Deadline(10_000))


def _left_s(grant: Grant) -> float:
    return grant.expires_at_s - time.time()


@pytest.fixture(scope="module")
def short_lived(engines: Engines) -> Iterator[Stack]:
    """A stack of its own, whose tokens live for seconds."""
    with running_stack(environment={"SALTERN_TOKEN_LIFETIME_S": str(LIFETIME_S)}) as stack:
        yield stack
        engines.close()


@pytest.fixture(scope="module")
def _trusts(short_lived: Stack) -> Iterator[dict[str, Trust]]:
    """Of each mode, one whose tokens expire: that ends, and engines go on."""
    made = {mode: Trust(short_lived, f"expiring-{mode}", mode) for mode in ("instance", "request")}
    yield made
    for trust in made.values():
        trust.close()


@pytest.fixture
def node(short_lived: Stack) -> Iterator[CacheNode]:
    yield short_lived.node
    short_lived.node.door.release()


@pytest.fixture(params=["instance", "request"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expiring(mode: str, engines: Engines, _trusts: dict[str, Trust]) -> Trust:
    trust = _trusts[mode]
    trust.engine = engines.get(trust.store, options=trust.options())
    return trust


@pytest.fixture
def revocable(mode: str, engines: Engines, short_lived: Stack, tmp_path: Path) -> Iterator[Trust]:
    trust = Trust(short_lived, f"revoked-{mode}-{abs(hash(tmp_path)):x}"[:40], mode)
    trust.engine = engines.get(trust.store, options=trust.options())
    yield trust
    trust.close()


def test_a_token_that_has_expired_is_a_miss_and_a_newer_one_hits(expiring: Trust) -> None:
    scene = expiring.scene()
    assert scene.serves() == ALL
    scene.engine.forget()
    expiring.keep()
    expiring.expire()
    scene.serves_without_the_store()
    expiring.renew()
    assert expiring.scene().serves() == ALL


def _within_a_load(trust: Trust, node: CacheNode, ends: Callable[[], None]) -> Scene:
    scene = trust.scene()
    trust.keep()
    node.door.hold_replies(SOME_BYTES)

    def end() -> None:
        ends()
        node.door.release()

    with meanwhile(node.door.held, end):
        scene.serves()
    scene.engine.forget()
    scene.serves_without_the_store()
    return scene


def _within_a_save(trust: Trust, node: CacheNode, ends: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = trust.scene()
    trust.keep()
    with monkeypatch.context() as patched:
        hold_replies_to_puts(node, patched)

        def end() -> None:
            patched.undo()
            ends()
            node.door.release()

        with meanwhile(node.door.held, end):
            scene.stores_more()
    scene.engine.forget()
    scene.serves_without_the_store()
    return scene


def test_a_token_that_expires_within_a_load(expiring: Trust, node: CacheNode) -> None:
    _within_a_load(expiring, node, expiring.expire)
    expiring.renew()
    assert expiring.scene().serves() == ALL


def test_a_token_that_expires_within_a_save(expiring: Trust, node: CacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    _within_a_save(expiring, node, expiring.expire, monkeypatch)
    expiring.renew()
    assert expiring.scene().serves() == ALL


def test_a_key_that_is_revoked_within_a_load(revocable: Trust, node: CacheNode) -> None:
    _within_a_load(revocable, node, revocable.revoke)


def test_a_key_that_is_revoked_within_a_save(
    revocable: Trust, node: CacheNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    _within_a_save(revocable, node, revocable.revoke, monkeypatch)
