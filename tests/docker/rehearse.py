"""``python -m tests.docker.rehearse``: compose.yaml carried out, each service a process with the image's command line.

With ``--images`` each is a container of an image that was built from the Dockerfile, by an OCI runtime; without, the
files are this machine's own (:mod:`tests.docker.container`).
Every service has a network namespace of its own, with the name that the file gives it, so that ``0.0.0.0:7700``, the
alias ``control`` of both control planes and the addresses that nodes advertise are what they will be. Needs root.
Prints what it has done; ends with 0 if all of it went as the file says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.docker import compose
from tests.docker.container import UID, Bubblewrap, Container, Engine, Wishes
from tests.docker.database import DatabaseContainer
from tests.docker.dockerfile import ROOT
from tests.docker.monitoring import Monitoring, ask_every_panel
from tests.docker.runtime import Crun
from tests.support.network import Host, can_make_namespaces, enter_private_network, network

HEALTHY_S = 120.0
HEALTHCHECK = "/usr/local/lib/saltern/healthcheck.py"
ALL = tuple(f"node-{number}" for number in (1, 2, 3))
SHORT = ("node-1",)
#: What an engine does, with the image of the command line and nothing else: store, and find it again.
ENGINE = """
import os, pathlib, saltern
key = pathlib.Path("/tmp/secrets/acme.engine.key").read_text().strip()
with saltern.Client(control=os.environ["SALTERN_CONTROL"], api_key=key, namespace="chat") as client:
    chain = client.chain([bytes([number]) * 8 for number in range(16)])
    chain.put_many(enumerate([bytes([number]) * 4096 for number in range(16)]))
    found = [bytes(result.payload)[:1] for result in chain.get_many(range(16)) if isinstance(result, saltern.Hit)]
    assert found == [bytes([number]) for number in range(16)], found
"""
_TENANT = """
apiVersion: saltern/v1
kind: Tenant
name: acme
quota:
  dram: {reserved: 16MiB, limit: 32MiB}
namespaces:
  - {name: chat, modelFingerprint: m@1, blockTokens: 16, blockBytes: 4KiB}
keys:
  - {name: engine, role: writer}
"""
_APPLY = f"""mkdir /tmp/secrets
cat >/tmp/tenant.yaml <<'EOF'{_TENANT}EOF
saltern apply -f /tmp/tenant.yaml --yes --wait --save-secrets /tmp/secrets"""

_SECOND_KEY = """mkdir /tmp/secrets
saltern key create engine-2 --tenant acme --role writer --save /tmp/secrets/acme.engine.key"""


class Rehearsal:
    """The services of the file that have been started, and the volumes of all."""

    def __init__(self, folder: Path, hosts: Mapping[str, Host], environment: Mapping[str, str], engine: Engine) -> None:
        self.services: dict[str, dict[str, Any]] = compose.read(environment)["services"]
        self._folder = folder
        self._hosts = hosts
        self._engine = engine
        self.running: dict[str, Container] = {}
        self.database: DatabaseContainer | None = None
        self.ended: set[str] = set()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def volume(self, name: str) -> Path:
        """The folder of a volume, made as an engine does: owned as the image has that path."""
        path = self._folder / "volumes" / name
        if not path.exists():
            path.mkdir(parents=True)
            path.chmod(0o700)
            os.chown(path, UID, UID)
        return path

    def up(self, name: str) -> None:
        """Start a service once everything that it depends on is as it must be."""
        if name in self.running or name in self.ended or (name == "postgres" and self.database):
            return
        service = self.services[name]
        for other, terms in service.get("depends_on", {}).items():
            self.up(other)
            done = self.healthy(other) if terms["condition"] == "service_healthy" else self.completed(other)
            assert done, f"{other} is not what {name} depends on"
        if name == "postgres":
            self.database = DatabaseContainer(service, self._hosts[name], self.volume("postgres"), self.log(name))
        else:
            self.running[name] = self.start(name, service)

    def start(self, name: str, service: Mapping[str, Any], *, command: tuple[str, ...] | None = None) -> Container:
        """Start a container of a service, perhaps with another command."""
        wishes = Wishes(
            name,
            command=service.get("command", ()) if command is None else command,
            entrypoint=service.get("entrypoint", ()),
            environment=service.get("environment", {}),
            binds=[(str(self.volume(mount.source)), mount) for mount in compose.mounts(service)],
            tmpfs=service.get("tmpfs", ()),
            hostname=service.get("hostname", ""),
        )
        with self.log(name).open("ab") as log:
            host = self._hosts.get(name, self._hosts["cli"])
            return self._engine.start(service["build"]["target"], wishes, host, log)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def healthy(self, name: str) -> bool:
        """Wait until the health check of a service passes: compose's own, else the image's."""
        service = self.services[name]
        deadline_s = time.monotonic() + HEALTHY_S
        while time.monotonic() < deadline_s:
            if name == "postgres":
                assert self.database is not None
                if self.database.is_healthy(service["healthcheck"]["test"][1:]):
                    return True
            elif self.running[name].is_healthy(self._engine.healthcheck(service["build"]["target"])):
                return True
            time.sleep(0.1)
        return False

    def completed(self, name: str) -> bool:
        """Wait until a service that does one thing has ended, well."""
        if name not in self.ended:
            if self.running.pop(name).wait(HEALTHY_S) != 0:
                return False
            self.ended.add(name)
        return True

    def cli(self, *arguments: str) -> str:
        """``docker compose run --rm cli ARGUMENTS``: what it prints; raises AssertionError where it fails."""
        container = self.start("cli-run", self.services["cli"], command=arguments)
        before = self.log("cli-run").read_text() if self.log("cli-run").exists() else ""
        status = container.wait(HEALTHY_S)
        said = self.log("cli-run").read_text()[len(before) :]
        assert status == 0, f"saltern {' '.join(arguments)}: {said}"
        return said

    def shell(self) -> Container:
        """A container of the command line that waits, for several commands in it."""
        service = {**self.services["cli"], "entrypoint": ["python", "-c", "import signal; signal.pause()"]}
        return self.start("cli-shell", service, command=())

    def stop(self, name: str) -> None:
        """Stop a service as compose does, and look that it drained in its time and ended well."""
        grace_s = float(self.services[name]["stop_grace_period"].removesuffix("s"))
        began_s = time.monotonic()
        status = self.running.pop(name).stop(grace_s)
        assert status == 0, f"{name} ended with {status}: {self.log(name).read_text()[-2000:]}"
        self.say(f"{name}: drained and ended {time.monotonic() - began_s:.1f} s after SIGTERM")

    def down(self) -> None:
        """End everything."""
        for container in self.running.values():
            container.kill()
        if self.database is not None:
            self.database.stop()


def rehearse(folder: Path, nodes: tuple[str, ...], engine: Engine, *, with_prometheus: bool = False) -> None:
    """Everything that the file promises, in the order in which somebody would do it."""
    env_file = folder / "env"
    make_env = ["sh", str(ROOT / "docker" / "make-env.sh"), str(env_file)]
    subprocess.run(make_env, check=True)
    first = env_file.read_text()
    subprocess.run(make_env, check=True)
    assert env_file.read_text() == first and env_file.stat().st_mode & 0o777 == 0o600
    environment = compose.read_env(env_file) | {"SALTERN_NODE_DRAM_BYTES": "64MiB", "SALTERN_NODE_SSD_BYTES": "64MiB"}
    hosts = ["postgres", "control-1", "control-2", "cli", "prometheus", *nodes]
    # In a hosts file an address must not have two names beside an alias of two addresses: gRPC's resolver gives up one.
    names = {name: [name] for name in hosts if not name.startswith("control-")} | {
        "control": ["control-1", "control-2"]
    }
    with network(names, hosts=hosts) as made, _ending(Rehearsal(folder, made, environment, engine)) as rehearsal:
        _first_start(rehearsal, nodes)
        _use(rehearsal, nodes)
        if with_prometheus:
            _watch(rehearsal, made)
        _stop_one(rehearsal)
        if nodes != SHORT:
            _start_again(rehearsal, nodes)
        for name in list(rehearsal.running):
            rehearsal.stop(name)
        _no_secret_in_logs(folder, environment, rehearsal)


@contextlib.contextmanager
def _ending(rehearsal: Rehearsal) -> Iterator[Rehearsal]:
    try:
        yield rehearsal
    except BaseException:
        for log in sorted(rehearsal.log("x").parent.glob("*.log")):
            rehearsal.say(f"---- {log.name}\n{log.read_text()[-3000:]}")
        raise
    finally:
        rehearsal.down()


def _first_start(rehearsal: Rehearsal, nodes: tuple[str, ...]) -> None:
    for name in ("control-2", *nodes):
        rehearsal.up(name)
    for name in ("control-2", *nodes):
        assert rehearsal.healthy(name), name
        rehearsal.say(f"{name}: healthy by the check of its image")
    for name, container in rehearsal.running.items():
        status = container.status()
        assert status["Uid"].split() == [str(UID)] * 4 and status["Gid"].split() == [str(UID)] * 4, name
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1", name
        assert "ro" in container.root_options(), name
        assert status["NSpid"].split()[-1] == "1", name
    page = rehearsal.running["control-1"].exec("python", "-I", HEALTHCHECK, "http://127.0.0.1:7705/login")
    assert page.returncode == 0 and "<html" in page.stdout, page.stdout
    rehearsal.say("control-1: the console shows its login")
    rehearsal.say(f"{', '.join(rehearsal.running)}: user {UID}, no capability, read-only root, process 1")


def _use(rehearsal: Rehearsal, nodes: tuple[str, ...]) -> None:
    shell = rehearsal.shell()
    try:
        result = shell.exec("sh", "-ec", _APPLY)
        assert result.returncode == 0, result.stderr
        listed = json.loads(shell.exec("saltern", "--output", "json", "node", "list").stdout)
        assert {node["name"].rpartition("/")[2] for node in listed["nodes"]} == set(nodes), listed
        _engine(rehearsal, shell)
    finally:
        shell.kill()


def _engine(rehearsal: Rehearsal, shell: Container) -> None:
    result = shell.exec("python", "-c", ENGINE)
    assert result.returncode == 0, result.stderr
    rehearsal.say("an engine in the network stored 16 blocks and read each back")


def _watch(rehearsal: Rehearsal, hosts: Mapping[str, Host]) -> None:
    command = rehearsal.services["prometheus"]["command"]
    folder, log = rehearsal.log("x").parent / "prometheus", rehearsal.log("prometheus")
    monitoring = Monitoring(command, folder, hosts["prometheus"], hosts, log)
    shell = rehearsal.shell()
    try:
        monitoring.until(lambda: monitoring.targets_are_up(expected=5))
        made = shell.exec("sh", "-ec", _SECOND_KEY)
        assert made.returncode == 0, made.stderr
        for _ in range(3):  # so that rates are above nothing
            time.sleep(3)
            _engine(rehearsal, shell)
        time.sleep(3)
        monitoring.until(monitoring.rules_are_well)
        count, empty = ask_every_panel(monitoring, "acme")
        rehearsal.say(
            f"prometheus: 5 targets up, every rule well, {count} queries of panels asked, {len(empty)} without data"
        )
        for where in empty:
            rehearsal.say(f"  no data: {where}")
        of_tenant, of_node = monitoring.series("acme")
        rehearsal.say(f"  series of a node: {of_node}, {of_tenant} of them of the one tenant")
        firing = [alert["labels"]["alertname"] for alert in monitoring.ask("alerts")["alerts"]]
        rehearsal.say(f"  alerts: {', '.join(sorted(set(firing))) or 'none'}")
    finally:
        shell.kill()
        monitoring.stop()


def _stop_one(rehearsal: Rehearsal) -> None:
    # Whoever calls `control` goes on with the other one.
    rehearsal.stop("control-1")
    assert "acme" in rehearsal.cli("tenant", "list")
    rehearsal.say("control-1 is stopped: `control` answers all the same")


def _start_again(rehearsal: Rehearsal, nodes: tuple[str, ...]) -> None:
    rehearsal.up("control-1")
    assert rehearsal.healthy("control-1")
    # A second `up` finds every key made.
    for name in ("admin-key", f"{nodes[0]}-key"):
        rehearsal.ended.discard(name)
        rehearsal.up(name)
        assert rehearsal.completed(name), name
        assert "is there already" in rehearsal.log(name).read_text(), name
    rehearsal.say("the first start's services, again: nothing made, nothing changed")
    rehearsal.stop(nodes[0])
    rehearsal.up(nodes[0])
    assert rehearsal.healthy(nodes[0])
    rehearsal.say(f"{nodes[0]}: started again on its volume")


def _no_secret_in_logs(folder: Path, environment: Mapping[str, str], rehearsal: Rehearsal) -> None:
    secrets = [value for name, value in environment.items() if name.endswith(("PASSWORD", "_KEY"))]
    assert len(secrets) == 5
    logs = list(folder.glob("*.log"))
    keys = [rehearsal.volume("admin") / "admin.key", *rehearsal.volume("node-1").glob("*.key")]
    secrets += [path.read_text().strip() for path in keys]
    for log in logs:
        text = log.read_text()
        assert not any(secret in text for secret in secrets), log.name
    rehearsal.say(f"{len(secrets)} secrets, in none of {len(logs)} logs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docker.rehearse", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one node instead of three")
    parser.add_argument("--prometheus", action="store_true", help="with a Prometheus of this machine's")
    parser.add_argument("--images", type=Path, help="folder of build_images.py: containers of built images, by crun")
    arguments = parser.parse_args()
    if not can_make_namespaces():
        parser.error("this needs root, and unshare, nsenter and ip (util-linux, iproute2)")
    enter_private_network("tests.docker.rehearse", sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="saltern-rehearsal-") as folder:
        Path(folder).chmod(0o711)
        engine = Crun(arguments.images) if arguments.images else Bubblewrap(Path(folder) / "images")
        nodes = SHORT if arguments.short else ALL
        rehearse(Path(folder), nodes, engine, with_prometheus=arguments.prometheus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
