"""The console in a real Chromium: the main tasks of each role, light and dark, wide and narrow.

    python -m tests.console [--screenshots FOLDER] [--browser /usr/bin/chromium]

Every page must be free of messages on the browser's console, of scripts and styles that the policy refused, of requests
to other hosts and of anything that makes the page wider than the window; every task is done by what people use: labels,
buttons, links.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, Request, async_playwright

from controlplane.postgres import EmbeddedPostgres, PostgresConfig
from saltern.endpoints import Endpoint
from tests.conftest import SessionPostgres, _reachable_folder
from tests.support.console_data import fill
from tests.support.control import control_plane, migrate

PRICES: Final = {
    "currency": "EUR",
    "dram_per_gib_hour": "0.004",
    "ssd_per_gib_hour": "0.0001",
    "moved_per_gib": "0.01",
    "prefill_per_million_tokens": "0.15",
}
WIDTHS: Final = (1280, 390)
SCHEMES: Final = ("light", "dark")
PAGES: Final = {
    "acme/admin": (
        "/tenants/acme?period=31d", "/tenants/acme/cost", "/tenants/acme/keys", "/tenants/acme/keys/new",
        "/tenants/acme/keys/eval-reader/delete", "/tenants/acme/salts", "/tenants/acme/salts/rotate?grace=none",
        "/tenants/acme/sharing", "/tenants/acme/audit", "/tenants/beta",
    ),
    "acme/auditor": ("/tenants/acme", "/tenants/acme/keys", "/tenants/acme/audit"),
    "platform": ("/tenants", "/nodes", "/policy", "/keys", "/audit"),
}  # fmt: skip
#: Said by the browser of an answer that is an error page, as it should be.
_EXPECTED: Final = re.compile(r"status of 404")


class Visitor:
    """A page of the browser, with what it complained of."""

    def __init__(self, page: Page, url: str, faults: list[str]) -> None:
        self.page = page
        self.url = url
        self.faults = faults
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
        page.on("request", self._look_at)

    def _note(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not _EXPECTED.search(text):
            self.faults.append(f"{self.page.url}: {text}")

    def _look_at(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.faults.append(f"{self.page.url} asks {request.url}")

    async def open(self, path: str) -> None:
        await self.page.goto(self.url + path)
        if await self.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            self.faults.append(f"{path} is wider than the window")

    async def log_in(self, secret: str) -> None:
        await self.open("/login")
        await self.page.get_by_label("API key").fill(secret)
        await self.page.get_by_role("button", name="Log in").click()
        await self.page.get_by_role("button", name="Log out").wait_for()

    def expect(self, is_so: bool, what: str) -> None:
        print(f"  {'ok' if is_so else 'FAILED'}  {what}", flush=True)
        if not is_so:
            self.faults.append(what)


async def tenant_admin(visitor: Visitor) -> None:
    """Make a key, see its secret once, delete it; rotate the salt; accept an invitation; filter the trail; log out."""
    page = visitor.page
    await visitor.open("/tenants/acme/keys")
    await page.get_by_role("link", name="New key").click()
    await page.get_by_label("Id", exact=True).fill("from-browser")
    await page.get_by_role("button", name="Make the key").click()
    secret = await page.get_by_label("Secret").input_value()
    visitor.expect(secret.startswith("sk-saltern-"), "a key is made and its secret shown")
    await visitor.open("/tenants/acme/keys")
    visitor.expect(secret not in await page.content(), "and never again")
    await page.get_by_label("Filter keys").fill("from-b")
    visitor.expect(await page.locator("#keys tbody tr:visible").count() == 1, "a table is filtered as one types")
    await page.get_by_role("link", name="Delete from-browser").click()
    await page.get_by_role("button", name="Delete the key").click()
    visitor.expect(await page.get_by_role("status").is_visible(), "a deleted key is said to be")
    await visitor.open("/tenants/acme/salts")
    await page.get_by_role("link", name="Rotate…", exact=True).click()
    await page.get_by_role("button", name="Rotate").click()
    visitor.expect("new salt epoch" in await page.get_by_role("status").inner_text(), "the salt is rotated")
    await visitor.open("/tenants/acme/sharing")
    await page.get_by_role("link", name="Accept… manuals for chat").click()
    await page.get_by_role("button", name="Accept").click()
    visitor.expect("accepted" in await page.get_by_role("status").inner_text(), "an invitation is accepted")
    await visitor.open("/tenants/acme/audit")
    await page.get_by_label("Action").fill("DeleteApiKey")
    await page.get_by_role("button", name="Filter").click()
    visitor.expect(await page.locator("table.events tbody tr").count() == 1, "the trail is filtered")
    async with page.expect_download() as coming:
        await page.get_by_role("link", name="JSONL").click()
    lines = Path(str(await (await coming.value).path())).read_text().splitlines()
    visitor.expect(len(lines) > 1 and all(json.loads(line) for line in lines), "and exported whole")
    await page.keyboard.press("Tab")
    await visitor.open("/tenants/acme")
    await page.keyboard.press("Tab")
    visitor.expect(
        await page.evaluate("document.activeElement.className") == "skip", "the first stop of the keyboard skips"
    )
    await page.get_by_role("button", name="Log out").click()
    visitor.expect("logged out" in await page.get_by_role("status").inner_text(), "logging out is said")


async def shown_pages(browser: Browser, url: str, keys: dict[str, str], faults: list[str], folder: Path | None) -> None:
    for scheme in SCHEMES:
        for width in WIDTHS:
            for who, paths in PAGES.items():
                context = await browser.new_context(
                    color_scheme=scheme,  # type: ignore[arg-type]
                    viewport={"width": width, "height": 900},
                )
                visitor = Visitor(await context.new_page(), url, faults)
                await visitor.log_in(keys[who])
                for path in paths:
                    await visitor.open(path)
                    if folder is not None:
                        name = re.sub(r"[^a-z0-9]+", "-", f"{who}{path}").strip("-")
                        await visitor.page.screenshot(path=folder / f"{name}-{scheme}-{width}.png", full_page=True)
                await context.close()


@asynccontextmanager
async def deployment() -> AsyncIterator[tuple[str, dict[str, str]]]:
    """A console with a past; yields its URL and the keys."""
    with _reachable_folder() as folder, EmbeddedPostgres(PostgresConfig(folder / "postgres")) as server:
        with SessionPostgres(server).fresh_database(migrate) as database, tempfile.TemporaryDirectory() as state:
            prices = Path(state) / "prices.json"
            prices.write_text(json.dumps(PRICES))
            changes = {"console_listen": Endpoint("127.0.0.1", 0), "console_prices": prices}
            async with control_plane(database, Path(state) / "state", **changes) as control:
                await control.redeem()
                yield control.plane.console_url.rstrip("/"), await fill(control, datetime.now(UTC))


async def run(executable: str, folder: Path | None) -> list[str]:
    """Everything that is wrong."""
    faults: list[str] = []
    async with deployment() as (url, keys), async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            await shown_pages(browser, url, keys, faults, folder)
            context = await browser.new_context()
            visitor = Visitor(await context.new_page(), url, faults)
            await visitor.log_in(keys["acme/admin"])
            await tenant_admin(visitor)
            without = await browser.new_context(java_script_enabled=False)
            plain = Visitor(await without.new_page(), url, faults)
            await plain.page.goto(f"{url}/login")
            await plain.page.get_by_label("API key").fill(keys["acme/auditor"])
            await plain.page.get_by_role("button", name="Log in").click()
            plain.expect(
                await plain.page.get_by_role("heading", name="Hit rate").is_visible(), "without scripts as well"
            )
        finally:
            await browser.close()
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.console", description=__doc__)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="keep a picture of every page there")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="a Chromium (Debian: apt install chromium)")
    options = parser.parse_args()
    if not Path(options.browser).exists():
        print(
            f"there is no browser {options.browser}: apt install chromium, or name one with --browser", file=sys.stderr
        )
        return 2
    if options.screenshots is not None:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    faults = asyncio.run(run(options.browser, options.screenshots))
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
