"""HTML that is escaped by construction: only :func:`element` makes :class:`Markup`, and it escapes all other text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable
from typing import Final

#: Elements without content or end.
_VOID: Final = frozenset({"br", "meta"})
#: Categories of characters that draw nothing, end lines, or turn the order of letters around.
_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def printable(text: str) -> str:
    """``text`` without characters that a page cannot hold or that change how their neighbours are read."""
    if text.isprintable():
        return text
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in _UNPRINTABLE else _REPLACEMENT for char in text
    )


def escape(text: str) -> Markup:
    """``text`` as HTML, for content and for attributes in double quotes."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def join(*children: Child) -> Markup:
    """Children one after the other; None is nothing, what is not :class:`Markup` is escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str | int):
            parts.append(escape(child if isinstance(child, str) else str(child)))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element.

    Args:
        name: as HTML and SVG spell it.
        children: its content, as :func:`join` takes it.
        attributes: ``_`` stands for ``-`` and one at the end is dropped; None and False leave an attribute out, True
            gives it no value, and floats are shortened, as coordinates need no more.
    """
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{told}>" if name in _VOID else f"<{name}{told}>{join(*children)}</{name}>")


def _text(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
