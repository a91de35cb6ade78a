"""compose.yaml against its schema, against the code, and for what no service of it may do."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import jsonschema
import pytest

from dataplane.settings import NodeSettings
from tests.docker import compose
from tests.docker.dockerfile import ROOT
from tests.docker.options import unknown

SECRETS = (
    "POSTGRES_PASSWORD",
    "SALTERN_OWNER_PASSWORD",
    "SALTERN_APP_PASSWORD",
    "SALTERN_KEY_ENCRYPTION_KEY",
    "GRAFANA_PASSWORD",
)
ENVIRONMENT = {name: f"value-of-{name}" for name in SECRETS}
NODES = ("node-1", "node-2", "node-3")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found = compose.read(ENVIRONMENT)["services"]
    assert isinstance(found, dict)
    return found


def ours(service: dict[str, Any]) -> str:
    """The target of the Dockerfile that a service is; empty for others' images."""
    return str(service["build"]["target"]) if "build" in service else ""


def test_the_file_is_as_the_compose_specification_says() -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(compose.read(ENVIRONMENT))


@pytest.mark.parametrize("missing", SECRETS)
def test_without_one_of_its_secrets_nothing_starts(missing: str) -> None:
    with pytest.raises(LookupError, match=missing):
        compose.read({name: value for name, value in ENVIRONMENT.items() if name != missing})


def test_no_secret_is_in_any_file_here() -> None:
    literal = re.compile(r"sk-saltern-|bootstrap-saltern-[\w-]{8}|[0-9a-f]{32}|BEGIN [A-Z ]*PRIVATE KEY")
    for path in (ROOT / "docker").rglob("*"):
        if path.is_file() and not path.name.startswith(".env"):
            assert not literal.search(path.read_text()), path
    assert ".env" in (ROOT / "docker" / ".gitignore").read_text().split()


def test_each_service_gets_the_secrets_that_it_needs_and_no_other(services: dict[str, dict[str, Any]]) -> None:
    needed = {
        "postgres": {"POSTGRES_PASSWORD", "SALTERN_OWNER_PASSWORD", "SALTERN_APP_PASSWORD"},
        "control-1": {"SALTERN_OWNER_PASSWORD", "SALTERN_APP_PASSWORD", "SALTERN_KEY_ENCRYPTION_KEY"},
        "control-2": {"SALTERN_OWNER_PASSWORD", "SALTERN_APP_PASSWORD", "SALTERN_KEY_ENCRYPTION_KEY"},
        "grafana": {"GRAFANA_PASSWORD"},
    }
    for name, service in services.items():
        text = json.dumps(service)
        assert {secret for secret in SECRETS if f"value-of-{secret}" in text} == needed.get(name, set()), name


def test_every_variable_is_one_that_the_program_looks_at(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if target := ours(service):
            assert not unknown(target, set(service.get("environment", {}))), name


def test_ours_have_a_read_only_root_and_no_rights_to_lose(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if name in ("postgres", "vllm"):
            continue  # images that change to their own user, or need a GPU and a folder to compile in
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged") and "network_mode" not in service, name


def test_nothing_is_published_beyond_this_host(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_images_of_others_have_a_tag_that_says_which(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if not ours(service):
            assert re.search(r":v?\d+\.\d+", service["image"]), name


def test_what_is_mounted_from_here_is_here_and_every_volume_is_declared(services: dict[str, dict[str, Any]]) -> None:
    declared = set(compose.read(ENVIRONMENT)["volumes"])
    used = set()
    for service in services.values():
        for mount in compose.mounts(service):
            if mount.is_volume:
                used.add(mount.source)
            else:
                assert (ROOT / "docker" / mount.source).exists() and mount.is_read_only, mount
    assert used == declared


def test_the_key_of_a_node_is_seen_by_that_node_alone(services: dict[str, dict[str, Any]]) -> None:
    for node in NODES:
        seen = {
            name for name, service in services.items() if node in {mount.source for mount in compose.mounts(service)}
        }
        assert seen == {node, f"{node}-key"}
    admins = {name for name, of in services.items() if "admin" in {mount.source for mount in compose.mounts(of)}}
    assert admins == {"admin-key", "cli", "vllm-key", *(f"{node}-key" for node in NODES)}


def test_a_node_has_the_time_that_it_needs_to_stop(services: dict[str, dict[str, Any]]) -> None:
    drain_s = NodeSettings.__dataclass_fields__["drain_s"].default
    for node in NODES:
        # To drain, to seal segments, and a second for each million entries.
        assert float(services[node]["stop_grace_period"].removesuffix("s")) >= 2 * drain_s + 10


def test_every_dependency_is_a_service_with_what_is_waited_for(services: dict[str, dict[str, Any]]) -> None:
    checked = {"control-1", "control-2", *NODES, "postgres"}
    for service in services.values():
        for other, terms in service.get("depends_on", {}).items():
            assert other in services
            if terms["condition"] == "service_healthy":
                assert other in checked
            else:
                assert services[other]["restart"] == "no"
