"""Small charts of text: they need no colour, and a terminal that lacks the characters gets digits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_DIGITS: Final = "12345678"
#: Nothing was measured, or nothing happened.
_NOTHING: Final = "·"
_NOTHING_ASCII: Final = "."


def area_chart(values: Sequence[float], *, rows: int, top: float, encoding: str | None = None) -> list[str]:
    """Columns of blocks from the bottom, one for each value, as lines from the top one down; ``top`` fills a column."""
    lines = []
    for row in range(rows, 0, -1):
        parts = [max(0.0, min(1.0, value / top * rows - (row - 1))) for value in values]
        line = sparkline(parts, top=1.0, encoding=encoding)
        lines.append(line.replace(_NOTHING, " ").replace(_NOTHING_ASCII, " ").rstrip())
    return lines


def sparkline(values: Sequence[float | None], *, top: float | None = None, encoding: str | None = None) -> str:
    """One character for each value, from the lowest block for little to the highest for ``top``.

    Args:
        values: at least 0 each; None, and 0, are a dot.
        top: what fills a block; the largest value by default.
        encoding: of where it is shown; that of standard output by default.
    """
    blocks, nothing = _BLOCKS, _NOTHING
    try:
        (_BLOCKS + _NOTHING).encode(encoding or getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        blocks, nothing = _DIGITS, _NOTHING_ASCII
    full = top or max((value for value in values if value), default=0)
    return "".join(
        nothing if not value else blocks[min(len(blocks) - 1, int(value / full * len(blocks)))] for value in values
    )
