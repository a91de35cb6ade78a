"""A page is well-formed, needs nothing but itself, takes no orders from names in traces, and can be read by all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import pytest

from saltern.replay.diff import compare_reports
from saltern.replay.html import diff_page, report_page
from saltern.replay.html.markup import Markup, element, join, printable
from saltern.replay.html.over_time import drawn_names, held_lines
from saltern.replay.html.page import style_sheet
from saltern.replay.html.palette import DARK, DASHES, LIGHT, MARKS, SERIES_MAX
from saltern.replay.html.plots import Line, Spread, dot_plot, line_plot
from saltern.replay.html.scales import linear, logarithmic, seconds_label, time_label, times
from saltern.replay.html.tenants import evictions
from saltern.replay.results import Column, ColumnResult, EngineKind, ReplayReport, Series, TenantResult
from tests.clients.replay.pages import Page, faults_of
from tests.clients.replay.reports import report

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</style><script>alert(1)</script>",
    "</title><svg onload=alert(1)>",
    "&lt;b&gt; & <!-- ]]>",
    "null\0 right\u202eleft \udcff \x1b[2J",
    "n" * 5000,
]


def pages_of(made: ReplayReport) -> list[str]:
    comparison = compare_reports(made, made, first_name=made.trace.name, second_name="B")
    return [report_page(made), diff_page(comparison)]


# ---- what every page is


@pytest.mark.parametrize("engine", list(EngineKind))
@pytest.mark.parametrize("columns", [tuple(Column), (Column.SHARED,), (Column.NO_CACHE,), ()])
def test_a_page_is_well_formed_and_needs_nothing_but_itself(engine: EngineKind, columns: Sequence[Column]) -> None:
    for content in pages_of(report(engine=engine, columns=columns)):
        assert faults_of(content) == []
        assert "http://" not in content


def test_names_in_traces_are_text_and_nothing_else() -> None:
    harmless = Page(report_page(report()))
    hostile = report(tenants=HOSTILE, name=HOSTILE[0], sha256=HOSTILE[1])
    hostile.ended, hostile.complete, hostile.program = HOSTILE[3], False, HOSTILE[4]
    for content in pages_of(hostile):
        assert faults_of(content) == []
        content.encode()
        shown = Page(content)
        assert {tag for tag, _ in shown.tags} <= {tag for tag, _ in harmless.tags} | {"li"}
        assert HOSTILE[0] in shown.text
        for unwanted in "\0\u202e\udcff\x1b":
            assert unwanted not in content


@pytest.mark.parametrize("engine", list(EngineKind))
def test_every_heading_caption_and_picture_says_which_engine(engine: EngineKind) -> None:
    other = next(kind for kind in EngineKind if kind is not engine)
    for content in pages_of(report(engine=engine)):
        shown = Page(content)
        assert all(title.lower().startswith(str(engine)) for title, _ in shown.pictures)
        headings = re.findall(r"<h2>(.*?)</h2>", content)
        assert headings
        assert all(engine.upper() in heading for heading in headings)
        captions = re.findall(r"<(?:caption|figcaption)>(.*?)</(?:caption|figcaption)>", content)
        assert captions
        assert all(str(engine) in one.lower() or "arithmetic" in one.lower() or one == "Made with" for one in captions)
        assert other.upper() not in content


def test_a_page_tells_what_it_rests_on_and_whether_it_pays() -> None:
    made = report()
    text = Page(report_page(made)).text
    for told in ("1234", "ab" * 32, "of small [nobody]", "reserved 1.07 GB", "saltern 0.0.0"):
        assert told in text
    assert made.costs
    for cost in made.costs:
        assert cost.pays
        assert cost.verdict in text
        assert "It flips if" in cost.verdict


def test_behind_every_picture_is_a_table_of_its_figures() -> None:
    content = report_page(report())
    shown = Page(content)
    # Five columns with nodes and three pictures each, and one of latencies.
    assert len(shown.pictures) == 16
    assert shown.count("details") == 16
    assert content.count("</details></figure>") == 16
    assert "between 0 and 0.5" in dict(shown.pictures)["Simulated: hit rate over time, column shared"]


def test_what_is_not_complete_says_so_first_and_last() -> None:
    made = report()
    made.complete, made.ended, made.columns[3].complete = False, "interrupted", False
    text = Page(report_page(made)).text
    assert text.count("Not complete (interrupted)") == 2
    assert "shared (part)" in text


# ---- markup


def test_only_elements_are_markup_and_all_else_is_escaped() -> None:
    assert element("p", "a<b", ["&", 3, None], element("b", '"')) == "<p>a&lt;b&amp;3<b>&quot;</b></p>"
    assert element("svg", viewBox="0 0 1 1", aria_hidden="true", class_='"', x=1.50, y=None, open=True) == (
        '<svg viewBox="0 0 1 1" aria-hidden="true" class="&quot;" x="1.5" open></svg>'
    )
    assert isinstance(join("<"), Markup)
    assert join("<", Markup("<br>")) == "&lt;<br>"
    assert printable("a\nb\tc\u2028\ue000é") == "a\nb\ufffdc\ufffd\ufffdé"


# ---- axes and plots


def test_ticks_are_round_numbers_that_hold_all_values() -> None:
    assert list(linear(1.0).ticks) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert linear(9.3).high == 10
    assert list(times(3600, 6).ticks) == [0, 600, 1200, 1800, 2400, 3000, 3600]
    assert times(10 * 86_400, 5).ticks[1] == 2 * 86_400
    assert (logarithmic([0.03, 4.0]).low, logarithmic([0.03, 4.0]).high) == (0.01, 10)
    assert logarithmic([0.1, 10]).place(1.0) == pytest.approx(0.5)
    assert linear(10).place(-3) == 0
    assert linear(10).place(30) == 1


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1.7e308, float("inf"), float("nan")])
def test_no_figure_breaks_an_axis(value: float) -> None:
    for scale in (linear(value), times(value), logarithmic([value]), logarithmic([])):
        assert scale.low < scale.high
        assert 2 <= len(scale.ticks) <= 40
        assert 0 <= scale.place(scale.high) <= 1


def test_times_are_written_in_the_largest_unit() -> None:
    assert [time_label(value) for value in (0, 0.25, 90, 5400, 86_400)] == ["0", "250 ms", "1.5 min", "1.5 h", "1 d"]
    assert [seconds_label(value) for value in (0, 0.002, 0.5, 1000)] == ["0 s", "2 ms", "0.5 s", "1,000 s"]


def test_a_gap_is_a_gap_and_a_lonely_value_is_seen() -> None:
    drawn = line_plot("k", "t", "d", [Line("a", [1.0, 1.0, None, 0.5])], step=1, label=str)
    path = re.search(r'<path d="(M[^"]*)" class="stroke">', drawn)
    assert path
    assert path[1].count("M") == 2
    assert drawn.count('class="mark"') == 1, "only the lonely one: there are no others to tell the line from"


def test_nothing_to_draw_is_no_fault() -> None:
    for lines in ([], [Line("a", [])], [Line("a", [None, None])]):
        assert "<svg" in line_plot("k", "t", "d", lines, step=1, label=str)
    assert "<svg" in dot_plot("k", "t", "d", ["m"], [Spread("a", [None]), Spread("b", [0.0])], label=str)


def test_a_target_is_drawn_where_it_is() -> None:
    near = dot_plot("k", "t", "d", ["m"], [Spread("a", [1.0])], label=seconds_label, target=0.1)
    far = dot_plot("k", "t", "d", ["m"], [Spread("a", [1.0])], label=seconds_label, target=10.0)
    assert "target 0.1 s" in near
    assert 'text-anchor="end">target' not in near
    assert 'text-anchor="end">target 10 s' in far


def test_many_tenants_are_drawn_as_one() -> None:
    one = Series(occupancy_bytes={f"t{number:02}": [number, number] for number in range(20)})
    other = Series(occupancy_bytes={"t03": [1000]})
    names = drawn_names([one, other], SERIES_MAX)
    assert names == ["t03", "t16", "t17", "t18", "t19"], "the same in every column"
    found = held_lines(one, names)
    assert [line.name for line in found] == [*names, "all others (15)"]
    assert [sum(filter(None, values)) for values in zip(*(line.values for line in found), strict=True)] == [
        sum(range(20))
    ] * 2
    assert [list(line.values) for line in held_lines(other, names)] == [[1000], [], [], [], []]
    assert drawn_names([other], SERIES_MAX) == ["t03"]
    assert faults_of(report_page(report(tenants=list(one.occupancy_bytes)))) == []


def test_who_evicted_whom_keeps_every_eviction() -> None:
    names = [f"t{number:02}" for number in range(30)]
    tenants = {loser: TenantResult(evicted_by=dict.fromkeys(names, 2) | {"x": 0}) for loser in names}
    counts, shown = evictions(ColumnResult(column=Column.SHARED, tenants=tenants))
    assert len(shown) == 12
    assert sum(counts.values()) == 2 * 30 * 30
    assert {name for pair in counts for name in pair} == set(shown)
    assert evictions(ColumnResult(column=Column.SHARED)) == ({}, [])


# ---- colours

_TEXTS = ("ink", "soft", "good", "bad")
_SHADES = tuple(name for name in LIGHT if name.startswith(("saves", "even", "costs", "heat")))
_LINES = tuple(f"series-{number}" for number in range(SERIES_MAX))
#: Eyes without one kind of cone, as matrices on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
_EYES: Mapping[str, Sequence[Sequence[float]]] = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear_rgb(colour: str) -> list[float]:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def contrast(one: str, other: str) -> float:
    """Of WCAG 2: from 1 to 21."""
    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted(
        sum(weight * part for weight, part in zip(weights, linear_rgb(colour), strict=True)) for colour in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: Sequence[float]) -> tuple[float, float, float]:
    """CIELAB of linear sRGB, white D65."""
    rows = ((0.4124, 0.3576, 0.1805, 0.9505), (0.2126, 0.7152, 0.0722, 1.0), (0.0193, 0.1192, 0.9505, 1.089))
    x, y, z = (sum(a * b for a, b in zip(row[:3], rgb, strict=True)) / row[3] for row in rows)
    bent: Callable[[float], float] = lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116  # noqa: E731
    return 116 * bent(y) - 16, 500 * (bent(x) - bent(y)), 200 * (bent(y) - bent(z))


def seen(colour: str, eye: str) -> tuple[float, float, float]:
    rgb = linear_rgb(colour)
    mixed = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in _EYES[eye]]
    return lab([min(1.0, max(0.0, part)) for part in mixed])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_by_4_5_to_1(theme: Mapping[str, str]) -> None:
    for name in (*_TEXTS, *_LINES):
        assert contrast(theme[name], theme["paper"]) >= 4.5, name
    for name in _TEXTS:
        assert contrast(theme[name], theme["panel"]) >= 4.5, name
    for name in _SHADES:
        assert contrast(theme["ink"], theme[name]) >= 4.5, name


@pytest.mark.parametrize("eye", _EYES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_stay_apart_for_every_eye(theme: Mapping[str, str], eye: str) -> None:
    for one, other in combinations(_LINES, 2):
        pairs = zip(seen(theme[one], eye), seen(theme[other], eye), strict=True)
        assert sum((a - b) ** 2 for a, b in pairs) ** 0.5 > 25, (one, other)


def test_lines_are_told_apart_without_colour() -> None:
    assert len(set(DASHES)) == len(set(MARKS)) == SERIES_MAX


def test_both_themes_have_every_colour_and_paper_is_light() -> None:
    assert LIGHT.keys() == DARK.keys()
    sheet = style_sheet()
    assert "@media screen and (prefers-color-scheme:dark)" in sheet
    assert "@media print" in sheet
    assert set(re.findall(r"var\(--([\w-]+)\)", sheet)) <= LIGHT.keys()
