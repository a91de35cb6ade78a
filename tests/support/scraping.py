"""Reads what a node's metrics door serves, over a real socket."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(endpoint: str, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Response:
    """One request, one response."""
    connection = http.client.HTTPConnection(endpoint, timeout=30)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        return Response(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def readiness(endpoint: str) -> tuple[int, str, list[str]]:
    """What /readyz says: status, state, reasons."""
    response = ask(endpoint, "/readyz")
    return response.status, response.json["state"], [found["reason"] for found in response.json["reasons"]]


class Scrape:
    """A page of metrics, parsed."""

    def __init__(self, endpoint: str, *, openmetrics: bool = False, prefix: str = "saltern_node_") -> None:
        accept = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain"
        response = ask(endpoint, "/metrics", headers={"Accept": accept})
        assert response.status == 200
        self._prefix = prefix
        self.text = response.body.decode()
        parse = parse_openmetrics if openmetrics else parse_text
        self.metrics: list[Metric] = list(parse(self.text))
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in self.metrics
            for sample in metric.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """One sample, or None."""
        return self._samples.get((self._prefix + name, frozenset(labels.items())))

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels among theirs."""
        return sum(
            value
            for (found, found_labels), value in self._samples.items()
            if found == self._prefix + name and labels.items() <= dict(found_labels).items()
        )

    def label_values(self, label: str) -> set[str]:
        return {dict(labels)[label] for _, labels in self._samples if label in dict(labels)}
