"""Logging in, what a session is bound to, and everything that ends it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from controlplane.auth.vouching import Voucher
from controlplane.console.attempts import FAILURES_MAX, REFILL_S, Attempts, source_of
from controlplane.console.seal import (
    cookie_sha256,
    form_token,
    is_form_token,
    new_cookie,
    parse_cookie,
    seal,
    unseal,
)
from controlplane.console.sessions import IDLE_MAX, LIFETIME_MAX, SESSIONS_PER_SUBJECT_MAX
from controlplane.db import models
from saltern.admin.v1 import credentials_pb2, tenants_pb2, tokens_pb2
from saltern.auth.v1 import auth_pb2
from saltern.errors import DataLossError, ResourceExhaustedError
from tests.controlplane.console.conftest import ANY_PORT, Console
from tests.support.browser import browser, forms_of
from tests.support.control import control_plane


async def is_in(visitor: Any) -> bool:
    """Whether a page is shown, and not the form to log in."""
    return bool((await visitor.get("/tenants/acme")).status_code == 200)


async def rows(console: Console) -> list[models.ConsoleSession]:
    async with console.control.database.transaction() as session:
        return list(await session.scalars(select(models.ConsoleSession)))


def test_a_cookie_yields_its_seal_and_its_form_token_and_no_other_cookie_does() -> None:
    cookie, other = new_cookie(), new_cookie()
    sealed = seal(cookie, b"secret")
    assert unseal(cookie, sealed) == b"secret" and b"secret" not in sealed
    assert is_form_token(cookie, form_token(cookie)) and not is_form_token(cookie, form_token(other))
    assert not is_form_token(cookie, "") and not is_form_token(cookie, "\udc80")
    assert len({cookie_sha256(cookie), cookie_sha256(other)}) == 2
    for wrong in (seal(other, b"secret"), sealed[:-1], b"", sealed[:-1] + bytes([sealed[-1] ^ 1])):
        with pytest.raises(DataLossError):
            unseal(cookie, wrong)
    assert parse_cookie(cookie) == cookie
    assert all(parse_cookie(text) is None for text in (None, "", "x", cookie + "x", cookie[:-1] + "\n"))


def test_failures_are_counted_by_source_and_leak_away() -> None:
    attempts = Attempts()
    for _ in range(FAILURES_MAX):
        attempts.begin("a", 0.0)
    for _ in range(100):  # what is refused counts nothing: nobody waits longer for it
        with pytest.raises(ResourceExhaustedError) as caught:
            attempts.begin("a", 0.0)
        assert caught.value.reason == "TOO_MANY_LOGINS" and caught.value.retry_after_ms == REFILL_S * 1000
    attempts.begin("b", 0.0)
    attempts.begin("a", REFILL_S)
    attempts.forgive("a")
    attempts.begin("a", REFILL_S)
    with pytest.raises(ResourceExhaustedError):
        attempts.begin("a", REFILL_S)


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert source_of("192.0.2.7:1") == source_of("[::ffff:192.0.2.7]:2") != source_of("192.0.2.8:1")
    assert source_of("[2001:db8::1]:1") == source_of("[2001:db8::ffff:2]:9") != source_of("[2001:db8:0:1::1]:1")
    assert source_of("") == ""


async def test_i1_a_session_begins_under_a_cookie_that_nobody_has_seen(console: Console) -> None:
    async with browser(console.url) as visitor:
        planted = "A" * 43
        visitor.http.cookies.set("saltern-console", planted)
        assert not await is_in(visitor)
        answer = await visitor.log_in(console.keys["acme/admin"])
        assert answer.status_code == 303 and answer.headers["location"] == "/"
        told = [header for header in answer.headers.get_list("set-cookie") if header.startswith("saltern-console=")]
        (header,) = told
        assert "HttpOnly" in header and "samesite=strict" in header.lower() and "Path=/" in header
        assert "Domain" not in header and planted not in header
        visitor.http.cookies.clear()
        visitor.http.cookies.set("saltern-console", planted)
        assert not await is_in(visitor)


async def test_a_second_login_ends_the_first_session_of_the_browser(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        first = visitor.cookie
        visitor.http.cookies.delete("saltern-console")
        shown = await visitor.get("/login")
        visitor.http.cookies.set("saltern-console", first, domain="127.0.0.1", path="/")
        fields = forms_of(shown.text)["/login"] | {"credential": console.keys["acme/auditor"]}
        assert (await visitor.post("/login", fields)).status_code == 303
        assert [row.subject for row in await rows(console)] == ["tenants/acme/apiKeys/auditor"]


async def test_i10_logging_out_ends_the_session_everywhere(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        stolen = visitor.cookie
        assert await is_in(visitor)
        answer = await visitor.submit("/tenants/acme", "/logout")
        assert answer.headers["location"] == "/login?done=logged-out"
        assert await rows(console) == []
        visitor.http.cookies.set("saltern-console", stolen, domain="127.0.0.1", path="/")
        assert not await is_in(visitor)


async def test_i10_a_session_ends_without_use_and_a_page_that_refreshes_itself_is_none(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        console.clock.by = IDLE_MAX - timedelta(minutes=1)
        refresh = await visitor.get("/tenants/acme", headers={"saltern-refresh": "1"})
        assert refresh.status_code == 200
        console.clock.by = IDLE_MAX
        assert not await is_in(visitor)

    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        for _ in range(3):
            console.clock.by += IDLE_MAX - timedelta(minutes=1)
            assert await is_in(visitor)


async def test_i10_a_session_ends_after_eight_hours_used_or_not(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        (row,) = await rows(console)
        assert row.expire_time - row.create_time == LIFETIME_MAX
        async with console.control.database.transaction() as session:
            (kept,) = await session.scalars(select(models.ConsoleSession))
            kept.expire_time = console.clock()
        assert not await is_in(visitor)
        assert await rows(console) == []


async def test_i10_a_revoked_key_ends_the_session_at_once(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        assert await is_in(visitor)
        await console.control.delete_api_key("tenants/acme/apiKeys/admin")
        answer = await visitor.get("/tenants/acme")
        assert answer.headers["location"] == "/login?done=credential-ended"
        assert await rows(console) == [] and visitor.cookie == ""


async def test_a_session_goes_on_over_revoked_tokens_and_ends_with_its_tenant(console: Console) -> None:
    control = console.control
    metadata = await control.bearer(control.admin_key)
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        await control.tokens.RevokeTenantTokens(
            tokens_pb2.RevokeTenantTokensRequest(name="tenants/acme"), metadata=metadata
        )
        assert await is_in(visitor)  # its key is good: a new token
        await control.tenants.SuspendTenant(tenants_pb2.SuspendTenantRequest(name="tenants/acme"), metadata=metadata)
        answer = await visitor.get("/tenants/acme")
        assert answer.status_code == 409 and "TENANT_SUSPENDED" in answer.text
        await control.tenants.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="tenants/acme"), metadata=metadata)
        assert await rows(console) == []


def token_until(expires_at: int) -> str:
    claims = json.dumps({"sub": "x", "tenant": "acme", "role": "tenant-admin", "exp": expires_at})
    return f"e30.{base64.urlsafe_b64encode(claims.encode()).decode().rstrip('=')}.AAAA"


async def test_an_access_token_logs_in_until_it_expires_and_a_node_s_never_does(console: Console) -> None:
    control = console.control
    answer = await control.exchange(console.keys["acme/auditor"])
    async with browser(console.url, answer.access_token) as visitor:
        assert await is_in(visitor)
        (row,) = await rows(console)
        assert row.expire_time.timestamp() == answer.expire_time.seconds
    of_node = await control.exchange(console.keys["acme/writer"], "chat")
    node_key = await control.add_api_key(credentials_pb2.ROLE_NODE, key_id="n", node_id="node-1")
    header, body, signature = answer.access_token.split(".")
    wrong = {
        of_node.access_token: "TOKEN_",
        node_key: "CONSOLE_ROLE",
        f"{header}.{body}.{signature[::-1]}": "TOKEN_",
        "nonsense": "CREDENTIAL_MALFORMED",
        "a.b.c": "CREDENTIAL_MALFORMED",
        f"\u00e9{answer.access_token}": "CREDENTIAL_MALFORMED",
        f"{answer.access_token}\nx": "CREDENTIAL_MALFORMED",
        **dict.fromkeys(map(token_until, (10**18, -1, 10**400)), "CREDENTIAL_MALFORMED"),
        "x" * 5000: "CREDENTIAL_MALFORMED",
        "sk-saltern-0123456789abcdef-" + "A" * 43: "API_KEY_INVALID",
    }
    for number, (secret, reason) in enumerate(wrong.items()):
        async with browser(console.url, address=f"127.0.0.{2 + number // FAILURES_MAX}") as visitor:
            refused = await visitor.log_in(secret)
            assert refused.status_code == 403 and reason in refused.text
            assert secret not in refused.text and visitor.cookie == ""


async def test_logins_that_fail_are_slowed_down_and_a_good_key_elsewhere_is_not(console: Console) -> None:
    async with browser(console.url) as visitor:
        for _ in range(FAILURES_MAX):
            assert (await visitor.log_in("nonsense")).status_code == 403
        answer = await visitor.log_in(console.keys["acme/admin"])
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        console.clock.by = timedelta(seconds=REFILL_S * 2)
        assert (await visitor.log_in(console.keys["acme/admin"])).status_code == 303


async def test_i10_a_stranger_keeps_nobody_out_of_their_own_key(console: Console) -> None:
    key = console.keys["acme/admin"]
    async with browser(console.url, address="127.0.0.2") as stranger:
        for _ in range(FAILURES_MAX):
            assert (await stranger.log_in(key[:-43] + "A" * 43)).status_code == 403
        assert (await stranger.log_in(key)).status_code == 429
    async with browser(console.url, key) as owner:
        assert await is_in(owner)


async def test_of_many_logins_at_a_time_no_more_are_tried_than_may_fail(console: Console) -> None:
    async with browser(console.url) as visitor:
        form = forms_of((await visitor.get("/login")).text)["/login"] | {"credential": "sk-saltern-0123456789abcdef-x"}
        answers = await asyncio.gather(*(visitor.post("/login", form) for _ in range(3 * FAILURES_MAX)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(429) == 2 * FAILURES_MAX and statuses.count(403) == FAILURES_MAX


async def test_a_login_leads_to_no_other_site(console: Console) -> None:
    for wanted, led in {
        "/tenants/acme/keys": "/tenants/acme/keys",
        "//evil.example": "/",
        "https://evil.example/": "/",
        "/\\evil.example": "/",
        "/logout": "/",
    }.items():
        async with browser(console.url) as visitor:
            shown = await visitor.get("/login", params={"next": wanted})
            fields = forms_of(shown.text)["/login"] | {"credential": console.keys["acme/admin"]}
            assert (await visitor.post("/login", fields)).headers["location"] == led


async def test_one_key_has_a_bounded_number_of_sessions(console: Console) -> None:
    token = (await console.control.exchange(console.keys["acme/auditor"])).access_token
    for _ in range(SESSIONS_PER_SUBJECT_MAX + 2):
        async with browser(console.url, token):
            pass
    async with console.control.database.transaction() as session:
        assert await session.scalar(select(func.count()).select_from(models.ConsoleSession)) == SESSIONS_PER_SUBJECT_MAX


async def test_every_replica_knows_a_session_and_its_end(console: Console, postgres: Any, tmp_path: Path) -> None:
    urls = console.control
    database = type("Urls", (), {"app": urls.database.engine.url, "owner": urls.owner_url})()
    async with control_plane(database, tmp_path, console_listen=ANY_PORT) as second:
        async with (
            browser(console.url, console.keys["acme/admin"]) as visitor,
            browser(second.plane.console_url) as there,
        ):
            there.http.cookies.set("saltern-console", visitor.cookie)
            assert await is_in(there)
            await visitor.submit("/tenants/acme", "/logout")
            assert not await is_in(there)


async def test_no_credential_is_in_the_database_the_log_or_a_page(console: Console) -> None:
    key = console.keys["acme/admin"]
    log = io.StringIO()
    with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        async with browser(console.url, key) as visitor:
            cookie = visitor.cookie
            token = (await console.control.exchange(key)).access_token
            pages = [
                (await visitor.get(path)).text
                for path in ("/tenants/acme", "/tenants/acme/keys", "/tenants/acme/audit")
            ]
            (row,) = await rows(console)
    stored = (
        repr([getattr(row, column.key) for column in models.ConsoleSession.__table__.columns]).encode() + row.sealed
    )
    for secret in (key, key[28:], cookie, token):
        assert secret.encode() not in stored
        assert secret not in log.getvalue()
        assert all(secret not in page for page in pages)
    assert cookie_sha256(cookie) == row.cookie_sha256  # type: ignore[arg-type]
    assert re.search(r"console session began", log.getvalue())


async def test_i11_the_trail_names_the_browsers_address_on_the_consoles_word_alone(
    console: Console,
) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        await visitor.submit("/tenants/acme/salts/rotate")
    event = (await console.control.events("tenants/acme"))[0]
    assert event.method.endswith("RotateSalt") and event.request_id
    assert re.fullmatch(r"127\.0\.0\.1:\d+", event.peer) and event.actor == "tenants/acme/apiKeys/admin"

    forged = Voucher().metadata("203.0.113.9:1")
    request = auth_pb2.ExchangeApiKeyRequest(api_key=console.keys["acme/admin"], audience=auth_pb2.AUDIENCE_CONTROL)
    await console.control.auth.ExchangeApiKey(request, metadata=forged)
    peers = {event.peer for event in await console.control.events("tenants/acme", exchanges=True)}
    assert not any("203.0.113.9" in peer for peer in peers)
