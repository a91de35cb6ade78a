"""Tables of figures: plain ones, heat tables whose cells have a shade, and the one behind a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from saltern.replay.html.markup import Child, Markup, element, join


@dataclass(frozen=True, slots=True)
class Shaded:
    """A cell with a class of the style sheet; the shade repeats what its text says."""

    text: str
    shade: str


Cell = str | Shaded


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, class_: str = "figures") -> Markup:
    """Column headings, and rows whose first cell is their heading. Wide ones scroll by themselves."""
    body = [
        element("tr", element("th", _text(first), scope="row"), [_cell(one) for one in others])
        for first, *others in rows
    ]
    head = element("tr", [element("th", heading, scope="col") for heading in headings])
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", body), class_=class_)
    return element("div", whole, class_="scroll", tabindex=0, role="group", aria_label=caption)


def pairs(rows: Iterable[tuple[str, Child]]) -> Markup:
    """Names and what they are."""
    return element("dl", [join(element("dt", name), element("dd", value)) for name, value in rows])


def behind(plot: Markup, caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Markup:
    """A plot as a figure, with its caption and the figures that it was drawn from."""
    figures = element("details", element("summary", "Figures"), table(caption, headings, rows))
    return element("figure", element("figcaption", caption), plot, figures)


def _text(cell: Cell) -> str:
    return cell.text if isinstance(cell, Shaded) else cell


def _cell(cell: Cell) -> Markup:
    return element("td", _text(cell), class_=cell.shade if isinstance(cell, Shaded) else None)
