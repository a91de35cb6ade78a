"""The Dockerfile, as far as it can be judged without building it; and the health check, run."""

from __future__ import annotations

import fnmatch
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controlplane.settings import METRICS_PORT_DEFAULT
from tests.docker.dockerfile import DOCKERFILE, ROOT, Stage, stages

OURS = ("control", "node", "node-rdma", "cli")


@pytest.fixture(scope="module")
def targets() -> dict[str, Stage]:
    return stages()


@pytest.mark.parametrize("name", OURS)
def test_each_image_is_a_user_by_number_and_starts_without_a_shell(name: str, targets: dict[str, Stage]) -> None:
    stage = targets[name]
    assert stage.user == "10001:10001" and stage.stop_signal == "SIGTERM"
    assert stage.entrypoint[0] == "saltern" and stage.lineage[0] == "base"
    assert "useradd --uid 10001 --gid 10001" in " ".join(stage.runs)


@pytest.mark.parametrize("name", OURS)
def test_nothing_that_builds_is_in_an_image(name: str, targets: dict[str, Stage]) -> None:
    stage = targets[name]
    assert not {"build-server", "build-cli"} & set(stage.lineage)
    taken = [(origin, sources) for origin, sources, _ in stage.copies if origin]
    assert [sources for _, sources in taken] == [("/opt/saltern",)]
    assert not any(word in run for run in stage.runs for word in ("gcc", "build-essential", "pip install"))


def test_servers_have_a_health_check_at_the_port_that_they_serve_it_on(targets: dict[str, Stage]) -> None:
    for name, port in (("control", METRICS_PORT_DEFAULT), ("node", 7703), ("node-rdma", 7703)):
        check = targets[name].healthcheck
        assert check[-1] == f"http://127.0.0.1:{port}/readyz" and port in targets[name].ports
        assert check[0] == "python" and "curl" not in check


def test_bases_have_a_tag_that_says_which(targets: dict[str, Stage]) -> None:
    for stage in targets.values():
        tag = stage.base.partition(":")[2]
        assert tag and tag != "latest" and tag.count(".") >= 2, stage.base


def test_the_context_holds_what_is_copied_and_nothing_else(targets: dict[str, Stage]) -> None:
    lines = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {source for stage in targets.values() for origin, of, _ in stage.copies if not origin for source in of}
    assert copied == allowed and all((ROOT / source).exists() for source in copied)
    assert not any(fnmatch.fnmatch("docker/.env", pattern) for pattern in allowed)


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/degraded" else 503)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_the_health_check_takes_degraded_for_healthy_and_everything_else_not() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert _check(f"{url}/degraded") == (0, "/degraded")
            assert _check(f"{url}/draining") == (1, "/draining")
        finally:
            server.shutdown()
            thread.join()
    status, said = _check(url)
    assert status == 1 and "refused" in said


def _check(url: str) -> tuple[int, str]:
    command = [sys.executable, "-I", str(ROOT / "docker" / "healthcheck.py"), url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout.strip()


def test_make_env_makes_each_secret_once_and_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("GRAFANA_PASSWORD=mine\nPOSTGRES_PASSWORD=\n")
    for _ in range(2):
        subprocess.run(["sh", str(ROOT / "docker" / "make-env.sh"), str(file)], check=True, timeout=30)
    lines = file.read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines)
    assert len(lines) == 6 and values["GRAFANA_PASSWORD"] == "mine" and file.stat().st_mode & 0o777 == 0o600
    made = {value for name, value in values.items() if name != "GRAFANA_PASSWORD"}
    assert len(made) == 4 and all(len(value) == 64 and int(value, 16) for value in made)
    assert list(tmp_path.iterdir()) == [file]
