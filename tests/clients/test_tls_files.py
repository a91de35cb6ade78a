"""TLS files: every error says which file and why, and none shows what it holds."""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from saltern.errors import FailedPreconditionError, InvalidArgumentError, SalternError
from saltern.tls import (
    SYSTEM_CA,
    ClientTls,
    ServerTls,
    client_context,
    client_tls,
    client_tls_from_environment,
    read_authorities,
    read_identity,
    server_context,
    server_tls,
)
from saltern.tls_reload import ReloadingTls
from tests.support.certificates import Authority, Pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def reason_of(pair: Pair, now: datetime | None = None) -> str:
    with pytest.raises(SalternError) as caught:
        read_identity(pair.certificate, pair.private_key, now)
    error = caught.value
    assert str(pair.certificate) in error.message or str(pair.private_key) in error.message
    assert error.hint
    secret = pair.private_key.read_text() if pair.private_key.exists() else ""
    for line in secret.splitlines()[1:-1]:
        assert line not in str(error)
    return error.reason


def test_a_good_pair_is_read_and_its_repr_shows_no_key(authority: Authority) -> None:
    pair = authority.issue()
    identity = read_identity(pair.certificate, pair.private_key)
    assert identity.serial == pair.serial
    assert "PRIVATE" not in repr(identity) and "BEGIN" not in repr(identity)


def test_what_is_wrong_with_a_pair_is_said(authority: Authority) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    now = datetime.now(UTC)
    assert reason_of(good, now + timedelta(days=2)) == "TLS_CERTIFICATE_EXPIRED"
    assert reason_of(good, now - timedelta(days=2)) == "TLS_CERTIFICATE_NOT_YET_VALID"
    assert reason_of(Pair(good.certificate, other.private_key, 0)) == "TLS_KEY_MISMATCH"
    assert reason_of(Pair(good.private_key, good.private_key, 0)) == "TLS_CERTIFICATE_MALFORMED"
    assert reason_of(Pair(good.certificate, good.certificate, 0)) == "TLS_KEY_MALFORMED"
    assert reason_of(Pair(authority.folder / "absent", good.private_key, 0)) == "TLS_FILE_NOT_FOUND"
    assert reason_of(Pair(authority.folder, good.private_key, 0)) == "TLS_FILE_NOT_READABLE"
    good.certificate.write_bytes(b"\xff" * 100)
    assert reason_of(good) == "TLS_CERTIFICATE_MALFORMED"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644])
def test_a_key_that_everybody_may_use_is_refused(authority: Authority, mode: int) -> None:
    pair = authority.issue()
    pair.private_key.chmod(mode)
    assert reason_of(pair) == "TLS_KEY_EXPOSED"
    pair.private_key.chmod(0o640)  # a group is how secrets are mounted into containers
    assert read_identity(pair.certificate, pair.private_key).serial == pair.serial


def test_an_encrypted_key_is_refused_without_asking(authority: Authority) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    pair = authority.issue()
    key = load_pem_private_key(pair.private_key.read_bytes(), None)
    pair.private_key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    )
    assert reason_of(pair) == "TLS_KEY_MALFORMED"


def test_contexts_take_tls_1_3_only_and_check_names(authority: Authority) -> None:
    server = server_context(authority.server(client_ca=authority.ca).read())
    assert server.minimum_version is ssl.TLSVersion.TLSv1_3 and server.verify_mode is ssl.CERT_REQUIRED
    client = client_context(authority.client("me"))
    assert client.minimum_version is ssl.TLSVersion.TLSv1_3
    assert client.check_hostname and client.verify_mode is ssl.CERT_REQUIRED


def test_options_that_would_mean_plain_text_by_mistake_are_refused(tmp_path: Path) -> None:
    assert client_tls(None) is None and server_tls(None, None, None) is None
    assert client_tls(SYSTEM_CA) == ClientTls(None)
    for make in (
        lambda: client_tls(None, tmp_path, tmp_path),
        lambda: client_tls(None, server_name="control"),
        lambda: client_tls("ca.pem", tmp_path),
        lambda: server_tls(tmp_path, None, None),
        lambda: server_tls(None, None, tmp_path),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            make()  # type: ignore[no-untyped-call]
        assert caught.value.reason == "TLS_OPTIONS_INCOMPLETE"


def test_the_environment_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"SALTERN_TLS_{name}", raising=False)
    assert client_tls_from_environment() is None
    monkeypatch.setenv("SALTERN_TLS_CA", "ca.pem")
    monkeypatch.setenv("SALTERN_TLS_SERVER_NAME", "control")
    assert client_tls_from_environment() == ClientTls(Path("ca.pem"), server_name="control")


def test_the_system_s_authorities_are_pem(authority: Authority) -> None:
    pem = ClientTls(None).read_authorities() if ssl.get_default_verify_paths().cafile else b""
    assert not pem or b"BEGIN CERTIFICATE" in pem
    assert read_authorities(authority.ca) == authority.ca.read_bytes()
    for content in (b"", b"no PEM", b"\xff\xfe", authority.issue().private_key.read_bytes()):
        authority.ca.write_bytes(content)
        with pytest.raises(FailedPreconditionError) as caught:
            read_authorities(authority.ca)
        assert caught.value.reason == "TLS_CERTIFICATE_MALFORMED"


class Lines:
    """An EventLog that keeps what it is told."""

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []

    def info(self, event: str, /, **fields: Any) -> None:
        self.infos.append({"event": event, **fields})

    def error(self, event: str, /, **fields: Any) -> None:
        self.errors.append({"event": event, **fields})


def test_new_files_are_taken_and_broken_ones_change_nothing_and_are_reported_once(authority: Authority) -> None:
    lines, files = Lines(), authority.server()
    tls = ReloadingTls(files, lines, interval_s=0)
    first = tls.current()
    assert tls.current() is first
    second = authority.issue("server").serial
    assert tls.current().identity.serial == second
    assert [line["serial"] for line in lines.infos] == [f"{second:x}"]
    files.private_key.chmod(0o644)
    os.utime(files.private_key)
    assert tls.current().identity.serial == tls.current().identity.serial == second
    assert [line["reason"] for line in lines.errors] == ["TLS_KEY_EXPOSED"]
    files.certificate.unlink()
    assert tls.current().identity.serial == second
    assert len(lines.errors) == 2
    third = authority.issue("server").serial
    assert tls.current().identity.serial == third
    assert "PRIVATE" not in repr(lines.infos) + repr(lines.errors)


def test_files_behind_a_link_that_is_turned_are_new_files(authority: Authority, tmp_path: Path) -> None:
    """How Kubernetes replaces a mounted secret."""
    old, new = authority.issue("old"), authority.issue("new")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.symlink_to(old.certificate)
    key.symlink_to(old.private_key)
    tls = ReloadingTls(ServerTls(certificate, key), Lines(), interval_s=0)
    for link, target in ((certificate, new.certificate), (key, new.private_key)):
        turned = tmp_path / "turned"
        turned.symlink_to(target)
        turned.replace(link)
    assert tls.current().identity.serial == new.serial


def test_files_are_looked_at_no_more_often_than_once_an_interval(authority: Authority) -> None:
    tls = ReloadingTls(authority.server(), Lines(), interval_s=3600)
    first = tls.current()
    authority.issue("server")
    assert tls.current() is first
