"""``saltern up --engine``: what its nodes are told, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from controlplane.tier_below import TierBelow, tier_below
from saltern.cli.app import main
from saltern.endpoints import Endpoint
from saltern.errors import FailedPreconditionError, InvalidArgumentError

MIB = 1024 * 1024
FOLDER = Path("/var/lib/saltern/node-1")
MASTER = "10.0.0.5:50051"


@pytest.fixture
def with_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's client is taken for installed, whether it is or not; nothing is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_without_a_size_there_is_no_tier() -> None:
    assert tier_below("local", None, None) is None


def test_files_lie_in_the_folder_of_the_node() -> None:
    below = tier_below("local", 64 * MIB, None)
    assert below is not None and str(below) == "64 MiB SSD"
    assert below.node_options(FOLDER) == {"--ssd-dir": FOLDER / "ssd", "--ssd-bytes": 64 * MIB}


@pytest.mark.usefixtures("with_wheel")
def test_a_store_is_named_to_the_node_and_has_no_folder() -> None:
    below = tier_below("mooncake", 64 * MIB, MASTER)
    assert below == TierBelow(64 * MIB, Endpoint("10.0.0.5", 50051))
    assert {name: str(value) for name, value in below.node_options(FOLDER).items()} == {
        "--engine": "mooncake",
        "--mooncake-master": MASTER,
        "--ssd-bytes": str(64 * MIB),
    }
    assert str(below) == f"64 MiB in the Mooncake store at {MASTER}"


@pytest.mark.usefixtures("with_wheel")
@pytest.mark.parametrize(
    ("engine", "capacity_bytes", "master"),
    [("mooncake", 64 * MIB, None), ("mooncake", None, MASTER), ("mooncake", None, None), ("local", 64 * MIB, MASTER)],
)
def test_half_of_the_options_is_refused(engine: str, capacity_bytes: int | None, master: str | None) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        tier_below(engine, capacity_bytes, master)
    assert refused.value.reason == "ENGINE_OPTIONS_INCOMPLETE"


@pytest.mark.usefixtures("with_wheel")
def test_a_master_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        tier_below("mooncake", 64 * MIB, "10.0.0.5")


@pytest.mark.usefixtures("without_wheel")
def test_without_mooncakes_client_it_says_how_to_install_it_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        tier_below("mooncake", 64 * MIB, MASTER)
    assert refused.value.reason == "MOONCAKE_NOT_INSTALLED"
    words = ["up", "--data-dir", str(tmp_path / "up"), "--ssd", "64MiB", "--engine", "mooncake"]
    assert main([*words, "--mooncake-master", MASTER]) == 5
    assert "pip install 'saltern-server[mooncake]'" in capsys.readouterr().err
    assert not (tmp_path / "up").exists()
