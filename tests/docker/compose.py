"""The compose file as an engine sees it: variables filled in, services with their images, volumes and conditions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.docker.dockerfile import ROOT

COMPOSE = ROOT / "docker" / "compose.yaml"
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")


def fill_in(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}`` and ``$$`` replaced, as in compose.

    Raises:
        LookupError: a variable without a value that must have one.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if name is None:
            return "$"
        if environment.get(name):
            return environment[name]
        if kind == "-":
            return str(rest)
        raise LookupError(f"{name}: {rest or 'not set'}")

    return _VARIABLE.sub(value, text)


def read(environment: Mapping[str, str], path: Path = COMPOSE) -> dict[str, Any]:
    """The file with every variable filled in, everywhere but in names of keys."""

    def filled(node: object) -> object:
        match node:
            case dict():
                return {key: filled(value) for key, value in node.items()}
            case list():
                return [filled(value) for value in node]
            case str():
                return fill_in(node, environment)
        return node

    content = filled(yaml.safe_load(path.read_text()))
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True)
class Mount:
    """One mount of a service: a volume's name, or a path beside the compose file."""

    source: str
    target: str
    is_read_only: bool

    @property
    def is_volume(self) -> bool:
        return not self.source.startswith((".", "/"))

    @classmethod
    def parse(cls, text: str) -> Mount:
        source, target, *mode = text.split(":")
        return cls(source, target, mode == ["ro"])


def mounts(service: Mapping[str, Any]) -> list[Mount]:
    """The mounts of a service."""
    return [Mount.parse(text) for text in service.get("volumes", [])]


def read_env(path: Path) -> dict[str, str]:
    """A file of NAME=VALUE lines."""
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))
