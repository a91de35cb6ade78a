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


def page_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of ``language`` of a whole page."""
    return [body for kind, body in _FENCE.findall((ROOT / page).read_text(encoding="utf-8")) if kind == language]


def commands(page: str, heading: str) -> list[str]:
    """The shell commands under ``heading``: lines that begin with ``$``, continued lines joined."""
    return _typed(blocks(page, heading, "console"))


def page_commands(page: str) -> list[str]:
    """The shell commands of a whole page."""
    return _typed(page_blocks(page, "console"))


def _typed(bodies: list[str]) -> list[str]:
    joined = "\n".join(bodies).replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
