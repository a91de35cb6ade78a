"""compose.yaml carried out, with one node; ``make test-docker`` does it with all of them and Prometheus."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docker.dockerfile import ROOT
from tests.support.network import can_make_namespaces


@pytest.mark.timeout(500)
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root, for users and networks of its own")
def test_the_first_start_an_engine_a_lost_control_plane_and_the_end() -> None:
    command = [sys.executable, "-m", "tests.docker.rehearse", "--short"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert result.returncode == 0, f"{result.stdout[-12000:]}\n{result.stderr[-4000:]}"
    for said in ("node-1: healthy", "stored 16 blocks", "`control` answers all the same", "secrets, in none of"):
        assert said in result.stdout
