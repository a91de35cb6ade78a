"""Every colour of a page, for paper and screens in the light and in the dark.

Lines keep a contrast of 4.5:1 to the page, like text, and stay apart for eyes that lack one kind of cone (a test
computes both); dashes and marks tell them apart without any colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Lines of one plot; more names than these are drawn as one line of *others*.
SERIES_MAX: Final = 6

LIGHT: Final[Mapping[str, str]] = {
    "paper": "#ffffff",
    "panel": "#f4f6f8",
    "ink": "#1b1f24",
    "soft": "#57606a",
    "line": "#d0d7de",
    "good": "#0a5a8a",
    "bad": "#a63200",
    "series-0": "#5511ff",
    "series-1": "#cc4422",
    "series-2": "#337777",
    "series-3": "#bb22bb",
    "series-4": "#660000",
    "series-5": "#332255",
    "saves-2": "#9ccbee",
    "saves-1": "#d3e9f8",
    "even": "#f2f2f2",
    "costs-1": "#fbe0c8",
    "costs-2": "#f3b483",
    "heat-0": "#ffffff",
    "heat-1": "#e3eef8",
    "heat-2": "#c3dcf2",
    "heat-3": "#a1c9eb",
    "heat-4": "#7fb5e3",
}
DARK: Final[Mapping[str, str]] = {
    "paper": "#14171b",
    "panel": "#1c2126",
    "ink": "#e6e9ed",
    "soft": "#a3adb8",
    "line": "#3a424b",
    "good": "#6cb8f0",
    "bad": "#ff9a6b",
    "series-0": "#2288ee",
    "series-1": "#dd5511",
    "series-2": "#33dd77",
    "series-3": "#eedd33",
    "series-4": "#888899",
    "series-5": "#bbddcc",
    "saves-2": "#0f4c75",
    "saves-1": "#1b3547",
    "even": "#2a2e33",
    "costs-1": "#4a3018",
    "costs-2": "#7a4410",
    "heat-0": "#14171b",
    "heat-1": "#1b2a38",
    "heat-2": "#1d3a54",
    "heat-3": "#1e4b73",
    "heat-4": "#1f5c92",
}

#: One for each line, beside its colour.
DASHES: Final = ("", "7 3", "2 3", "10 3 2 3", "4 2", "12 4")
#: Paths of marks around 0,0, one for each line: circle, square, triangle, diamond, triangle upside down, cross.
MARKS: Final = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",
    "M-3-3h6v6h-6z",
    "M0-4L3.8 3h-7.6z",
    "M0-4.2L4.2 0L0 4.2L-4.2 0z",
    "M0 4L3.8-3h-7.6z",
    "M-1.2-4h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8v-2.4h2.8z",
)


def variables(colours: Mapping[str, str]) -> str:
    """As custom properties of CSS."""
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
