"""The table of threats in SECURITY.md, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_HEADER: Final = ["threat", "rule", "code", "tests"]
_QUOTED: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Threat:
    """One line: what somebody tries, the rules that forbid it, and the code and the tests that answer it.

    Attributes:
        code: ``path`` or ``path:name``. tests: ``path`` or ``path::name``.
    """

    text: str
    rules: tuple[str, ...]
    code: tuple[str, ...]
    tests: tuple[str, ...]


def threats_of(page: str) -> list[Threat]:
    """The lines of the one table whose columns are ``_HEADER``."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in page.splitlines() if row.startswith("|")]
    found = []
    for cells in rows[rows.index(_HEADER) + 2 :]:
        assert len(cells) == len(_HEADER), f"a bar too many or too few: {cells[0]}"
        text, rules, code, tests = cells
        found.append(
            Threat(text, tuple(re.split(r"[ ,]+", rules)), *(tuple(_QUOTED.findall(cell)) for cell in (code, tests)))
        )
    return found


THREATS: Final = threats_of((ROOT / "SECURITY.md").read_text())
