"""The overlays of docker/kubernetes as kubectl renders them, and what may talk to what by their NetworkPolicies."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.docker.dockerfile import ROOT

KUBERNETES = ROOT / "docker" / "kubernetes"
OVERLAYS = ("minimal", "production", "rdma")
Object = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Object, ...]:
    """Every object of an overlay."""
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [str(kubectl), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return tuple(yaml.safe_load_all(result.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [item for item in rendered(overlay) if item["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Object:
    (found,) = [item for item in of_kind(overlay, kind) if item["metadata"]["name"] == name]
    return found


def workloads(overlay: str) -> Iterator[tuple[str, Object, Object]]:
    """Name, pod template's metadata and pod specification of everything that runs pods."""
    for item in of_kind(overlay, "Deployment", "StatefulSet", "Job"):
        template = item["spec"]["template"]
        yield item["metadata"]["name"], template["metadata"], template["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def target_of(container: Object) -> str:
    """The target of the Dockerfile that a container's image is."""
    return str(container["image"].rpartition("/saltern-")[2].partition(":")[0])


def environment(container: Object) -> dict[str, str]:
    """Its variables, with a word in place of each that a Secret or the pod itself gives."""
    return {entry["name"]: entry.get("value", f"from-{entry['name']}") for entry in container.get("env", ())}


def may_talk(
    overlay: str, source: Mapping[str, Any], target: Mapping[str, Any], port: int | str, number: int | None = None
) -> bool:
    """Whether the NetworkPolicies of the namespace let ``source`` open a connection to ``target`` at ``port``.

    Args:
        source, target: ``{"namespace": labels, "pod": labels}``; one of the two, at least, in this namespace, which has
            the key ``here``.
        number: of the port, where ``port`` is its name.
    """
    ports = {port, number}
    policies = [item["spec"] for item in of_kind(overlay, "NetworkPolicy")]
    for side, peer, rule_name, peers in ((source, target, "egress", "to"), (target, source, "ingress", "from")):
        if not side.get("here"):
            continue
        binding = [
            policy
            for policy in policies
            if rule_name.title() in policy["policyTypes"] and _selects(policy["podSelector"], side["pod"])
        ]
        rules = [rule for policy in binding for rule in policy.get(rule_name, ())]
        if binding and not any(
            any(entry["port"] in ports for entry in rule.get("ports", [{"port": port}]))
            and (peers not in rule or any(_is_peer(entry, peer) for entry in rule[peers]))
            for rule in rules
        ):
            return False
    return True


def _is_peer(entry: Object, peer: Mapping[str, Any]) -> bool:
    if "namespaceSelector" in entry:
        if not _selects(entry["namespaceSelector"], peer["namespace"]):
            return False
    elif not peer.get("here"):
        return False
    return "podSelector" not in entry or _selects(entry["podSelector"], peer["pod"])


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    matches = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        matches = matches and labels.get(expression["key"]) in expression["values"]
    return matches
