"""Tokens are renewed ahead of expiry, once for all threads, and a silent control plane is not waited for."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from saltern.client import Client
from saltern.credentials import (
    ApiKeyCredentials,
    EpochSalt,
    Grant,
    NodeEndpoint,
    RenewingCredentials,
    StaticCredentials,
)
from saltern.deadline import Deadline
from saltern.errors import DeadlineExceededError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from saltern.keys import SaltKey
from saltern.names import NamespaceId, TenantId
from saltern.results import Error, Hit, Miss, Refused, Stored
from tests.support.clients import DEADLINE_MS, block, endpoint_of
from tests.support.static_node import StaticNode, static_node

TOKEN = "header.claims.signature"
KEY, DATA = block(1, 100)


def grant_of(token: str = TOKEN, *, lifetime_s: float = 600.0, nodes: tuple[NodeEndpoint, ...] = ()) -> Grant:
    return Grant(
        access_token=token,
        expires_at_s=time.time() + lifetime_s,
        tenant=TenantId("acme"),
        namespace=NamespaceId("chat"),
        nodes=nodes,
        salts=(EpochSalt(1, SaltKey(b"s" * 32)),),
        block_bytes=1 << 20,
    )


class Exchange:
    """A control plane as a function: gives what it is told to, counts, and can be held."""

    def __init__(self, answer: Callable[[int], Grant]) -> None:
        self.answer = answer
        self.calls = 0
        self.open = threading.Event()
        self.open.set()
        self.called = threading.Event()

    def __call__(self, timeout_ms: int) -> Grant:
        self.calls += 1
        self.called.set()
        assert self.open.wait(30)
        return self.answer(self.calls)

    def hold(self) -> None:
        self.open.clear()
        self.called.clear()


def renewing(exchange: Exchange) -> RenewingCredentials:
    return RenewingCredentials(exchange, source="the control plane")


def test_a_fresh_token_is_not_renewed() -> None:
    exchange = Exchange(lambda call: grant_of(f"token-{call}"))
    credentials = renewing(exchange)
    assert {credentials.grant(Deadline(0)).access_token for _ in range(100)} == {"token-1"}
    assert exchange.calls == 1


def test_renewal_ahead_of_expiry_is_single_flight_and_nobody_waits_for_it() -> None:
    exchange = Exchange(lambda call: grant_of(f"token-{call}", lifetime_s=600.0 if call > 1 else 60.0))
    credentials = renewing(exchange)
    credentials._renew_at_s = 0.0  # as if 70% of the lifetime had passed
    exchange.hold()
    for _ in range(50):
        assert credentials.grant(Deadline(0)).access_token == "token-1", "valid: no waiting, whatever the deadline"
    assert exchange.called.wait(30)
    exchange.open.set()
    wait_until(lambda: credentials.grant(Deadline(0)).access_token == "token-2")
    assert exchange.calls == 2


def test_i9_a_valid_token_outlives_the_control_plane() -> None:
    def answer(call: int) -> Grant:
        if call == 1:
            return grant_of()
        raise UnavailableError("down")

    exchange = Exchange(answer)
    credentials = renewing(exchange)
    credentials._renew_at_s = 0.0
    for _ in range(20):
        assert credentials.grant(Deadline(0)).access_token == TOKEN
    wait_until(lambda: exchange.calls >= 2)
    assert credentials.grant(Deadline(0)).access_token == TOKEN


def test_i10_expired_and_control_plane_silent_is_unavailable_within_the_deadline() -> None:
    exchange = Exchange(lambda call: grant_of(lifetime_s=0.0 if call == 1 else 600.0))
    credentials = renewing(exchange)
    exchange.hold()
    with pytest.raises(UnavailableError) as caught:
        credentials.grant(Deadline(50))
    assert caught.value.reason == "CONTROL_PLANE_UNAVAILABLE"
    exchange.open.set()
    assert credentials.grant(Deadline(DEADLINE_MS)).access_token == TOKEN
    assert exchange.calls == 2, "the exchange in flight served the second caller too"


def test_i10_expired_and_control_plane_down_backs_off() -> None:
    def answer(call: int) -> Grant:
        if call == 1:
            return grant_of(lifetime_s=0.0)
        raise DeadlineExceededError("no answer")

    exchange = Exchange(answer)
    credentials = renewing(exchange)
    for _ in range(200):
        with pytest.raises(UnavailableError):
            credentials.grant(Deadline(DEADLINE_MS))
    assert exchange.calls < 20


def test_threads_that_need_a_token_share_one_exchange() -> None:
    exchange = Exchange(lambda call: grant_of(f"token-{call}", lifetime_s=0.0 if call == 1 else 600.0))
    credentials = renewing(exchange)
    exchange.hold()
    tokens: list[str] = []
    threads = [
        threading.Thread(target=lambda: tokens.append(credentials.grant(Deadline(DEADLINE_MS)).access_token))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    assert exchange.called.wait(30)
    exchange.open.set()
    for thread in threads:
        thread.join()
    assert tokens == ["token-2"] * 20
    assert exchange.calls == 2


def test_a_revoked_key_is_an_error_of_trust() -> None:
    def answer(call: int) -> Grant:
        if call == 1:
            return grant_of(lifetime_s=0.0)
        raise UnauthenticatedError("the API key is not valid")

    credentials = renewing(Exchange(answer))
    with pytest.raises(UnauthenticatedError):
        credentials.grant(Deadline(DEADLINE_MS))


def test_the_first_exchange_raises_what_it_meets() -> None:
    def answer(call: int) -> Grant:
        raise PermissionDeniedError("no such namespace")

    with pytest.raises(PermissionDeniedError):
        renewing(Exchange(answer))


def test_a_rejected_token_is_replaced() -> None:
    exchange = Exchange(lambda call: grant_of(f"token-{call}"))
    credentials = renewing(exchange)
    credentials.reject("token-1")
    assert credentials.grant(Deadline(DEADLINE_MS)).access_token == "token-2"
    credentials.reject("token-1")  # late news of the old one
    assert credentials.grant(Deadline(DEADLINE_MS)).access_token == "token-2"


# ---- with a node -------------------------------------------------------------------------------------------------


def test_i10_a_token_that_expires_in_use_is_renewed_without_a_lost_call() -> None:
    with static_node() as node:

        def answer(call: int) -> Grant:
            now_s = int(time.time())
            token = node.token("acme", "chat", expires_at_s=now_s + (2 if call == 1 else 600))
            return replace(grant_of(token, nodes=(endpoint_of(node),)))

        with Client.from_credentials(renewing(Exchange(answer)), deadline_ms=DEADLINE_MS) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            wait_until(lambda: expired(node, client))
            [result] = client.get_many([KEY])
            assert isinstance(result, Hit)
            assert node.session_count() == 1


def expired(node: StaticNode, client: Client) -> bool:
    """Whether the first token is past its expiry (whole seconds), by the clock that the node reads too."""
    return time.time() > client._router.grant.expires_at_s - 600 + 2.5


def test_i10_an_expired_static_token_is_an_error() -> None:
    credentials = StaticCredentials(TOKEN, namespace="chat", nodes=(), expires_at_s=time.time() + 600)
    with Client.from_credentials(credentials, deadline_ms=DEADLINE_MS) as client:
        credentials.replace_token(TOKEN, expires_at_s=time.time() - 1)
        [result] = client.get_many([KEY])
        assert isinstance(result, Error) and isinstance(result.error, UnauthenticatedError)


def test_a_replaced_token_is_shown_to_the_node_on_the_same_session() -> None:
    with static_node() as node:
        credentials = StaticCredentials(node.token("acme", "chat"), namespace="chat", nodes=(endpoint_of(node),))
        with Client.from_credentials(credentials, deadline_ms=DEADLINE_MS) as client:
            assert client.put_many([(KEY, DATA)]) == [Stored()]
            credentials.replace_token(node.token("acme", "chat"))
            assert isinstance(client.get_many([KEY])[0], Hit)
            credentials.replace_token("not.a.token")
            assert isinstance(client.get_many([KEY])[0], Error)
            credentials.replace_token(node.token("acme", "chat"))
            assert isinstance(client.get_many([KEY])[0], Hit)


def test_i10_no_live_node_is_a_miss_and_asks_for_new_endpoints() -> None:
    with static_node() as node:

        def answer(call: int) -> Grant:
            return grant_of(node.token("acme", "chat"), nodes=(endpoint_of(node),) if call > 1 else ())

        exchange = Exchange(answer)
        credentials = renewing(exchange)
        with Client.from_credentials(credentials, deadline_ms=DEADLINE_MS) as client:
            [put] = client.put_many([(KEY, DATA)])
            assert isinstance(put, Refused) and put.error.reason == "NO_LIVE_NODE"
            wait_until(lambda: client.put_many([(KEY, DATA)]) == [Stored()])


# ---- secrets and endpoints ---------------------------------------------------------------------------------------


def test_secrets_are_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-saltern-0123456789abcdef-" + "A" * 43
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(UnavailableError) as caught:
            ApiKeyCredentials(control=closed_endpoint(), api_key=secret, namespace="chat", timeout_ms=2000)
    texts = [repr(caught.value), str(caught.value), caught.value.hint, caplog.text]
    credentials = renewing(Exchange(lambda call: grant_of()))
    texts += [repr(credentials), repr(grant_of()), repr(EpochSalt(1, SaltKey(b"s" * 32)))]
    for text in texts:
        assert secret not in text
        assert TOKEN not in text
        assert "ssss" not in text


def test_the_constructor_says_when_it_cannot_authenticate() -> None:
    with pytest.raises(UnavailableError) as caught:
        Client(control=closed_endpoint(), api_key="sk-saltern-x", namespace="chat")
    assert caught.value.hint


def closed_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        threading.Event().wait(0.01)


def test_a_miss_is_what_an_engine_sees_while_the_control_plane_is_down() -> None:
    def answer(call: int) -> Grant:
        if call == 1:
            return grant_of(lifetime_s=0.0)
        raise UnavailableError("down")

    exchange = Exchange(lambda call: grant_of(lifetime_s=600.0))
    credentials = renewing(exchange)
    client = Client.from_credentials(credentials, deadline_ms=DEADLINE_MS)
    exchange.answer = answer
    credentials.reject(TOKEN)
    exchange.calls = 1
    [result] = client.get_many([KEY])
    assert isinstance(result, Miss) and isinstance(result.cause, UnavailableError)
    client.close()
