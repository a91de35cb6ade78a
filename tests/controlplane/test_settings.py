"""Settings: where they come from, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.server import bind
from controlplane.settings import load_settings
from saltern.endpoints import Endpoint, parse_endpoint
from saltern.errors import FailedPreconditionError, InvalidArgumentError

URL = "postgresql://user:hunter2@host/saltern"
GIVEN: dict[str, Any] = {"database_url": URL, "state_dir": "/state"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTROL_LISTEN", "DATABASE_URL", "MIGRATION_DATABASE_URL", "STATE_DIR", "ALLOW_PLAINTEXT"):
        monkeypatch.delenv(f"SALTERN_{name}", raising=False)


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALTERN_CONTROL_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("SALTERN_DATABASE_URL", URL)
    monkeypatch.setenv("SALTERN_STATE_DIR", "/elsewhere")
    settings = load_settings(listen="127.0.0.1:2", database_url=None, state_dir=None)
    assert settings.listen == Endpoint("127.0.0.1", 2)
    assert settings.state_dir == Path("/elsewhere")
    assert settings.database_url.get_secret_value() == URL


def test_the_default_is_this_host_alone() -> None:
    settings = load_settings(**GIVEN)
    assert settings.listen == Endpoint("127.0.0.1", 7700)
    assert settings.migration_database_url is None and not settings.allow_plaintext


def test_no_password_is_in_a_repr() -> None:
    assert "hunter2" not in repr(load_settings(**GIVEN))


@pytest.mark.parametrize(
    ("changes", "reason", "word"),
    [
        ({"database_url": None}, "SETTING_MISSING", "saltern up"),
        ({"state_dir": None}, "SETTING_MISSING", "--state-dir"),
        ({"allow_plaintext": "perhaps"}, "SETTING_MALFORMED", "--help"),
        *(
            ({"listen": text}, "INVALID_ENDPOINT", "HOST:PORT")
            for text in ("", "host", ":1", "h:", "h:x", "h:-1", "h:65536", "::1:1", "h:٣", "h:1 ")
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_write(changes: dict[str, Any], reason: str, word: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_settings(**(GIVEN | changes))
    assert caught.value.reason == reason
    assert word in str(caught.value) and "hunter2" not in str(caught.value)


def test_plain_text_stays_on_this_host_unless_allowed() -> None:
    for host in ("0.0.0.0", "[::]", "192.0.2.1", "example.com"):
        with pytest.raises(FailedPreconditionError) as caught:
            load_settings(**GIVEN, listen=f"{host}:0")
        assert caught.value.reason == "PLAINTEXT_REFUSED" and "--allow-plaintext" in caught.value.hint
        assert load_settings(**GIVEN, listen=f"{host}:0", allow_plaintext=True).allow_plaintext
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        load_settings(**GIVEN, listen=f"{host}:0")


def test_with_tls_other_hosts_are_served_without_allow_plaintext_but_metrics_are_not() -> None:
    tls = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}
    settings = load_settings(**GIVEN, **tls, listen="0.0.0.0:0", metrics_listen="127.0.0.1:0")
    assert settings.tls is not None and settings.tls.certificate == Path("cert.pem")
    with pytest.raises(FailedPreconditionError) as caught:
        load_settings(**GIVEN, **tls, listen="0.0.0.0:0", metrics_listen="0.0.0.0:0")
    assert caught.value.reason == "PLAINTEXT_REFUSED" and "--metrics-listen" in caught.value.message
    with pytest.raises(InvalidArgumentError) as half:
        load_settings(**GIVEN, tls_cert=Path("cert.pem"))
    assert half.value.reason == "TLS_OPTIONS_INCOMPLETE"


def test_endpoints_are_written_as_they_are_read() -> None:
    for text in ("127.0.0.1:7700", "[::1]:0", "localhost:65535"):
        assert str(parse_endpoint(text)) == text


async def test_an_address_of_another_host_is_refused_with_the_reason() -> None:
    server = grpc.aio.server()
    with pytest.raises(FailedPreconditionError) as caught:
        bind(server, Endpoint("192.0.2.1", 0))
    assert "192.0.2.1:0" in caught.value.message and "cannot assign" in caught.value.message
    await server.stop(None)


@pytest.mark.parametrize("age_s", [0, 3599, 367 * 86400])
def test_the_age_of_a_signing_key_is_an_hour_to_a_year(age_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(**GIVEN).signing_key_max_age_s == 30 * 86400
    monkeypatch.setenv("SALTERN_SIGNING_KEY_MAX_AGE_S", "7200")
    assert load_settings(**GIVEN).signing_key_max_age_s == 7200
    assert load_settings(**GIVEN, signing_key_max_age_s=3600).signing_key_max_age_s == 3600
    with pytest.raises(InvalidArgumentError):
        load_settings(**GIVEN, signing_key_max_age_s=age_s)
