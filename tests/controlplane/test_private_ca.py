"""The authority of ``saltern up --tls``: made once, its certificates made anew in time, its files nobody else's."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from controlplane.private_ca import RENEW_BEFORE, SERVER_LIFETIME, ensure_certificates
from saltern.errors import FailedPreconditionError
from saltern.tls import ClientTls, client_context

NOW = datetime.now(UTC)


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_what_is_good_stays_and_what_ends_soon_is_made_anew(tmp_path: Path) -> None:
    made = ensure_certificates(tmp_path / "tls", NOW)
    first = serial(made.server.certificate)
    assert ensure_certificates(tmp_path / "tls", NOW + SERVER_LIFETIME - RENEW_BEFORE - timedelta(days=1)) == made
    assert serial(made.server.certificate) == first
    authority = serial(made.ca)
    ensure_certificates(tmp_path / "tls", NOW + SERVER_LIFETIME - RENEW_BEFORE + timedelta(days=1))
    assert serial(made.server.certificate) != first
    assert serial(made.ca) == authority


def test_files_are_this_user_s_alone_and_usable(tmp_path: Path) -> None:
    made = ensure_certificates(tmp_path / "tls")
    for path in (tmp_path / "tls").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made.server.read().identity.serial == serial(made.server.certificate)
    client_context(ClientTls(made.ca))


@pytest.mark.parametrize("damage", ["server.pem", "server.key"])
def test_a_damaged_certificate_is_made_anew(tmp_path: Path, damage: str) -> None:
    made = ensure_certificates(tmp_path / "tls")
    (tmp_path / "tls" / damage).write_text("damaged")
    assert ensure_certificates(tmp_path / "tls") == made
    made.server.read()


def test_a_certificate_of_another_authority_is_made_anew(tmp_path: Path) -> None:
    made, other = ensure_certificates(tmp_path / "tls"), ensure_certificates(tmp_path / "other")
    for mine, foreign in zip(made.server.files, other.server.files, strict=True):
        foreign.replace(mine)
    foreign_serial = serial(made.server.certificate)
    ensure_certificates(tmp_path / "tls")
    assert serial(made.server.certificate) != foreign_serial


@pytest.mark.parametrize("damage", ["ca.pem", "ca.key"])
def test_a_damaged_authority_is_not_replaced_without_a_word(tmp_path: Path, damage: str) -> None:
    ensure_certificates(tmp_path / "tls")
    (tmp_path / "tls" / damage).unlink()
    with pytest.raises(FailedPreconditionError) as caught:
        ensure_certificates(tmp_path / "tls")
    assert caught.value.reason == "PRIVATE_CA_UNUSABLE"
