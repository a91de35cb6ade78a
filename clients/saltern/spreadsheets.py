"""CSV that somebody may open in a spreadsheet: text of strangers is shown there, and never run."""

from __future__ import annotations

from typing import Final

#: What spreadsheets take for the beginning of a formula (OWASP, "CSV Injection"), in full width too.
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001


def text_cell(text: str) -> str:
    """``text`` so that a spreadsheet shows it: with an apostrophe before what would be a formula."""
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
