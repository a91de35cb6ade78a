"""Tables as Markdown, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of GitHub's Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
