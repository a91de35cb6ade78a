"""The manifests: valid by the API's schemas, within the restricted standard, and true to the programs they start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from controlplane.settings import load_settings
from dataplane.commands import serve_node
from dataplane.settings import NodeSettings
from saltern.sizes import parse_size
from tests.docker.manifests import (
    KUBERNETES,
    OVERLAYS,
    Object,
    containers,
    environment,
    may_talk,
    named,
    of_kind,
    rendered,
    target_of,
    workloads,
)
from tests.docker.options import unknown

#: The oldest with all that is used (sidecars, preStop sleep), and the newest that the validator knows.
VERSIONS = ("1.32", "1.37")
#: Resources of operators have no schema in a package that can be beside pytest: the fields used here are those that
#: their references name. `make test-docker` checks the first three against typed models of the operators' own schemas.
OPERATORS = {
    "Issuer": ("cert-manager.io/v1", {"selfSigned", "ca"}),
    "Certificate": (
        "cert-manager.io/v1",
        {
            "isCA",
            "commonName",
            "secretName",
            "duration",
            "renewBefore",
            "privateKey",
            "usages",
            "dnsNames",
            "issuerRef",
        },
    ),
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
    "Cluster": (
        "postgresql.cnpg.io/v1",
        {
            "instances",
            "imageName",
            "storage",
            "minSyncReplicas",
            "maxSyncReplicas",
            "affinity",
            "resources",
            "bootstrap",
            "managed",
            "monitoring",
        },
    ),
}
RESTRICTED_VOLUMES = {"configMap", "secret", "emptyDir", "projected", "downwardAPI", "persistentVolumeClaim"}


def test_every_object_is_valid_by_the_schema_of_its_kind() -> None:
    distinct = {json.dumps(item, sort_keys=True): item for overlay in OVERLAYS for item in rendered(overlay)}
    for item in distinct.values():
        if item["kind"] in OPERATORS:
            version, fields = OPERATORS[item["kind"]]
            assert item["apiVersion"] == version and set(item["spec"]) <= fields, item
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(item, version, strict=True)


def test_certificates_lead_to_their_authority_and_name_whom_they_are_for() -> None:
    issuers = {item["metadata"]["name"]: item["spec"] for item in of_kind("production", "Issuer")}
    certificates = {item["metadata"]["name"]: item["spec"] for item in of_kind("production", "Certificate")}
    assert all(spec["issuerRef"]["name"] in issuers for spec in certificates.values())
    assert issuers["saltern"]["ca"]["secretName"] == certificates["saltern-authority"]["secretName"]
    mounted = {
        volume["secret"]["secretName"]
        for _, _, pod in workloads("production")
        for volume in pod.get("volumes", ())
        if "secret" in volume
    }
    for name in ("saltern-control", "saltern-node"):
        assert certificates[name]["secretName"] in mounted
    node = _environment_of("production", "StatefulSet", "saltern-node")
    assert node["SALTERN_CONTROL"].partition(":")[0] in certificates["saltern-control"]["dnsNames"]
    host = node["SALTERN_NODE_ADVERTISE_HOST"].replace("$(SALTERN_NODE_ID)", "*")
    assert host.replace("$(POD_NAMESPACE)", "saltern") in certificates["saltern-node"]["dnsNames"]
    console = named("production", "Service", "saltern-console")["metadata"]["name"]
    assert f"{console}.saltern.svc" in certificates["saltern-control"]["dnsNames"]
    assert {"server auth", "client auth"} <= set(certificates["saltern-node"]["usages"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_within_the_restricted_standard_and_has_limits(overlay: str) -> None:
    for name, _, pod in workloads(overlay):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == 10001, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod) and not pod["enableServiceLinks"], name
        kinds = {kind for volume in pod.get("volumes", ()) for kind in volume if kind != "name"}
        assert kinds <= RESTRICTED_VOLUMES, name
        for container in containers(pod):
            inner = container["securityContext"]
            assert inner == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            for bound in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"][bound]), name
    labels = named(overlay, "Namespace", "saltern")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_bootstrap_job_has_a_token_and_it_opens_only_its_secrets(overlay: str) -> None:
    for name, _, pod in workloads(overlay):
        assert pod["automountServiceAccountToken"] == (name == "saltern-bootstrap")
        account = named(overlay, "ServiceAccount", pod["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
    (role,), (binding,) = of_kind(overlay, "Role"), of_kind(overlay, "RoleBinding")
    assert not of_kind(overlay, "ClusterRole", "ClusterRoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "saltern-bootstrap", "namespace": "saltern"}]
    for rule in role["rules"]:
        assert rule["resources"] == ["secrets"]
        assert rule["verbs"] == ["create"] or (rule["resourceNames"] and set(rule["verbs"]) <= {"get", "patch"})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_manifest_holds_a_secret(overlay: str) -> None:
    assert not of_kind(overlay, "Secret")
    for _, _, pod in workloads(overlay):
        for container in containers(pod):
            for entry in container.get("env", ()):
                if re.search(r"KEY_ENCRYPTION|PASSWORD|_URL$", entry["name"]) and "CHECKPOINT" not in entry["name"]:
                    assert "secretKeyRef" in entry["valueFrom"], entry["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_one_that_the_program_looks_at(overlay: str) -> None:
    for name, _, pod in workloads(overlay):
        for container in containers(pod):
            target = target_of(container).removesuffix("-rdma")
            assert not unknown(target, set(environment(container))), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_programs_accept_what_they_are_told(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in (_environment_of(overlay, "Deployment", "saltern-control"),):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        settings = load_settings()
        assert settings.listen.port == 7700 and settings.metrics_listen and settings.metrics_listen.port == 7704
        assert settings.console_listen and settings.console_listen.port == 7705
        assert (settings.tls_cert is not None) == (overlay != "minimal")
        assert settings.migration_database_url is None, "only the job that migrates has the owner's password"
    for key, value in _environment_of(overlay, "StatefulSet", "saltern-node").items():
        monkeypatch.setenv(key, value)
    with serve_node.make_context("node", []) as context:
        told = context.params
    dram_bytes = parse_size(told["dram_bytes"], what="DRAM")
    resources = _node(overlay)["resources"]["limits"]
    if told["huge_pages"] == "2MiB":
        assert _quantity(resources["hugepages-2Mi"]) >= dram_bytes
    else:
        assert _quantity(resources["memory"]) >= dram_bytes + 2**28
    assert (told["rdma_device"] == "off") == (overlay != "rdma")
    assert (told["ssd_dir"] is not None) == (overlay != "minimal")
    if told["ssd_dir"]:
        (claim,) = [item for item in _claims(overlay) if item["metadata"]["name"] == "ssd"]
        assert _quantity(claim["spec"]["resources"]["requests"]["storage"]) > parse_size(told["ssd_bytes"], what="SSD")
    paths = [mount["mountPath"] for mount in _node(overlay)["volumeMounts"]]
    for path in (told["state_dir"], told["api_key_file"], told["ssd_dir"], told["tls_cert"]):
        assert path is None or any(path.is_relative_to(mount) for mount in paths), path


def _environment_of(overlay: str, kind: str, name: str) -> dict[str, str]:
    return environment(named(overlay, kind, name)["spec"]["template"]["spec"]["containers"][0])


def _node(overlay: str) -> Object:
    found = named(overlay, "StatefulSet", "saltern-node")["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(found, dict)
    return found


def _claims(overlay: str) -> list[Object]:
    return list(named(overlay, "StatefulSet", "saltern-node")["spec"]["volumeClaimTemplates"])


def _quantity(text: str) -> int:
    return parse_size(f"{text}B", what="quantity") if text[-1].isalpha() else int(text)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_name_leads_somewhere(overlay: str) -> None:
    pods = {name: (metadata["labels"], pod) for name, metadata, pod in workloads(overlay)}
    for service in of_kind(overlay, "Service"):
        (pod,) = [pod for labels, pod in pods.values() if service["spec"]["selector"].items() <= labels.items()]
        names = {port["name"]: port["containerPort"] for of in containers(pod) for port in of.get("ports", ())}
        assert all(names[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    for item in of_kind(overlay, "PodDisruptionBudget"):
        assert any(item["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels, _ in pods.values())
    config_maps = {item["metadata"]["name"] for item in of_kind(overlay, "ConfigMap")}
    for name, (_, pod) in pods.items():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        claims = {claim["metadata"]["name"] for claim in _claims(overlay)} if name == "saltern-node" else set()
        for container in containers(pod):
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in volumes.keys() | claims, (name, mount)
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name") in config_maps | {None}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_keep_what_is_degraded_and_what_only_waits(overlay: str) -> None:
    for kind, name in (("Deployment", "saltern-control"), ("StatefulSet", "saltern-node")):
        container = named(overlay, kind, name)["spec"]["template"]["spec"]["containers"][0]
        # /readyz is 200 while degraded; /livez knows nothing of the database or of the control plane (I9).
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_the_time_that_it_needs_to_stop(overlay: str) -> None:
    drain_s = NodeSettings.__dataclass_fields__["drain_s"].default
    needs_s = {"saltern-node": 2 * drain_s, "saltern-control": 10.0}
    for name, _, pod in workloads(overlay):
        if name in needs_s:
            before_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert pod["terminationGracePeriodSeconds"] >= before_s + needs_s[name] + 20


def test_there_is_a_key_for_every_node_that_there_may_be() -> None:
    job = named("production", "Job", "saltern-bootstrap")["spec"]["template"]["spec"]
    told = environment(job["containers"][0])
    (scaler,) = of_kind("production", "HorizontalPodAutoscaler")
    assert scaler["spec"]["maxReplicas"] <= int(told["NODES_MAX"])
    assert scaler["spec"]["scaleTargetRef"]["name"] == told["NODE_NAME_PREFIX"]
    mounts = {mount["mountPath"]: mount for mount in _node("production")["volumeMounts"]}
    assert mounts["/run/saltern/node.key"]["subPathExpr"] == "$(SALTERN_NODE_ID)"


def test_no_control_plane_starts_before_the_bootstrap_job_is_done() -> None:
    pod = named("minimal", "Deployment", "saltern-control")["spec"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "bootstrapped"]
    assert volume["secret"]["secretName"] == "saltern-bootstrapped" and not volume["secret"].get("optional")
    assert '"saltern-bootstrapped"' in (KUBERNETES / "base" / "bootstrap.py").read_text()


def _pod(name: str) -> dict[str, Any]:
    label = "cnpg.io/cluster" if name == "saltern-database" else "app.kubernetes.io/name"
    return {"here": True, "namespace": {}, "pod": {label: name}}


def _elsewhere(**labels: str) -> dict[str, Any]:
    return {"namespace": {f"saltern.dev/{key}": value for key, value in labels.items()}, "pod": {}}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_what_must_talk_to_each_other_does(overlay: str) -> None:
    control, node, migrate = _pod("saltern-control"), _pod("saltern-node"), _pod("saltern-migrate")
    engine, monitoring, stranger = _elsewhere(client="true"), _elsewhere(monitoring="true"), _elsewhere()
    entrance = _elsewhere(console="true")

    def may(source: dict[str, Any], target: dict[str, Any], *port: Any) -> bool:
        return may_talk(overlay, source, target, *port)

    assert may(node, control, "grpc", 7700) and may(engine, control, "grpc", 7700)
    assert may(engine, node, "wire", 7701) and may(engine, node, "grpc", 7702)
    assert may(monitoring, node, "metrics", 7703) and may(monitoring, control, "metrics", 7704)
    assert may(entrance, control, "console", 7705)
    for source in (engine, monitoring, stranger, node, control, migrate):
        assert not may(source, control, "console", 7705)
    for port in (("grpc", 7700), ("metrics", 7704)):
        assert not may(entrance, control, *port)
    for source in (engine, stranger, node, control):
        assert not may(source, node, "metrics", 7703) and not may(source, control, "metrics", 7704)
    for source in (stranger, monitoring, control, node, migrate):
        assert not may(source, node, "wire", 7701) and not may(source, node, "grpc", 7702)
    for source in (stranger, monitoring, control, migrate):
        assert not may(source, control, "grpc", 7700)
    database = _pod("saltern-database") if overlay != "minimal" else _elsewhere()
    assert may(control, database, 5432) and may(migrate, database, 5432)
    assert not may(node, database, 5432)
    assert not may(node, stranger, 443)
    if overlay != "minimal":
        assert not may(engine, database, 5432) and not may(stranger, database, 5432)


def test_every_file_is_used_and_none_names_a_machine() -> None:
    used = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        used |= {file.parent / name for name in re.findall(r"[\w-]+\.(?:yaml|py)", file.read_text())}
    there = {path for path in KUBERNETES.rglob("*") if path.suffix in (".yaml", ".py")}
    assert {path for path in there if path.name != "kustomization.yaml"} <= used
    assert all(isinstance(path, Path) for path in there)
