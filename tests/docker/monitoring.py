"""A real Prometheus over the services of a rehearsal: targets up, rules evaluated, panels' queries asked."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.docker.dockerfile import ROOT
from tests.support.network import Host

FOLDER = ROOT / "docker" / "prometheus"
NOBODY = 65534
PORT = 9090
_SCRAPED_S = 60.0


class Monitoring:
    """A running Prometheus with the file and the rules of docker/prometheus.

    Names of hosts are replaced by their addresses, and the intervals by a second; everything else is as in the file.
    """

    def __init__(self, command: Sequence[str], folder: Path, host: Host, hosts: Mapping[str, Host], log: Path) -> None:
        folder.mkdir()
        (folder / "data").mkdir()
        text = (FOLDER / "prometheus.yml").read_text().replace("15s", "1s")
        text = text.replace("rules/*.yml", str(folder / "rules" / "*.yml"))
        text = re.sub(r'"([\w-]+):(\d+)"', lambda match: f'"{hosts[match[1]].address}:{match[2]}"', text)
        (folder / "prometheus.yml").write_text(text)
        (folder / "rules").mkdir()
        for rules in (FOLDER / "rules").glob("*.yml"):
            (folder / "rules" / rules.name).write_text(rules.read_text())
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
        words = [
            word.replace("/etc/prometheus/", f"{folder}/").replace("=/prometheus", f"={folder}/data")
            for word in command
        ]
        self._address = host.address
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", "--"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                host.command([*as_nobody, "prometheus", *words]),
                stdout=output,
                stderr=output,
                pass_fds=host.descriptors,
                cwd="/",
            )

    def ask(self, path: str, **parameters: str) -> Any:
        """The ``data`` of an answer of its API."""
        url = f"http://{self._address}:{PORT}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that its scrapes will show."""
        deadline_s = time.monotonic() + _SCRAPED_S
        while True:
            try:
                if condition():
                    return
            except OSError:
                assert self._process.poll() is None, "prometheus has ended; see its log"
            assert time.monotonic() < deadline_s, "not so within a minute"
            time.sleep(0.5)

    def targets_are_up(self, expected: int) -> bool:
        """Whether every target has been scraped."""
        return [item["health"] for item in self.ask("targets")["activeTargets"]].count("up") == expected

    def rules_are_well(self) -> bool:
        """Whether every rule has been evaluated, without an error."""
        found = [rule["health"] for group in self.ask("rules")["groups"] for rule in group["rules"]]
        return bool(found) and set(found) == {"ok"}

    def series(self, tenant: str) -> tuple[int, int]:
        """How many series a node has: of one tenant, and in all."""
        of_tenant = self.ask("query", query=f'max(count by (instance) ({{tenant="{tenant}"}}))')["result"]
        of_node = self.ask("query", query='max(scrape_samples_scraped{job="saltern-node"})')["result"]
        return int(of_tenant[0]["value"][1]), int(of_node[0]["value"][1])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def ask_every_panel(monitoring: Monitoring, tenant: str) -> tuple[int, list[str]]:
    """Ask what every panel asks; returns how many there are, and those that have no data.

    Raises:
        AssertionError: one is not a query.
    """
    count, empty = 0, []
    for path in sorted((ROOT / "docker" / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "10s").replace("$__range", "1m")
                count += 1
                if not monitoring.ask("query", query=expression.replace("$tenant", tenant))["result"]:
                    empty.append(f"{board['title']} / {panel['title']}")
    return count, empty
