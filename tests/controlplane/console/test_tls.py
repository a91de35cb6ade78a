"""The console over TLS: the certificate of the control plane, its renewal, certificates of browsers, strict cookies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from controlplane.console.app import make_app
from controlplane.console.guard import Guard
from controlplane.settings import load_settings
from saltern.admin_client import redeem_bootstrap_token
from saltern.errors import FailedPreconditionError
from saltern.tls import ServerTls
from tests.controlplane.console.conftest import ANY_PORT
from tests.support.browser import browser
from tests.support.certificates import Authority
from tests.support.control import control_plane, migrate


@dataclass(frozen=True, slots=True)
class Served:
    """A console over TLS: where it is, and the key of the platform's administrator."""

    url: str
    secret: str


@asynccontextmanager
async def serving(postgres: Any, folder: Path, authority: Authority, tls: ServerTls) -> AsyncIterator[Served]:
    """A control plane and its console, both over TLS, as one set of options says."""
    options = {"tls_cert": tls.certificate, "tls_key": tls.private_key, "tls_client_ca": tls.client_ca}
    with postgres.fresh_database(migrate) as database:
        async with control_plane(database, folder, console_listen=ANY_PORT, **options) as control:
            token = (folder / "bootstrap-token").read_text().strip()
            admin = authority.client("admin")
            made = await asyncio.to_thread(redeem_bootstrap_token, str(control.plane.endpoint), token, tls=admin)
            yield Served(control.plane.console_url, made.secret)


def trusting(authority: Authority, shown: str = "") -> ssl.SSLContext:
    """A browser that trusts ``authority``, and shows the certificate of that name."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    if shown:
        authority.issue(shown)
        context.load_cert_chain(authority.folder / f"{shown}.pem", authority.folder / f"{shown}.key")
    return context


async def serial_of(url: str, context: ssl.SSLContext) -> int:
    """Of the certificate that a new connection is shown."""
    where = urlsplit(url)
    _, writer = await asyncio.open_connection(where.hostname, where.port, ssl=context)
    shown = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return int(shown["serialNumber"], 16)


async def test_cookies_are_bound_to_tls_and_a_renewed_certificate_is_shown_at_once(
    postgres: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    tls, context = authority.server("control"), trusting(authority)
    async with serving(postgres, tmp_path / "control", authority, tls) as served:
        assert served.url.startswith("https://")
        async with browser(served.url, tls=context) as visitor:
            shown = await visitor.get("/login")
            assert shown.status_code == 200
            assert "strict-transport-security" not in shown.headers  # loopback is others' too
            answer = await visitor.log_in(served.secret)
            assert answer.status_code == 303
            cookies = answer.headers.get_list("set-cookie")
            (session,) = [cookie for cookie in cookies if cookie.startswith("__Host-saltern=")]
            assert "; Secure" in session and "; Path=/" in session and "HttpOnly" in session and "Domain" not in session
            before = await serial_of(served.url, context)
            renewed = authority.issue("control").serial
            assert renewed != before
            while await serial_of(served.url, context) != renewed:
                await asyncio.sleep(0.05)
            assert (await visitor.get("/tenants")).status_code == 200  # who is connected stays
        with pytest.raises(httpx.ConnectError):
            async with browser(served.url) as stranger:
                await stranger.get("/login")
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            async with browser(served.url.replace("https:", "http:")) as plain:
                await plain.get("/login")


async def test_with_a_client_authority_a_browser_without_a_certificate_gets_no_page(
    postgres: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    tls = authority.server("control", client_ca=authority.ca)
    async with serving(postgres, tmp_path / "control", authority, tls) as served:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)):
            async with browser(served.url, tls=trusting(authority)) as nobody:
                await nobody.get("/login")
        foreign = Authority(tmp_path / "another")
        context = trusting(authority)
        other = foreign.issue("guest")
        context.load_cert_chain(other.certificate, other.private_key)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)):
            async with browser(served.url, tls=context) as guest:
                await guest.get("/login")
        async with browser(served.url, served.secret, trusting(authority, "laptop")) as known:
            assert (await known.get("/tenants")).status_code == 200


def test_beyond_this_host_it_is_refused_in_plain_text_and_told_to_stay_with_tls(tmp_path: Path) -> None:
    given = {"console_listen": "0.0.0.0:7890", "database_url": "postgresql://u@h/d", "state_dir": tmp_path}
    with pytest.raises(FailedPreconditionError) as refused:
        load_settings(**given)
    assert refused.value.reason == "PLAINTEXT_REFUSED" and "--console-listen" in refused.value.message
    assert load_settings(**given, allow_plaintext=True).console_listen is not None
    for is_secure, is_reachable in ((True, True), (True, False), (False, True)):
        console: Any = type("C", (), {"is_secure": is_secure})()
        guard = make_app(console, {}, is_reachable=is_reachable)
        assert isinstance(guard, Guard)
        is_told = any(name == b"strict-transport-security" for name, _ in guard._headers)
        assert is_told == (is_secure and is_reachable)
