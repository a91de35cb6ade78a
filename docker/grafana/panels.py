"""What a dashboard is made of, as Grafana wants it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
TAGS = ["saltern"]


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: (expression, legend).
        description: what it says, and what to do when it moves.
        unit: of Grafana: bytes, Bps, reqps, percentunit, s, short.
        kind: timeseries, stat or table.
        width: of 24.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    description: str
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    high: float | None = None

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.high is not None:
            steps.append({"color": "red", "value": self.high})
        defaults: dict[str, Any] = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.kind == "timeseries":
            defaults["custom"] = {
                "lineWidth": 1,
                "fillOpacity": 20 if self.stacked else 0,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "off" if self.high is None else "line"},
            }
        options: dict[str, Any] = {
            "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
            "table": {"showHeader": True},
        }[self.kind]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": options,
            "targets": [
                {
                    "refId": chr(ord("A") + at),
                    "datasource": SOURCE,
                    "expr": expression,
                    "legendFormat": legend,
                    "instant": self.kind == "table",
                    "range": self.kind != "table",
                    **({"format": "table"} if self.kind == "table" else {}),
                }
                for at, (expression, legend) in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: panels from left to right, row by row.

    Attributes:
        uid: part of links to it, so it never changes.
        variables: (name, query), beside the data source.
    """

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        placed, x, y, row = [], 0, 0, 0
        for number, panel in enumerate(self.panels, start=1):
            if x + panel.width > COLUMNS:
                x, y, row = 0, y + row, 0
            placed.append(panel.to_json(number, x, y))
            x, row = x + panel.width, max(row, panel.height)
        source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": TAGS,
            "schemaVersion": 39,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "time": {"from": "now-6h", "to": "now"},
            "refresh": "30s",
            "timezone": "browser",
            "templating": {"list": [source, *(_variable(name, query) for name, query in self.variables)]},
            "annotations": {"list": []},
            "links": [{"type": "dashboards", "title": "Saltern", "tags": TAGS, "asDropdown": True, "keepTime": True}],
            "panels": placed,
        }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.title(),
        "datasource": SOURCE,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def by(metric: str, label: str, *, of: str = "", over: str = "$__rate_interval") -> str:
    """Increments a second of a counter, summed by a label."""
    return f"sum by ({label}) (rate({metric}{of}[{over}]))"


def quantile(share: float, metric: str, label: str, *, of: str = "") -> str:
    """A quantile of a histogram, by a label."""
    labels = f"{label}, le" if label else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{of}[$__rate_interval])))"
