"""The page around a report: head, style sheet and the label of the engine. No script, no link, no request."""

from __future__ import annotations

from typing import Final

from saltern.replay.html.markup import Markup, element, join
from saltern.replay.html.palette import DARK, LIGHT, SERIES_MAX, variables

#: Nothing is loaded, sent or run, whatever a name in a trace may have smuggled in.
CONTENT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_RULES: Final = """
*{box-sizing:border-box}
html{color-scheme:light dark;background:var(--paper);color:var(--ink);-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:75rem;padding:1.5rem clamp(.8rem,3vw,2.5rem) 4rem;
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.7rem;line-height:1.25;margin:.2rem 0 .4rem}
h2{font-size:1.25rem;margin:2.6rem 0 .8rem;padding-top:.7rem;border-top:2px solid var(--line)}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem}
p{margin:.4rem 0 .8rem;max-width:75ch}
.soft,figcaption,caption{color:var(--soft)}
.engine{display:inline-block;font-size:.72rem;font-weight:700;letter-spacing:.06em;line-height:1.5;
border:1.5px solid var(--ink);border-radius:.3rem;padding:0 .4rem;margin-right:.5rem;vertical-align:.12em;
color:var(--ink);white-space:nowrap}
.engine.measured{background:var(--ink);color:var(--paper)}
.warning{border:2px solid var(--bad);border-radius:.4rem;padding:.6rem .9rem;margin:1rem 0}
.verdicts{list-style:none;margin:0;padding:0;display:grid;gap:.7rem}
.verdicts li{background:var(--panel);border-left:.35rem solid var(--soft);border-radius:.2rem;padding:.6rem .9rem}
.verdicts li.pays{border-color:var(--good)}
.verdicts li.loses{border-color:var(--bad)}
.verdicts strong{margin-right:.4rem}
.pays strong{color:var(--good)}
.loses strong{color:var(--bad)}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:1rem 0}
a{color:var(--good)}
.scroll{overflow-x:auto}
:focus-visible{outline:2px solid var(--good);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:.4rem 0 1rem;
overflow-wrap:normal}
caption{text-align:left;padding-bottom:.4rem;font-size:.9rem;max-width:min(100%,calc(100vw - 2rem))}
th,td{padding:.22rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child{text-align:left;padding-left:0}
tbody th{font-weight:400;white-space:pre-wrap;min-width:9rem;max-width:22rem;overflow-wrap:anywhere}
thead th{color:var(--soft);vertical-align:bottom}
tbody tr:hover{background:var(--panel)}
table.heat td{text-align:center;min-width:4.2rem;border:1px solid var(--paper);white-space:normal}
table.heat thead th{text-align:center;white-space:normal;max-width:9rem;overflow-wrap:anywhere}
table.heat thead th:first-child{text-align:left}
table.text td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.text th{text-align:left}
table.text tbody th,table.text td{min-width:8rem;vertical-align:top}
.below{font-weight:700;text-decoration:underline;text-underline-offset:.2em}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(22rem,100%),1fr));gap:1.2rem 1.6rem}
.panels>*{min-width:0}
figure{margin:0 0 1rem}
figcaption{font-size:.92rem;margin-bottom:.2rem}
.wide figure{max-width:42rem}
figure svg{display:block;width:100%;height:auto}
figure .scroll>svg{min-width:20rem}
.wide .scroll>svg{min-width:32rem}
svg text{font-size:12px;fill:var(--soft)}
svg text.name{fill:var(--ink);font-size:13px}
.grid{stroke:var(--line);stroke-width:1}
.tick,.span{stroke:var(--soft);stroke-width:1.2}
.target{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 3}
.stroke{fill:none;stroke-width:1.8;stroke-linejoin:round}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;margin:.2rem 0 .4rem;padding:0;font-size:.85rem}
.legend svg{display:inline-block;width:36px;height:14px;margin-right:.4rem;vertical-align:-2px}
details{font-size:.9rem}
summary{cursor:pointer;color:var(--soft);width:max-content}
details .scroll{max-height:24rem;overflow:auto}
dl{display:grid;grid-template-columns:minmax(9rem,16rem) 1fr;gap:.3rem 1.2rem;margin:.5rem 0;font-size:.92rem}
dt{color:var(--soft);white-space:pre-wrap}
dd{margin:0;white-space:pre-line}
@media (max-width:40rem){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}h1{font-size:1.35rem}
th,td{padding:.22rem .45rem}tbody th{min-width:7rem}}
@media print{
body{max-width:none;padding:0;font-size:10pt}
nav,details{display:none}
h2,h3,figcaption,caption{break-after:avoid}
figure,.verdicts li,tr,dl>*{break-inside:avoid}
.scroll{overflow:visible}
table{font-size:8pt}th,td{padding:.12rem .35rem}thead th{white-space:normal}tbody th{min-width:0}
table.heat td{min-width:0}
.panels{grid-template-columns:1fr 1fr}
figure .scroll>svg,.wide .scroll>svg{min-width:0}
table.heat td,.verdicts li{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
@page{margin:14mm}
"""


def style_sheet() -> str:
    """All of it. Paper is always light; screens are as their owner has set them."""
    lines = "".join(
        f".s{number} .stroke{{stroke:var(--series-{number})}}.s{number} .mark{{fill:var(--series-{number})}}"
        for number in range(SERIES_MAX)
    )
    shades = "".join(
        f".{name}{{background:var(--{name})}}" for name in LIGHT if name.startswith(("saves", "even", "costs", "heat"))
    )
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    return f":root{{{variables(LIGHT)}}}{dark}{_RULES}{lines}{shades}"


def page(title: str, body: Markup) -> str:
    """A whole document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=CONTENT_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        # Made of constants of this package, in which there is no "<"; escaping would break its quotes.
        element("style", Markup(style_sheet())),
    )
    return join(Markup("<!DOCTYPE html>\n"), element("html", head, element("body", body), lang="en"), "\n")


def engine_label(kind: str) -> Markup:
    """*SIMULATED* or *MEASURED*, beside every heading and caption: figures of one are never read as the other's."""
    return element("span", kind.upper(), class_="engine measured" if kind == "measured" else "engine")


def section(key: str, kind: str, title: str, *children: Markup | str | None) -> Markup:
    """A part of the page with the engine's label in its heading."""
    return element("section", element("h2", engine_label(kind), title), children, id=key, aria_label=title)


def contents(sections: list[tuple[str, str]]) -> Markup:
    """Links to the sections of the page: (key, title) of each."""
    entries = [element("li", element("a", title, href=f"#{key}")) for key, title in sections]
    return element("nav", element("ul", entries), aria_label="On this page")
