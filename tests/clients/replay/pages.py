"""Reads a page as a browser would, and says what is wrong with it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"br", "meta"}
#: Elements and attributes that run, load or send something.
_ACTIVE = {"script", "iframe", "object", "embed", "link", "base", "form", "img", "image", "use", "foreignobject"}


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        faults: whatever is not as it should be.
        text: of all elements but the style sheet.
        pictures: role, accessible name and description of each SVG that is not hidden.
    """

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pictures: list[tuple[str, str]] = []
        self.style = ""
        self._texts: list[str] = []
        self._by_id: dict[str, str] = {}
        self._labels: list[str] = []
        self._links: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(content)
        self.close()
        self.faults += [f"not closed: {name}" for name, _ in self._open]
        self.faults += [f"link to nowhere: {link}" for link in self._links if link not in self._by_id]
        for label in self._labels:
            title, description = (self._by_id.get(key, "") for key in label.split())
            self.pictures.append((title, description))

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if len(found) < len(attrs):
            self.faults.append(f"an attribute twice in {tag}")
        if tag in _ACTIVE or any(name.startswith("on") for name in found):
            self.faults.append(f"active: {tag} {found}")
        for name in ("src", "href", "xlink:href", "action", "srcset", "data", "style"):
            value = found.get(name)
            if value is not None:
                (self._links if value.startswith("#") else self.faults).append(value.removeprefix("#"))
        key = found.get("id")
        if key is not None and key in self._by_id:
            self.faults.append(f"id twice: {key}")
        if key is not None:
            self._by_id[key] = ""
        if tag == "svg" and found.get("aria-hidden") != "true":
            if found.get("role") != "img":
                self.faults.append("a picture without role")
            self._labels.append(found.get("aria-labelledby") or "missing missing")
        if tag not in _VOID:
            self._open.append((tag, key))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop()[0] != tag:
            self.faults.append(f"closed out of order: {tag}")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "style":
            self.style += data
            return
        self._texts.append(data)
        for _, key in self._open:
            if key is not None:
                self._by_id[key] += data


def faults_of(content: str) -> list[str]:
    """Everything that keeps a page from being well-formed, readable without a network, and safe."""
    page = Page(content)
    faults = list(page.faults)
    if not content.startswith("<!DOCTYPE html>\n<html"):
        faults.append("no doctype")
    policies = [found.get("content") for tag, found in page.tags if found.get("http-equiv")]
    if not policies or "default-src 'none'" not in (policies[0] or ""):
        faults.append("no content policy")
    if re.search(r"url\(|@import|expression|<", page.style):
        faults.append("the style sheet loads something")
    faults += [f"picture without title or description: {one}" for one in page.pictures if not all(one)]
    if page.count("table") + page.count("p") == 0:
        faults.append("nothing to read")
    return faults
