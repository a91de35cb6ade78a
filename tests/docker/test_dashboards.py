"""Dashboards, rules and runbook: each asks for what is there, and each alert is explained where it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docker.dockerfile import ROOT
from tests.docker.promql import complaints, metrics, parse, rules, selectors

GRAFANA = ROOT / "docker" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
RUNBOOK = ROOT / "docs" / "runbook.md"
UNITS = {"short", "bytes", "Bps", "reqps", "percentunit", "s"}


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in FILES]


def expressions() -> list[tuple[str, str]]:
    """Every query of every panel, with where it is."""
    return [
        (f"{board['uid']}: {panel['title']}", target["expr"])
        for board in dashboards()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(GRAFANA / "build.py"), str(tmp_path)], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in FILES}, "run: python docker/grafana/build.py"
    assert len(made) == 5


def test_every_query_asks_for_metrics_and_labels_that_there_are() -> None:
    found = expressions()
    assert len(found) > 60
    wrong = {where: complaints(expression) for where, expression in found if complaints(expression)}
    assert not wrong


def test_every_rule_asks_for_metrics_and_labels_that_there_are() -> None:
    wrong = {rule.get("alert") or rule["record"]: complaints(rule["expr"]) for rule in rules()}
    assert not {name: found for name, found in wrong.items() if found}


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("rate(saltern_node_hits_total[5m])", "no metric saltern_node_hits_total"),
        ("sum by (user) (saltern_node_used_bytes)", "is a label of nothing"),
        ('saltern_node_used_bytes{cause="quota"}', "has no label cause"),
        ('rate(saltern_node_evictions_total{cause="neighbor"}[5m])', "is never"),
    ],
)
def test_a_query_that_asks_for_something_else_is_noticed(expression: str, complaint: str) -> None:
    (found,) = complaints(expression)
    assert complaint in found


def test_panels_have_a_place_of_their_own_a_unit_and_say_what_they_mean() -> None:
    for board in dashboards():
        assert board["schemaVersion"] >= 36 and board["uid"] and board["tags"] == ["saltern"]
        assert board["templating"]["list"][0]["name"] == "datasource"
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not taken & cells and place["x"] + place["w"] <= 24, panel["title"]
            taken |= cells
            assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"] in UNITS
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for variable in board["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert label in metrics()[metric]


def test_what_is_recorded_is_used_and_named_as_level_metric_operation() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = [expression for _, expression in expressions()] + [rule["expr"] for rule in rules()]
    used = {selector.metric for expression in asked for selector in selectors(parse(expression))}
    for_the_autoscaler = {"instance:saltern_node_neighbour_evicted_bytes:rate5m"}
    assert recorded - used == for_the_autoscaler
    assert all(re.fullmatch(r"(job|tenant|instance):saltern_\w+:\w+", name) for name in recorded)
    assert for_the_autoscaler.pop() in (ROOT / "docs" / "kubernetes.md").read_text()


def test_every_alert_has_its_entry_in_the_runbook_and_every_entry_its_alert() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    names = [rule["alert"] for rule in alerts]
    entries = re.findall(r"^## (Saltern\w+)$", RUNBOOK.read_text(), re.M)
    assert sorted(names) == sorted(entries) and len(set(names)) == len(names)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        entry = RUNBOOK.read_text().partition(f"## {rule['alert']}\n")[2].partition("\n## ")[0]
        assert f"**{rule['labels']['severity']}**" in entry, rule["alert"]
        for part in ("*Means*", "*Look*", "*Do*"):
            assert part in entry, (rule["alert"], part)


def test_every_alert_is_tried_by_promtool() -> None:
    tried = (ROOT / "docker" / "prometheus" / "tests" / "alerts.yml").read_text()
    for rule in rules():
        if "alert" in rule:
            assert f"alertname: {rule['alert']}\n" in tried, rule["alert"]
