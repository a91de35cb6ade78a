"""What a process of each kind can be told by its environment: read from the code, so no file can name another."""

from __future__ import annotations

import re

from controlplane.settings import ControlSettings
from dataplane.commands import serve_node
from tests.docker.dockerfile import ROOT

_NAME = re.compile(r"\bSALTERN_[A-Z0-9_]+\b")


def control_variables() -> set[str]:
    """Names that ``saltern serve control`` looks at."""
    names = set()
    for field in ControlSettings.model_fields.values():
        names |= {str(choice) for choice in getattr(field.validation_alias, "choices", [])}
    return names | {"SALTERN_KEY_ENCRYPTION_KEY"}


def node_variables() -> set[str]:
    """Names that ``saltern serve node`` looks at."""
    return {str(option.envvar) for option in serve_node.params if getattr(option, "envvar", None)}


def client_variables() -> set[str]:
    """Names that the command line and the SDK look at."""
    files = (ROOT / "clients" / "saltern").rglob("*.py")
    return {name for file in files for name in _NAME.findall(file.read_text())}


#: By target of the Dockerfile; a job that migrates is of the target control.
VARIABLES = {
    "control": control_variables,
    "node": node_variables,
    "cli": client_variables,
    "vllm": client_variables,
}


def unknown(target: str, names: set[str]) -> set[str]:
    """Those of ``names`` that begin with ``SALTERN_`` and that the program of that image does not look at."""
    return {name for name in names if name.startswith("SALTERN_")} - VARIABLES[target]()
