"""Misconfigurations of the console, planted one by one: ``saltern doctor --console`` names each; see test_doctor.py."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from saltern.cli import console_facts
from saltern.cli.finding import Finding, State
from saltern.demo.stack import Stack
from saltern.tls import ClientTls
from tests.clients.cli.conftest import Saltern
from tests.clients.cli.test_doctor import a_stranger, finding
from tests.support.certificates import Authority

DEADLINE_MS = 5000


class FrontDoor(BaseHTTPRequestHandler):
    """Stands in front of a console, or for one: what it shows is set by the test."""

    shown: tuple[int, dict[str, str], str] = (200, {}, "")
    answered: tuple[int, dict[str, str], str] = (403, {}, "FORM_TOKEN_WRONG")

    def do_GET(self) -> None:
        self._answer(*self.shown)

    def do_POST(self) -> None:
        self._answer(*self.answered)

    def _answer(self, status: int, headers: dict[str, str], text: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Tests print nothing."""


@contextmanager
def front_door(context: ssl.SSLContext | None = None, **changes: object) -> Iterator[str]:
    """Its port, as ``localhost:PORT``."""
    handler = type("Handler", (FrontDoor,), changes)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def look(url: str, tls: ClientTls | None = None) -> list[Finding]:
    found = list(console_facts.examine(url, DEADLINE_MS, tls))
    assert all(one.hint for one in found if one.state is not State.OK), "what is wrong comes with what to do"
    return found


def the_one(url: str, tls: ClientTls | None = None) -> Finding:
    (found,) = look(url, tls)
    return found


def over_tls(authority: Authority) -> ssl.SSLContext:
    pair = authority.issue("console")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.private_key)
    return context


def cookie(name: str) -> dict[str, object]:
    return {"shown": (200, {"set-cookie": f"{name}=x; Path=/"}, "")}


def test_the_console_of_a_local_stack_is_looked_at_unasked(
    offline: Saltern, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_DATA_DIR", str(stack.admin_api_key_file.parents[1]))
    state, detail, _ = finding(offline("doctor", "-o", "json"), "console")
    assert state == "OK" and detail.endswith("serves the form to log in")


def test_1_nothing_listens_there() -> None:
    with front_door() as address:
        pass
    assert "does not answer" in the_one(f"http://{address}/").detail


def test_2_a_text_that_is_no_url(saltern: Saltern) -> None:
    for text in ("console.example.org", "ftp://h/", "http://", "http://h:0/", "http://h:99999/", "http://h/console"):
        assert "is no URL of a console" in the_one(text).detail
    assert finding(saltern("doctor", "-o", "json", "--console", "x"), "console")[0] == "FAIL"


def test_3_the_address_of_something_else(saltern: Saltern, stack: Stack) -> None:
    with a_stranger() as address:
        assert the_one(f"http://{address}/").state is State.FAIL
    assert the_one(f"http://{stack.control}/").state is State.FAIL
    with front_door() as address:
        assert "something else" in the_one(f"http://{address}/").detail


def test_4_it_leads_elsewhere() -> None:
    with front_door(shown=(307, {"location": "https://sso.example.org/"}, "")) as address:
        assert "leads to https://sso.example.org/" in the_one(f"http://{address}/").detail


def test_5_plain_text_beyond_this_host() -> None:
    transport, console = look("http://console.invalid/")
    assert transport.state is State.WARN and "plain text" in transport.detail
    assert console.state is State.FAIL


def test_6_a_public_url_that_the_console_does_not_take_for_its_own() -> None:
    refused = (403, {}, "OTHER_ORIGIN")
    with front_door(**cookie("saltern-console-login"), answered=refused) as address:
        found = the_one(f"http://{address}/")
    assert found.state is State.FAIL and "nobody can log in" in found.detail and "Host header" in found.hint


def test_7_tls_that_ends_at_a_proxy(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with front_door(over_tls(authority), **cookie("saltern-console-login")) as address:
        found = the_one(f"https://{address}/", authority.client())
    assert found.state is State.WARN and "a proxy ends TLS" in found.detail


def test_8_a_certificate_that_is_not_trusted_or_for_another_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "one")
    with front_door(over_tls(authority), **cookie("__Host-saltern-login")) as address:
        assert the_one(f"https://{address}/", authority.client()).state is State.OK
        assert "is refused" in the_one(f"https://{address}/", Authority(tmp_path / "two").client()).detail
        assert "is refused" in the_one(f"https://{address}/").detail


def test_9_https_where_there_is_plain_text(tmp_path: Path) -> None:
    with front_door(**cookie("saltern-console-login")) as address:
        found = the_one(f"https://{address}/", Authority(tmp_path).client())
    assert found.state is State.FAIL and "no TLS" in found.detail
