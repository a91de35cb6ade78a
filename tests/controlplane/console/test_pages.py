"""Every page: who may see it, what it never says of others, what a stranger's text and another site's form come to."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from controlplane.console.app import make_app
from controlplane.console.guard import CONTENT_SECURITY_POLICY, HEADERS, Guard
from controlplane.console.visit import FORM_MAX_BYTES
from saltern.admin.v1 import sharing_groups_pb2, sharing_groups_pb2_grpc, tenants_pb2
from tests.controlplane.console.conftest import Console
from tests.support.browser import Browser, browser, forms_of

PAYLOAD = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}"
#: What each route's path is filled with: a key, a group and a format that are there.
FILLED = {"key": "writer", "owner": "beta", "group": "manuals", "act": "accept", "format": "jsonl", "name": "mark.svg"}
PUBLIC = {"/login", "/static/{name}"}
AUDITOR_MAY_NOT = {
    "/keys/new",
    "/keys/{key}/rotate",
    "/keys/{key}/delete",
    "/salts/rotate",
    "/sharing/{owner}/{group}/{act}",
}


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route there is."""
    guard = make_app(type("C", (), {"is_secure": False})(), {})  # type: ignore[arg-type]
    assert isinstance(guard, Guard) and isinstance(guard._app, Starlette)
    for route in guard._app.routes:
        assert isinstance(route, Route) and route.methods is not None
        yield from ((method, route.path) for method in sorted(route.methods - {"HEAD"}))


def path_of(template: str, tenant: str) -> str:
    return template.format(tenant=tenant, **FILLED)


async def share(console: Console) -> None:
    """A group of beta's that acme is invited to."""
    groups: Any = sharing_groups_pb2_grpc.SharingGroupServiceStub(console.control.channel)
    metadata = await console.control.bearer(console.control.admin_key)
    await groups.CreateSharingGroup(
        sharing_groups_pb2.CreateSharingGroupRequest(
            parent="tenants/beta", sharing_group_id="manuals", namespace="tenants/beta/namespaces/chat"
        ),
        metadata=metadata,
    )
    await groups.InviteMember(
        sharing_groups_pb2.InviteMemberRequest(
            name="tenants/beta/sharingGroups/manuals", namespace="tenants/acme/namespaces/chat"
        ),
        metadata=metadata,
    )


async def test_i1_every_route_needs_a_session(console: Console) -> None:
    async with browser(console.url) as stranger:
        for method, template in routes():
            path = path_of(template, "acme")
            answer = await (stranger.get(path) if method == "GET" else stranger.post(path, {}))
            if template in PUBLIC:
                assert answer.status_code in {200, 403}, template
            else:
                assert answer.status_code == 303 and answer.headers["location"].startswith("/login"), template


async def test_i2_another_tenants_page_is_the_same_as_that_of_one_that_is_not_there(console: Console) -> None:
    """Of every page and every change; a key or group of another tenant's too."""
    await share(console)
    before = await acts(console, "tenants/beta")
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        token = forms_of((await visitor.get("/tenants/acme")).text)["/logout"]["form_token"]
        for method, template in routes():
            if not template.startswith("/tenants/{tenant}"):
                continue
            answers = []
            for tenant in ("beta", "nobody"):
                path = path_of(template, tenant)
                if method == "GET":
                    answers.append(await visitor.get(path))
                else:
                    fields = {"form_token": token, "request_id": str(uuid.uuid4()), "role": "writer", "days": "90"}
                    fields |= {"api_key_id": "k", "overlap_hours": "0", "grace": "none", "namespace": "chat"}
                    answers.append(await visitor.post(path, fields))
            foreign, absent = answers
            assert foreign.status_code == absent.status_code == 404, (method, template)
            assert foreign.text == absent.text and "beta" not in foreign.text, (method, template)
        for path in ("/tenants/acme/keys/{}/delete", "/tenants/acme/sharing/{}/manuals/accept"):
            one, other = [await visitor.get(path.format(name)) for name in ("gone", "nobody")]
            assert (one.status_code, one.text) == (other.status_code, other.text) and one.status_code == 404
        for path in ("/tenants", "/nodes", "/policy", "/keys", "/audit", "/audit/export.jsonl"):
            assert (await visitor.get(path)).status_code in {403, 404}, path
    assert await acts(console, "tenants/beta") == before


async def test_an_auditor_sees_everything_and_changes_nothing(console: Console) -> None:
    await share(console)
    before = await acts(console, "tenants/acme")
    async with browser(console.url, console.keys["acme/auditor"]) as visitor:
        token = forms_of((await visitor.get("/tenants/acme")).text)["/logout"]["form_token"]
        for method, template in routes():
            if not template.startswith("/tenants/{tenant}"):
                continue
            path = path_of(template, "acme")
            if method == "GET":
                answer = await visitor.get(path)
                assert answer.status_code == 200, path
                if template.removeprefix("/tenants/{tenant}") not in AUDITOR_MAY_NOT:
                    assert "danger" not in answer.text and ">New key<" not in answer.text, path
            else:
                fields = {"form_token": token, "role": "writer", "days": "90", "api_key_id": "k", "overlap_hours": "0"}
                answer = await visitor.post(path, fields | {"grace": "none", "namespace": "chat"})
                assert answer.status_code == 403 and "ROLE_REQUIRED" in answer.text, path
    assert await acts(console, "tenants/acme") == before


async def test_a_change_that_another_site_asks_for_is_refused(console: Console) -> None:
    """CSRF, for every form: no token, another session's, another origin, none at all, another type of body."""
    await share(console)
    async with (
        browser(console.url, console.keys["acme/admin"]) as visitor,
        browser(console.url, console.keys["acme/admin"]) as other,
    ):
        own = forms_of((await visitor.get("/tenants/acme")).text)["/logout"]["form_token"]
        foreign = forms_of((await other.get("/tenants/acme")).text)["/logout"]["form_token"]
        assert own != foreign
        good = {"origin": visitor.origin, "sec-fetch-site": "same-origin"}
        rest = {"role": "writer", "days": "90", "api_key_id": "k", "overlap_hours": "0", "grace": "none"}
        fields = rest | {"namespace": "chat", "credential": console.keys["acme/admin"]}
        for method, template in routes():
            if method != "POST":
                continue
            path = path_of(template, "acme")
            for token, headers, reason in (
                ("", good, "FORM_TOKEN_WRONG"),
                (foreign, good, "FORM_TOKEN_WRONG"),
                (own, {"origin": "https://evil.example"}, "OTHER_ORIGIN"),
                (own, {"origin": "null"}, "OTHER_ORIGIN"),
                (own, {"origin": "http://["}, "OTHER_ORIGIN"),
                (own, {"origin": visitor.origin, "sec-fetch-site": "cross-site"}, "OTHER_ORIGIN"),
                (own, {"sec-fetch-site": "same-site"}, "OTHER_ORIGIN"),
                (own, {}, "OTHER_ORIGIN"),
                (own, good | {"content-type": "text/plain"}, "FORM_MALFORMED"),
            ):
                answer = await visitor.post(path, fields | {"form_token": token}, headers)
                assert answer.status_code in {400, 403} and reason in answer.text, (path, reason, answer.status_code)
        assert await still_in(visitor)
    methods = {event.method.rpartition("/")[2] for event in await console.control.events("tenants/acme")}
    assert not methods & {"RotateSalt", "DeleteApiKey", "RotateApiKey", "AcceptInvitation"}


async def test_no_answer_leads_to_where_the_caller_says_this_host_is(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        for path in ("/tenants/", "/tenants/acme/", "/login/", "//evil.example/login/", "/keys/", "/static/"):
            answer = await visitor.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 404 and "location" not in answer.headers, path
        for path in ("/", "/login", "/logout"):
            answer = await visitor.get(path, headers={"host": "evil.example"})
            assert "evil.example" not in answer.headers.get("location", ""), path


async def acts(console: Console, chain: str) -> int:
    """How many acts a chain has, without denied attempts and tokens."""
    return sum(event.outcome == 1 for event in await console.control.events(chain))


async def still_in(visitor: Browser) -> bool:
    return (await visitor.get("/tenants/acme")).status_code == 200


async def test_text_of_a_stranger_is_never_markup(console: Console) -> None:
    """XSS: in names that are stored, in every field, in every part of a query."""
    control = console.control
    body = tenants_pb2.Tenant(name="tenants/acme", display_name=PAYLOAD)
    metadata = await control.bearer(control.admin_key)
    await control.tenants.UpdateTenant(tenants_pb2.UpdateTenantRequest(tenant=body), metadata=metadata)
    names = "period month grace since until actor method outcome page next done version namespace"
    query = dict.fromkeys(names.split(), PAYLOAD)
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        made = await visitor.submit(
            "/tenants/acme/keys/new",
            api_key_id="shown",
            display_name=PAYLOAD,
            role="writer",
            days="30",
        )
        refused = await visitor.submit(
            "/tenants/acme/keys/new",
            api_key_id=PAYLOAD,
            display_name=PAYLOAD,
            project_id=PAYLOAD,
            role="writer",
            days="0",
        )
        assert made.status_code == 200 and refused.status_code == 400 and "&lt;script&gt;" in refused.text
        pages = [made, refused, await visitor.get("/tenants/acme/keys"), await visitor.get("/tenants/acme/audit")]
        pages += [await visitor.get(f"/tenants/acme/keys/shown/{act}") for act in ("rotate", "delete")]
        for method, template in routes():
            if method == "GET" and template.startswith("/tenants/{tenant}"):
                pages.append(await visitor.get(path_of(template, "acme"), params=query))
                pages.append(await visitor.get(path_of(template, PAYLOAD.replace("/", ""))))
    async with browser(console.url, control.admin_key) as administrator:
        pages.append(await administrator.get("/tenants"))
        pages.append(await administrator.get("/tenants/acme"))
    async with browser(console.url) as stranger:
        pages.append(await stranger.get("/login", params=query))
        pages.append(await stranger.log_in(PAYLOAD))
        pages.append(await stranger.get(f"/{PAYLOAD}"))
    shown = [page for page in pages if page.headers.get("content-type", "").startswith("text/html")]
    assert sum("&lt;script&gt;" in page.text for page in shown) >= 6
    for page in shown:
        scripts, elements = re.findall(r"<script[^>]*>", page.text), re.findall(r"<[a-z][^>]*>", page.text)
        assert all('src="/static/console.js' in script for script in scripts), page.url
        told = [re.sub(r'"[^"]*"', '""', element) for element in elements]  # attributes without their values
        assert not [element for element in told if re.search(r"\s(style|on[a-z]+)=", element)], page.url


async def test_every_answer_has_the_headers_and_names_no_other_site(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        for path in ("/tenants/acme", "/tenants/beta", "/nope", "/static/console.css", "/static/none.css", "/login"):
            answer = await visitor.get(path)
            assert {name: answer.headers[name] for name, _ in HEADERS} == dict(HEADERS), path
            kept = "immutable" if answer.status_code == 200 and "static" in path else "no-store"
            assert kept in answer.headers["cache-control"]
            assert not re.search(r"(src|href|action)=\"(https?:)?//", answer.text)
        assert (await visitor.http.put("/tenants/acme")).status_code == 405
    assert "unsafe" not in CONTENT_SECURITY_POLICY and CONTENT_SECURITY_POLICY.startswith("default-src 'none'")


async def test_forms_are_bounded(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        large = await visitor.post("/tenants/acme/keys/new", {"form_token": "x" * FORM_MAX_BYTES})
        assert large.status_code == 413 and "FORM_TOO_LARGE" in large.text
        many = await visitor.post("/tenants/acme/keys/new", {f"f{number}": "" for number in range(65)})
        assert many.status_code == 400 and "FORM_MALFORMED" in many.text


async def test_a_key_is_made_shown_once_rotated_and_deleted(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        shown = await visitor.get("/tenants/acme/keys/new")
        fields = forms_of(shown.text)["/tenants/acme/keys/new"] | {"api_key_id": "prod", "role": "writer", "days": "90"}
        first, again = [await visitor.post("/tenants/acme/keys/new", fields) for _ in range(2)]
        (secret,) = set(re.findall(r"sk-saltern-[0-9a-f]{16}-[\w-]{43}", first.text))
        assert "sk-saltern-" not in again.text and "only then" in again.text
        assert (await console.control.exchange(secret, "chat")).access_token
        rotated = await visitor.submit("/tenants/acme/keys/prod/rotate", overlap_hours="0")
        (new,) = set(re.findall(r"sk-saltern-[0-9a-f]{16}-[\w-]{43}", rotated.text))
        assert new != secret and (await console.control.exchange(new)).access_token
        asked = await visitor.get("/tenants/acme/keys/prod/delete")
        assert "cannot be undone" in asked.text and "writer" in asked.text
        deleted = await visitor.submit("/tenants/acme/keys/prod/delete")
        assert deleted.headers["location"].startswith("/tenants/acme/keys?done=key-deleted&version=")
        after = await visitor.get(deleted.headers["location"])
        assert "The API key is deleted" in after.text and ">prod<" not in after.text
        wrong = await visitor.submit("/tenants/acme/keys/new", api_key_id="writer", role="writer", days="90")
        assert wrong.status_code == 400 and "exists" in wrong.text and 'value="writer"' in wrong.text
    acts = [event.method.rpartition("/")[2] for event in await console.control.events("tenants/acme")]
    assert acts[:3] == ["DeleteApiKey", "RotateApiKey", "CreateApiKey"]


async def test_salts_are_rotated_and_an_invitation_accepted_and_left(console: Console) -> None:
    await share(console)
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        assert "What it destroys" in (await visitor.get("/tenants/acme/salts/rotate?grace=none")).text
        await visitor.submit("/tenants/acme/salts/rotate?grace=none")
        assert re.search(r">2</th>", (await visitor.get("/tenants/acme/salts")).text)
        group = "/tenants/acme/sharing/beta/manuals"
        assert "invites your namespace" in (await visitor.get("/tenants/acme/sharing")).text
        accepted = await visitor.submit(f"{group}/accept?namespace=chat")
        assert "done=invitation-accepted" in accepted.headers["location"]
        assert "Leave" in (await visitor.get("/tenants/acme/sharing")).text
        left = await visitor.submit(f"{group}/leave?namespace=chat")
        assert "done=group-left" in left.headers["location"]
        assert "Nothing is shared" in (await visitor.get("/tenants/acme/sharing")).text
        assert (await visitor.get(f"{group}/nonsense")).status_code == 400


async def test_the_trail_is_filtered_and_exported_as_the_command_does(console: Console) -> None:
    async with browser(console.url, console.keys["acme/admin"]) as visitor:
        page = await visitor.get("/tenants/acme/audit", params={"method": "CreateApiKey", "outcome": "success"})
        assert page.text.count("CreateApiKey</td>") == 3 and "CreateNamespace" not in page.text
        assert "No event matches" in (await visitor.get("/tenants/acme/audit", params={"actor": "nobody"})).text
        assert (await visitor.get("/tenants/acme/audit", params={"since": "soon"})).status_code == 400
        lines = (await visitor.get("/tenants/acme/audit/export.jsonl")).text.splitlines()
        assert [json.loads(line)["sequence"] for line in lines] == list(range(1, len(lines) + 1))
        csv = await visitor.get("/tenants/acme/audit/export.csv")
        assert csv.text.startswith("sequence,event_time,") and "attachment" in csv.headers["content-disposition"]
        assert (await visitor.get("/tenants/acme/audit/export.ocsf")).status_code == 404
        assert (await visitor.get("/tenants/acme/audit/export.jsonl?until=2020-01-01T00:00")).text == ""


@pytest.mark.parametrize("path", ["/tenants", "/nodes", "/policy", "/keys", "/keys/new", "/audit", "/tenants/acme"])
async def test_pages_of_a_platform_without_nodes_say_what_to_do(console: Console, path: str) -> None:
    async with browser(console.url, console.control.admin_key) as visitor:
        answer = await visitor.get(path)
        assert answer.status_code == 200 and "<h1>" in answer.text
