"""Plots as inline SVG: lines over time, and marks along an axis. Each has a title, a description and a legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.palette import DASHES, MARKS, SERIES_MAX
from saltern.replay.html.scales import Scale, linear, logarithmic, time_label, times

#: Marks on one line, so that it is told from others without colour.
_MARKS_A_LINE: Final = 8
_NAME_CHARS_MAX: Final = 28
_ROW_HEIGHT: Final = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """Values at equal steps from 0 on; None is a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Spread:
    """One row of marks, in the order of the marks' names; None is left out."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class _Frame:
    """A picture, and the rectangle in it where values stand."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    def x(self, share: float) -> float:
        return self.left + share * (self.right - self.left)

    def y(self, share: float) -> float:
        return self.bottom - share * (self.bottom - self.top)


def shortened(name: str) -> str:
    """A name that fits beside a plot; tables have all of it."""
    return name if len(name) <= _NAME_CHARS_MAX else name[: _NAME_CHARS_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"


def line_plot(
    key: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    *,
    step: float,
    label: Callable[[float], str],
    top: float | None = None,
    across: Callable[[float, int], Scale] = times,
    across_label: Callable[[float], str] = time_label,
) -> Markup:
    """Lines over time, or over something else, with a legend where there are several.

    Args:
        key: unique on the page; letters, digits and dashes.
        lines: at most :data:`SERIES_MAX`.
        step: from one value to the next, in seconds where lines go over time.
        label: writes a value beside the axis.
        top: the highest value of the axis; as the values need by default.
        across, across_label: the axis that lines go along, up to a value and with about so many ticks.
    """
    assert len(lines) <= SERIES_MAX
    frame = _Frame(380, 190, 66, 370, 12, 162)
    known = [value for line in lines for value in line.values if value is not None]
    upward = linear(max(known, default=0.0) if top is None else top)
    along = across(step * max((len(line.values) for line in lines), default=1), 5)
    drawn = [
        _line(
            number,
            [
                None if value is None else (frame.x(along.place(at * step)), frame.y(upward.place(value)))
                for at, value in enumerate(line.values)
            ],
            has_marks=len(lines) > 1,
        )
        for number, line in enumerate(lines)
        if any(value is not None for value in line.values)
    ]
    axes = [_horizontal_grid(frame, upward, label), _vertical_ticks(frame, along, across_label)]
    legend = _legend([line.name for line in lines]) if len(lines) > 1 else None
    return join(_picture(key, title, description, frame, [*axes, *drawn]), legend)


def _line(number: int, points: Sequence[tuple[float, float] | None], *, has_marks: bool) -> Markup:
    path: list[str] = []
    marked: list[tuple[float, float]] = []
    every = max(1, len(points) // _MARKS_A_LINE)
    for at, point in enumerate(points):
        if point is None:
            continue
        is_first = at == 0 or points[at - 1] is None
        is_last = at + 1 == len(points) or points[at + 1] is None
        path.append(f"{'M' if is_first else 'L'}{point[0]:.1f} {point[1]:.1f}")
        # A point without neighbours would not be seen at all. Lines begin their marks one after the other, so that
        # those which lie upon each other still show theirs.
        is_marked = has_marks and (at + number * every // SERIES_MAX) % every == 0
        if is_marked or (is_first and is_last):
            marked.append(point)
    return element(
        "g",
        element("path", d="".join(path), stroke_dasharray=DASHES[number] or None, class_="stroke"),
        [_mark(number, x, y) for x, y in marked],
        class_=f"s{number}",
    )


def dot_plot(
    key: str,
    title: str,
    description: str,
    marks: Sequence[str],
    rows: Sequence[Spread],
    *,
    label: Callable[[float], str],
    top: float | None = None,
    target: float | None = None,
) -> Markup:
    """One row for each name, with a mark for each of its values.

    Args:
        marks: names of the marks, at most :data:`SERIES_MAX`.
        top: the axis goes from 0 to it; logarithmic by default.
        target: a value to draw a line at.
    """
    assert len(marks) <= SERIES_MAX
    known = [value for row in rows for value in row.values if value is not None]
    across = linear(top) if top is not None else logarithmic(known if target is None else [*known, target])
    bottom = 24 + _ROW_HEIGHT * max(1, len(rows))
    frame = _Frame(640, bottom + 30, 150, 620, 24, bottom)
    drawn = [_vertical_grid(frame, across, label)]
    if target is not None:
        x = frame.x(across.place(target))
        at_right = x < frame.right - 120
        drawn += [
            element("path", d=f"M{x:.1f} {frame.top}V{frame.bottom}", class_="target"),
            element(
                "text",
                f"target {label(target)}",
                x=x + (5 if at_right else -5),
                y=16,
                text_anchor=None if at_right else "end",
            ),
        ]
    for number, row in enumerate(rows):
        y = frame.top + _ROW_HEIGHT * (number + 0.5)
        at = [None if value is None else frame.x(across.place(value)) for value in row.values]
        ends = [x for x in at if x is not None]
        drawn.append(element("text", shortened(row.name), x=frame.left - 12, y=y + 4, text_anchor="end", class_="name"))
        if ends:
            drawn.append(element("path", d=f"M{min(ends):.1f} {y}H{max(ends):.1f}", class_="span"))
        drawn += [element("g", _mark(mark, x, y), class_=f"s{mark}") for mark, x in enumerate(at) if x is not None]
    return join(_picture(key, title, description, frame, drawn), _legend(marks, has_lines=False))


def _picture(key: str, title: str, description: str, frame: _Frame, children: Sequence[Markup]) -> Markup:
    return element(
        "div",
        element(
            "svg",
            element("title", title, id=f"{key}-title"),
            element("desc", description, id=f"{key}-desc"),
            *children,
            viewBox=f"0 0 {frame.width:g} {frame.height:g}",
            role="img",
            aria_labelledby=f"{key}-title {key}-desc",
        ),
        class_="scroll",
        tabindex=0,
        role="group",
        aria_label=title,
    )


def _horizontal_grid(frame: _Frame, scale: Scale, label: Callable[[float], str]) -> Markup:
    placed = [(value, frame.y(scale.place(value))) for value in scale.ticks]
    return join(
        *(element("path", d=f"M{frame.left} {y:.1f}H{frame.right}", class_="grid") for _, y in placed),
        *(element("text", label(value), x=frame.left - 8, y=y + 4, text_anchor="end") for value, y in placed),
    )


def _vertical_ticks(frame: _Frame, scale: Scale, label: Callable[[float], str]) -> Markup:
    placed = [(value, frame.x(scale.place(value))) for value in scale.ticks]
    return join(
        *(element("path", d=f"M{x:.1f} {frame.bottom}v4", class_="tick") for _, x in placed),
        *(element("text", label(value), x=x, y=frame.bottom + 19, text_anchor="middle") for value, x in placed),
    )


def _vertical_grid(frame: _Frame, scale: Scale, label: Callable[[float], str]) -> Markup:
    lines = (
        element("path", d=f"M{frame.x(scale.place(value)):.1f} {frame.top}V{frame.bottom}", class_="grid")
        for value in scale.ticks
    )
    return join(*lines, _vertical_ticks(frame, scale, label))


def _mark(number: int, x: float, y: float) -> Markup:
    return element("path", d=MARKS[number], transform=f"translate({x:.1f} {y:.1f})", class_="mark")


def _legend(names: Sequence[str], *, has_lines: bool = True) -> Markup:
    """Names with a sample of each line; the sample says nothing to who cannot see it, so it is hidden from them."""
    entries = []
    for number, name in enumerate(names):
        line = element("path", d="M1 7H35", stroke_dasharray=DASHES[number] or None, class_="stroke")
        sample = element(
            "svg",
            element("g", line if has_lines else None, _mark(number, 18, 7), class_=f"s{number}"),
            viewBox="0 0 36 14",
            aria_hidden="true",
        )
        entries.append(element("li", sample, shortened(name)))
    return element("ul", entries, class_="legend")
