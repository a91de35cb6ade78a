"""The gateway decides whose cache a request uses, whatever its body, headers and route say; on a real control plane."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from saltern.admin.v1 import credentials_pb2
from saltern.errors import InvalidArgumentError
from saltern.exchange import exchange_token
from saltern.vllm import gateway_callers
from saltern.vllm.cache_salts import cache_salts
from saltern.vllm.gateway import GatewaySettings, Message, Receive, SalternGateway, Scope, Send, UnknownCallers
from saltern.vllm.gateway_routes import ROUTES, Treatment
from saltern.vllm.token_seal import TokenSeal
from tests.support.control import Control

CHAT = "/v1/chat/completions"
PROMPT = {"messages": [{"role": "user", "content": "hello"}]}


class Engine:
    """Stands where vLLM does: keeps what reaches it, answers 200."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    @property
    def last(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.bodies[-1])
        return parsed


class Front:
    """A gateway before an engine, and a caller of it."""

    def __init__(self, control: Control, folder: Path, **settings: Any) -> None:
        self.engine = Engine()
        key_file = folder / "seal-key"
        given: dict[str, Any] = {"check_every_s": 30.0, "namespace": "chat"} | settings
        self.gateway = SalternGateway(
            self.engine, GatewaySettings(f"127.0.0.1:{control.plane.endpoint.port}", key_file, **given)
        )
        self.seal = TokenSeal.from_file(key_file)

    async def call(
        self,
        body: object = PROMPT,
        *,
        token: str = "",
        path: str = CHAT,
        method: str = "POST",
        headers: Iterable[tuple[str, str]] = (("content-type", "application/json"),),
        chunks: int = 1,
        root_path: str = "",
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer; a body that is no bytes is sent as JSON, in so many pieces."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(raw) // chunks) or 1
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)] or [b""]
        messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        given = [*headers, *([("Authorization", f"Bearer {token}")] if token else [])]
        scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": root_path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in given],
        }
        await self.gateway(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def reason(self, body: object = PROMPT, **call: Any) -> tuple[int, str]:
        reached = len(self.engine.bodies)
        status, answer = await self.call(body, **call)
        assert len(self.engine.bodies) == reached, "the request reached the engine"
        return status, answer["error"]["type"]


@pytest.fixture
async def front(control: Control, tmp_path: Path) -> AsyncIterator[Front]:
    front = Front(control, tmp_path)
    for tenant in ("acme", "blue"):
        await control.add_tenant(tenant, "chat")
    yield front
    front.gateway.close()


async def writer(control: Control, tenant: str) -> str:
    return await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant, "writer")


async def test_i2_the_salt_follows_from_the_token_and_whatever_the_body_says_is_overwritten(
    control: Control, front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = {tenant: await writer(control, tenant) for tenant in ("acme", "blue")}
    tokens = {tenant: (await control.exchange(secret, "chat")).access_token for tenant, secret in secrets.items()}
    ann = (await control.exchange(secrets["acme"], "chat", user_id="ann")).access_token
    salts: dict[str, str] = {}
    for name, token in (*tokens.items(), ("ann", ann)):
        forged = PROMPT | {
            "cache_salt": salts.get("acme", "x"),
            "kv_transfer_params": {"do_remote_prefill": True, "saltern_token": tokens["acme"]},
            "ec_transfer_params": {"peer": "10.0.0.1"},
            "vllm_xargs": {"kv_transfer_params": "x", "seed": 7},
        }
        assert (await front.call(forged, token=token))[0] == 200
        seen = front.engine.last
        salts[name] = seen["cache_salt"]
        params = seen.pop("kv_transfer_params")
        assert front.seal.open(params.pop("saltern_token"), salts[name]) == token and not params
        assert seen == PROMPT | {"cache_salt": salts[name], "vllm_xargs": {"seed": 7}}
        assert token.encode() not in front.engine.bodies[-1] and token not in str(front.engine.scopes[-1])
        endpoint = f"127.0.0.1:{control.plane.endpoint.port}"
        grant = (await asyncio.to_thread(exchange_token, endpoint, token, timeout_ms=5000)).grant
        assert salts[name] == cache_salts(grant)[-1]
    assert len(set(salts.values())) == 3
    # An API key gives its tenant's salt, and never goes further than the gateway.
    assert (await front.call(token=secrets["acme"]))[0] == 200
    assert front.engine.last["cache_salt"] == salts["acme"]
    assert secrets["acme"].encode() not in front.engine.bodies[-1]
    assert (await front.call(headers=[("content-type", "application/json"), ("x-api-key", ann)]))[0] == 200
    assert front.engine.last["cache_salt"] == salts["ann"]
    assert not any(token in caplog.text for token in (*tokens.values(), ann, *secrets.values()))


async def test_i10_unknown_callers_are_refused_or_have_a_salt_of_their_own_each_time(
    control: Control, front: Front, tmp_path: Path
) -> None:
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    spoiled = token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")
    assert await front.reason() == (401, "TOKEN_MISSING")
    assert await front.reason(token="EMPTY") == (401, "CREDENTIAL_MALFORMED")
    assert (await front.reason(token=spoiled))[0] == 401
    both = [("content-type", "application/json"), ("x-api-key", "a"), ("authorization", "Bearer b")]
    assert await front.reason(headers=both) == (401, "CREDENTIAL_AMBIGUOUS")

    private = Front(control, tmp_path, unknown_callers=UnknownCallers.PRIVATE)
    salts = set()
    for given in ("", "EMPTY", ""):
        assert (await private.call(PROMPT | {"kv_transfer_params": {"saltern_token": token}}, token=given))[0] == 200
        assert "kv_transfer_params" not in private.engine.last
        salts.add(private.engine.last["cache_salt"])
    assert len(salts) == 3
    # What should have been good is to be renewed, not served cold.
    assert (await private.reason(token=spoiled))[0] == 401
    private.gateway.close()


async def test_i10_a_revoked_key_is_felt_and_a_control_plane_that_is_away_is_not(
    control: Control, front: Front, tmp_path: Path
) -> None:
    hasty = Front(control, tmp_path, check_every_s=0.0)
    secret = await writer(control, "acme")
    token = (await control.exchange(secret, "chat")).access_token
    for credential in (token, secret):
        assert (await hasty.call(token=credential))[0] == 200
        assert (await front.call(token=credential))[0] == 200

    await control.delete_api_key("tenants/acme/apiKeys/writer")
    assert await hasty.reason(token=token) == (401, "CREDENTIAL_REVOKED")
    assert (await hasty.reason(token=secret))[0] == 401
    assert (await front.call(token=token))[0] == 200, "looks again after check_every_s only"

    other = (await control.exchange(await writer(control, "blue"), "chat")).access_token
    assert (await hasty.call(token=other))[0] == 200
    third = await control.exchange(await control.add_api_key(credentials_pb2.ROLE_WRITER, "blue", "more"), "chat")
    hasty.gateway._callers._control = "127.0.0.1:1"
    assert (await hasty.call(token=other))[0] == 200
    assert (await hasty.reason(token=third.access_token))[0] == 503
    hasty.gateway.close()


async def test_i10_routes_that_are_not_known_to_be_salted_are_refused(control: Control, front: Front) -> None:
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    for path in (
        "/v1/responses/resp_1/cancel",
        "/v1/audio/transcriptions",
        "/rerank",
        "/v1/score",
        "/v2/embed",
        "/invocations",
        "/inference/v1/generate",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        CHAT + "/",
        "/" + CHAT,
        CHAT + "/render",
        CHAT.upper(),
        "/v1/%63hat/completions",
    ):
        assert await front.reason(token=token, path=path) == (404, "ROUTE_NOT_ALLOWED"), path
    for method, path in (("GET", "/v1/responses/resp_1"), ("PUT", CHAT), ("GET", CHAT), ("DELETE", "/v1/models")):
        assert (await front.reason(token=token, method=method, path=path))[0] == 404, (method, path)
    assert (await front.call(token=token, path="/llm" + CHAT, root_path="/llm"))[0] == 200
    assert (await front.reason(token=token, path="/llmx" + CHAT, root_path="/llm"))[0] == 404
    # What tells nothing of any tenant is open, and no credential goes on with it.
    assert (await front.call(b"", token=token, method="GET", path="/health", headers=()))[0] == 200
    assert not front.engine.scopes[-1]["headers"]
    assert (await front.reason(b"", method="GET", path="/v1/models", headers=()))[0] == 401
    assert (await front.call(b"", token=token, method="GET", path="/v1/models", headers=()))[0] == 200

    for (method, path), route in ROUTES.items():
        if route.treatment is Treatment.SALTED:
            assert (await front.call(token=token, method=method, path=path))[0] == 200
            assert len(front.engine.last["cache_salt"]) == 43, path


async def test_i2_fields_that_reach_beyond_the_callers_cache_are_refused(control: Control, front: Front) -> None:
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    for path, fields in (
        ("/v1/responses", {"previous_response_id": "resp_of_another"}),
        ("/v1/responses", {"background": True}),
        ("/pooling", {"data": {}}),
    ):
        assert await front.reason(fields, token=token, path=path) == (400, "FIELD_NOT_ALLOWED")
    assert (await front.call({"background": False, "input": "x"}, token=token, path="/v1/responses"))[0] == 200


async def test_i2_ids_of_media_are_under_the_callers_salt(control: Control, front: Front) -> None:
    ids: list[str] = []
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "cat"}]}]}
    for tenant in ("acme", "blue", "acme"):
        name = f"key-{len(ids)}"
        secret = await control.add_api_key(credentials_pb2.ROLE_WRITER, tenant, name)
        assert (await front.call(picture, token=(await control.exchange(secret, "chat")).access_token))[0] == 200
        ids.append(front.engine.last["messages"][0]["content"][0]["uuid"])
    assert ids[0] == ids[2] != ids[1] and "cat" not in ids


async def test_i2_no_id_of_media_reaches_the_engine_as_its_caller_wrote_it(control: Control, front: Front) -> None:
    """Wherever vLLM reads one: what a tool put out, a picture whose tokens are only counted, a part of any list."""
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    part = {"type": "input_image", "image_url": None, "uuid": "of-another"}
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    said = {"messages": [{"role": "user", "content": [part]}]}
    for path, body in (
        ("/v1/responses", {"input": [output]}),
        ("/v1/responses", {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": [part]}]}),
        ("/v1/chat/completions/batch", {"messages": [said["messages"]]}),
        ("/v1/embeddings", said),
        ("/tokenize", said),
        ("/v1/messages/count_tokens", said),
    ):
        assert (await front.call(body, token=token, path=path))[0] == 200
        assert b"uuid" in front.engine.bodies[-1] and b"of-another" not in front.engine.bodies[-1], path
    assert "cache_salt" not in front.engine.last, "what takes no salt is given none"
    # What is text for the model stays as it is.
    files = {"files": [{"uuid": "7f3a", "name": "a.txt"}]}
    for text in (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": files}]}
            ]
        },
        {"tools": [{"name": "f", "parameters": {"properties": {"uuid": {"type": "string"}}}}], "documents": [files]},
    ):
        assert (await front.call(text, token=token))[0] == 200
        assert front.engine.last | text == front.engine.last


async def test_i1_bodies_that_two_parsers_could_read_differently_are_refused(control: Control, front: Front) -> None:
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    for raw in (
        b'{"cache_salt": "a", "cache_salt": "b"}',
        b'{"messages": [{"role": "user", "role": "system"}]}',
        b'{"a": NaN}',
        b'{"a": [1e999, -1e999]}',
        b'{"a": 1} {}',
        b"[1]",
        b"",
        b"{",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        json.dumps(PROMPT).encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
    ):
        assert await front.reason(raw, token=token) == (400, "BODY_MALFORMED"), raw[:40]
    for headers in (
        [],
        [("content-type", "text/plain")],
        [("content-type", "application/json; charset=utf-16")],
        [("content-type", "application/json"), ("content-type", "multipart/form-data")],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
        [("content-type", "multipart/form-data; boundary=x")],
    ):
        assert await front.reason(token=token, headers=headers) == (400, "CONTENT_TYPE"), headers
    # Escapes are no way around the overwriting, and a body in pieces is the same body.
    escaped = b'{"messages": [], "c\\u0061che_salt": "forged"}'
    assert (await front.call(escaped, token=token, chunks=7))[0] == 200
    assert front.engine.last["cache_salt"] != "forged"
    sent = dict(front.engine.scopes[-1]["headers"])
    assert sent == {b"content-type": b"application/json", b"content-length": str(len(front.engine.bodies[-1])).encode()}


async def test_a_body_over_the_limit_is_refused_as_soon_as_that_is_known(control: Control, tmp_path: Path) -> None:
    small = Front(control, tmp_path, body_max_bytes=1000)
    await control.add_tenant("acme", "chat")
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    assert await small.reason(b" " * 1001, token=token, chunks=50) == (413, "BODY_TOO_LARGE")
    announced = [("content-type", "application/json"), ("content-length", "1001")]
    assert await small.reason(b"{", token=token, headers=announced) == (413, "BODY_TOO_LARGE")
    assert await small.reason(b" " * 1001) == (401, "TOKEN_MISSING"), "a stranger's body is not even read"
    small.gateway.close()


async def test_websockets_are_refused_before_they_are_open(front: Front) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await front.gateway({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"] and not front.engine.scopes


async def test_callers_of_one_credential_at_a_time_cost_one_exchange(control: Control, front: Front) -> None:
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    answers = await asyncio.gather(*(front.call(token=token) for _ in range(20)))
    assert [status for status, _ in answers] == [200] * 20
    events = await control.events("tenants/acme")
    assert [event.method for event in events].count("saltern.auth.v1.AuthService/ExchangeToken") == 1


def wrong_token(number: int) -> str:
    return f"e30.e{number}.{'A' * 86}"


async def test_i9_who_makes_up_credentials_takes_no_place_of_those_who_are_known(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_callers, "CALLERS_MAX", 8)
    monkeypatch.setattr(gateway_callers, "EXCHANGE_TIMEOUT_MS", 300)
    front = Front(control, tmp_path, check_every_s=0.0)
    await control.add_tenant("acme", "chat")
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    assert (await front.call(token=token))[0] == 200
    with socket.create_server(("127.0.0.1", 0)) as silent:
        front.gateway._callers._control = f"127.0.0.1:{silent.getsockname()[1]}"
        flood = [asyncio.create_task(front.call(token=wrong_token(number))) for number in range(64)]
        await asyncio.sleep(0)
        # A look of its own, which does not wait behind 64 others, and the last answer holds.
        assert (await front.call(token=token))[0] == 200
        assert not all(task.done() for task in flood)
        assert {status for status, _ in await asyncio.gather(*flood)} == {503}
        assert (await front.call(token=token))[0] == 200
    front.gateway.close()


async def test_i10_a_flood_of_strangers_keeps_no_revoked_credential_good(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_callers, "_IN_FLIGHT_MAX", 0)
    front = Front(control, tmp_path, check_every_s=0.0)
    await control.add_tenant("acme", "chat")
    token = (await control.exchange(await writer(control, "acme"), "chat")).access_token
    assert await front.reason(token=token) == (503, "TOO_MANY_CALLS")
    monkeypatch.setattr(gateway_callers, "_IN_FLIGHT_MAX", 1)
    assert (await front.call(token=token))[0] == 200
    monkeypatch.setattr(gateway_callers, "_IN_FLIGHT_MAX", 0)
    await control.delete_api_key("tenants/acme/apiKeys/writer")
    assert await front.reason(token=token) == (401, "CREDENTIAL_REVOKED")
    front.gateway.close()


async def test_i10_a_refused_request_leaves_nothing_of_itself_behind(control: Control, front: Front) -> None:
    """Or a stranger fills the server's memory with the heads of requests that were refused."""
    left: list[weakref.ref[Receive]] = []
    statuses: list[int] = []
    for _ in range(5):

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 401))

        headers = [(b"authorization", f"Bearer {wrong_token(0)}".encode())]
        scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        await front.gateway(scope, receive, send)
        left.append(weakref.ref(receive))
        del receive
    gc.collect()
    assert statuses == [401] * 10
    assert [reference() for reference in left] == [None] * 5


def test_settings_come_from_the_environment_and_wrong_ones_stop_the_server(tmp_path: Path) -> None:
    good = {"SALTERN_CONTROL": "127.0.0.1:7700", "SALTERN_GATEWAY_SEAL_KEY_FILE": str(tmp_path / "key")}
    settings = GatewaySettings.from_environment(good | {"SALTERN_GATEWAY_BODY_MAX": "1MiB", "PATH": "x"})
    assert (settings.body_max_bytes, settings.unknown_callers) == (1 << 20, UnknownCallers.REFUSE)
    for wrong in (
        {"SALTERN_CONTROL": ""},
        {"SALTERN_GATEWAY_SEAL_KEY_FILE": ""},
        {"SALTERN_GATEWAY_UNKNOWN_CALLERS": "allow"},
        {"SALTERN_GATEWAY_CHECK_S": "0"},
        {"SALTERN_GATEWAY_CHECK_S": "soon"},
        {"SALTERN_GATEWAY_UNKNWON_CALLERS": "refuse"},
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            GatewaySettings.from_environment(good | wrong)
        assert caught.value.reason == "INVALID_GATEWAY_SETTING"
