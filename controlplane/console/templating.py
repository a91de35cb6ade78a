"""Templates and assets, read once. Everything that a template prints is escaped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

_PACKAGE: Final = "controlplane.console"
_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_VERSION_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages refer to. ``version``: changes with its content, so that browsers may keep it."""

    content: bytes
    content_type: str
    version: str


def read_assets() -> Mapping[str, Asset]:
    """Every asset, by the name that it has in its URL."""
    assets = {}
    for file in files(_PACKAGE).joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _CONTENT_TYPES:
            content = file.read_bytes()
            version = hashlib.sha256(content).hexdigest()[:_VERSION_CHARS]
            assets[file.name] = Asset(content, _CONTENT_TYPES[suffix], version)
    return assets


def make_environment(assets: Mapping[str, Asset]) -> Environment:
    """The templates; ``asset(name)`` in them is the URL of an asset. A name that is not given is a fault of ours."""
    environment = Environment(
        loader=PackageLoader(_PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["breaking"] = _breaking
    environment.globals["asset"] = lambda name: f"/static/{name}?v={assets[name].version}"
    return environment


def _breaking(name: str) -> Markup:
    """A resource name that may go on in the next line after each slash."""
    return Markup("/<wbr>").join(map(escape, name.split("/")))
