"""Reads the commands that the documentation tells people to type, so that tests can type them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, heading: str, language: str) -> list[str]:
    """The fenced blocks of ``language`` under ``heading`` of a page of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text[text.index(f"## {heading}\n") :]
    section = section[: section.find("\n## ", 1)]
    return [body for kind, body in _FENCE.findall(section) if kind == language]


def commands(page: str, heading: str) -> list[str]:
    """The shell commands under ``heading``: lines that begin with ``$``, continued lines joined."""
    joined = "\n".join(blocks(page, heading, "console")).replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
