"""What an expression asks for, and whether there is such a thing: metrics, labels, and values of labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import promql_parser as promql
import yaml

from controlplane.core.readiness import ReadyState
from dataplane.core.usage import DropReason, EvictionCause
from dataplane.metrics.catalog import FAMILIES, STANDARD_NAMES
from dataplane.metrics.health import HealthState
from dataplane.metrics.meters import OPERATIONS
from tests.docker.dockerfile import ROOT

RULES = ROOT / "docker" / "prometheus" / "rules"
#: What Prometheus adds to every series of a target.
TARGET = {"job", "instance", "namespace", "pod"}
_CONTROL_ROW = re.compile(r"^\| `(saltern_control_\w+)` \| (\w+) \| ([^|]*) \|", re.M)
_SSD_STATES = {"ok", "degraded", "read-only", "off"}
#: Values that a label can have, where the program knows them all.
VALUES: dict[str, set[str]] = {
    "cause": {cause.value for cause in EvictionCause},
    "operation": {operation.value for operation in OPERATIONS},
    "code": {code.name for code in grpc.StatusCode},
    "tier": {"dram", "ssd"},
    "state": {*HealthState, *ReadyState, *_SSD_STATES, "live", "lost"},
    "reason": {*(reason.value for reason in DropReason), "NODE_FULL"},
    "job": {"saltern-node", "saltern-control", "saltern-.*"},
}


@dataclass(frozen=True)
class Selector:
    """One selector: of what metric, and the labels with the values that it asks for."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


def parse(expression: str) -> promql.Expr:
    """``expression`` with Grafana's variables filled in, parsed; raises ValueError where it is not PromQL."""
    for name, value in (("$__rate_interval", "1m"), ("$__range", "1h")):
        expression = expression.replace(name, value)
    return promql.parse(expression)


def rules() -> list[dict[str, Any]]:
    """Every rule of every file."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def metrics() -> dict[str, set[str]]:
    """Labels of every metric that there is, recorded ones included, by the name that a query has to use."""
    found: dict[str, set[str]] = {"up": set()} | {name: set() for name in STANDARD_NAMES}
    for family in FAMILIES:
        found |= _series(family.exposed_name, family.kind, set(family.labels))
    page = (ROOT / "docs" / "metrics.md").read_text()  # a test of the control plane's holds it against what is exposed
    for name, kind, labels in _CONTROL_ROW.findall(page):
        found |= _series(name, kind, set(re.findall(r"`(\w+)`", labels)))
    for rule in rules():
        if "record" in rule:
            found[rule["record"]] = _output_labels(promql.parse(rule["expr"]))
    return found


def _series(name: str, kind: str, labels: set[str]) -> dict[str, set[str]]:
    if kind == "histogram":
        return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
    return {name: labels}


def _output_labels(expression: Any) -> set[str]:
    match expression:
        case promql.AggregateExpr():
            return set(expression.modifier.labels) if expression.modifier else set()
        case promql.BinaryExpr():
            return _output_labels(expression.lhs) | _output_labels(expression.rhs)
        case promql.ParenExpr():
            return _output_labels(expression.expr)
    return set()


def complaints(expression: str) -> list[str]:
    """What an expression asks for that is not there; empty for a good one."""
    known = metrics()
    return list(_complaints(parse(expression), known))


def _complaints(node: Any, known: dict[str, set[str]]) -> Iterator[str]:
    match node:
        case promql.VectorSelector():
            if node.name not in known:
                yield f"no metric {node.name}"
                return
            for matcher in node.matchers.matchers:
                if matcher.name not in known[node.name] | TARGET:
                    yield f"{node.name} has no label {matcher.name}"
                values = set(matcher.value.split("|")) - {"$tenant"}
                if matcher.name in VALUES and not values <= VALUES[matcher.name]:
                    yield f"{node.name}: {matcher.name} is never {values - VALUES[matcher.name]}"
        case promql.AggregateExpr():
            inner = {name for selector in selectors(node.expr) for name in known.get(selector.metric, set())}
            labels = set(node.modifier.labels) if node.modifier else set()
            if labels - inner - TARGET:
                yield f"{labels - inner - TARGET} is a label of nothing in {node.prettify()}"
            yield from _complaints(node.expr, known)
        case _:
            for child in _children(node):
                yield from _complaints(child, known)


def selectors(node: Any) -> Iterator[Selector]:
    """Every selector of a parsed expression."""
    if isinstance(node, promql.VectorSelector):
        yield Selector(node.name, tuple((matcher.name, matcher.value) for matcher in node.matchers.matchers))
    for child in _children(node):
        yield from selectors(child)


def _children(node: Any) -> list[Any]:
    match node:
        case promql.BinaryExpr():
            return [node.lhs, node.rhs]
        case promql.Call():
            return list(node.args)
        case promql.MatrixSelector():
            return [node.vector_selector]
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return [node.expr]
    return []
