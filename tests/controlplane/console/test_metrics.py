"""What the console tells those who watch it: families of pages and outcomes, never a path or a name."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from controlplane import metrics as control_metrics
from controlplane.console.metrics import ConsoleMetrics, Outcome, Pages
from controlplane.console.sessions import IDLE_MAX
from tests.controlplane.console.conftest import Console
from tests.controlplane.console.test_pages import PUBLIC, path_of, routes
from tests.support.browser import browser
from tests.support.scraping import Scrape


async def scrape(console: Console) -> Scrape:
    endpoint = console.control.plane.metrics_endpoint
    return await asyncio.to_thread(Scrape, endpoint, prefix="saltern_control_console_")


async def test_requests_are_counted_by_family_of_pages_and_outcome(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        assert (await visitor.get("/tenants/acme")).status_code == 200
        assert (await visitor.get("/tenants/beta/keys")).status_code == 404
        assert (await visitor.get("/tenants/acme/audit")).status_code == 200
        assert (await visitor.get("/static/mark.svg")).status_code == 200
        assert (await visitor.get("/no/such/page")).status_code == 404
        assert (await visitor.post("/login", {"credential": "x"})).status_code == 403
    page = await scrape(console)

    def count(pages: str, outcome: str) -> float | None:
        return page.value("requests_total", pages=pages, outcome=outcome)

    assert count("entrance", "ok") == 1 and count("overview", "ok") == 1 and count("audit", "ok") == 1
    assert count("login", "ok") == 1 and count("login", "refused") == 1
    assert count("keys", "refused") == 1 and count("static", "ok") == 1 and count("unknown", "refused") == 1
    assert page.value("request_duration_seconds_count", pages="login") == 2
    assert page.value("sessions") == 1


async def test_whether_it_takes_connections_is_said_where_it_is_served(console: Console) -> None:
    assert (await scrape(console)).value("up") == 1
    (serving,) = (task for task in asyncio.all_tasks() if task.get_name() == "console")
    serving.cancel()
    await asyncio.wait({serving})
    assert (await scrape(console)).value("up") == 0
    unserved = ConsoleMetrics(console.control.database, console.clock)
    (family,) = (family for family in unserved.collect() if family.name == "saltern_control_console_up")
    assert not family.samples


async def test_no_visitor_makes_a_series(console: Console) -> None:
    """Of every page, for names that are not there; and of paths that lead nowhere."""
    async with browser(console.url, console.keys["platform"]) as visitor:
        for method, template in routes():
            path = path_of(template, "a-tenant-that-is-not-there")
            if template not in PUBLIC and path != "/logout":
                await (visitor.get(path) if method == "GET" else visitor.post(path, {}))
        for number in range(20):
            await visitor.get(f"/made/up/{number}")
    page = await scrape(console)
    assert set(page.label_values("pages")) <= set(Pages) and set(page.label_values("outcome")) <= set(Outcome)
    assert "not-there" not in page.text and "made" not in page.text


async def test_sessions_that_have_ended_are_not_counted(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_metrics, "_KEEP_S", 0.0)
    assert (await scrape(console)).value("sessions") == 0
    async with (
        browser(console.url, console.keys["acme/admin"]) as one,
        browser(console.url, console.keys["beta/admin"]),
    ):
        assert (await scrape(console)).value("sessions") == 2
        await one.submit("/tenants/acme", "/logout")
        assert (await scrape(console)).value("sessions") == 1
        console.clock.by += IDLE_MAX + timedelta(seconds=1)
        assert (await scrape(console)).value("sessions") == 0


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "ok"), (303, "ok"), (404, "refused"), (499, "gone"), (503, "failed"), (0, "failed")]
)
@pytest.mark.parametrize("breaks_off", [False, True])
async def test_an_outcome_is_whose_doing_it_was(console: Console, status: int, outcome: str, breaks_off: bool) -> None:
    """``0``: an application that ends without an answer. One that breaks off has begun with one."""
    metrics = ConsoleMetrics(console.control.database, console.clock)

    async def application(scope: object, receive: object, send: object) -> None:
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})  # type: ignore[operator]
        if breaks_off or not status:
            raise RuntimeError("no answer")

    async def ignore(message: object = None) -> object:
        return message

    try:
        await metrics.counted(application)({"type": "http"}, ignore, ignore)  # type: ignore[arg-type]
    except RuntimeError:
        assert breaks_off or not status
    samples = [
        sample for metric in metrics.collect() for sample in metric.samples if sample.name.endswith("requests_total")
    ]
    assert [(sample.labels["pages"], sample.labels["outcome"], sample.value) for sample in samples] == [
        ("unknown", "failed" if breaks_off else outcome, 1.0)
    ]
