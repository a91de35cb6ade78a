"""A browser without a screen: httpx with cookies, forms filled as the page has them, the headers that browsers send."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html.parser import HTMLParser

import httpx


class Forms(HTMLParser):
    """The forms of a page: for each action what its hidden and preset fields hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str]] = {}
        self._fields: dict[str, str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attributes}
        if tag == "form" and told.get("method") == "post":
            self._fields = self.found.setdefault(told["action"], {})
        elif tag == "input" and self._fields is not None and "name" in told:
            is_preset = told.get("type") not in {"radio", "checkbox"} or "checked" in told
            self._fields |= {told["name"]: told.get("value", "")} if is_preset else {}

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._fields = None


def forms_of(page: str) -> dict[str, dict[str, str]]:
    forms = Forms()
    forms.feed(page)
    return forms.found


class Browser:
    """One person at the console."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.http = client
        self.origin = str(client.base_url).rstrip("/")

    async def get(self, path: str, **options: object) -> httpx.Response:
        return await self.http.get(path, **options)  # type: ignore[arg-type]

    async def post(
        self, path: str, fields: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """A form that a page of the console sends; ``headers``: instead of what a browser says of it."""
        said = {"origin": self.origin, "sec-fetch-site": "same-origin"} if headers is None else dict(headers)
        return await self.http.post(path, data=dict(fields), headers=said)

    async def submit(self, page: str, action: str = "", **fields: str) -> httpx.Response:
        """Open ``page``, fill in its form and send it. ``action``: of the form, by default the page's own path."""
        action = action or page.partition("?")[0]
        shown = await self.get(page)
        assert shown.status_code == 200, (page, shown.status_code)
        return await self.post(action, forms_of(shown.text)[action] | fields)

    async def log_in(self, secret: str, **fields: str) -> httpx.Response:
        return await self.submit("/login", credential=secret, **fields)

    @property
    def cookie(self) -> str:
        return self.http.cookies.get("saltern-console") or ""


@asynccontextmanager
async def browser(
    url: str, secret: str = "", tls: ssl.SSLContext | None = None, *, address: str = "127.0.0.1"
) -> AsyncIterator[Browser]:
    """A browser at ``url``, logged in where there is a ``secret``.

    Args:
        tls: whom it trusts over https, and what it shows there.
        address: of this host, that it comes from.
    """
    way = httpx.AsyncHTTPTransport(verify=True if tls is None else tls, trust_env=False, local_address=address)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30, transport=way) as client:
        opened = Browser(client)
        if secret:
            answer = await opened.log_in(secret)
            assert answer.status_code == 303, answer.text
        yield opened
