"""The admin commands against a real stack: what they print, what they exit with, and what the service then says."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from saltern.admin_client import AdminClient, ApiKey, read_api_key
from saltern.client import Client
from saltern.demo.stack import Stack
from saltern.demo.usage_watch import UsageWatch
from saltern.errors import UnauthenticatedError
from saltern.keys import BlockHash
from saltern.results import Error, Stored

Saltern = Callable[..., Any]
MIB = 1024 * 1024
SECRET = re.compile(r"sk-saltern-[0-9a-f]{16}-[A-Za-z0-9_-]{43}")


def test_a_tenant_lives_from_create_to_delete(saltern: Saltern) -> None:
    created = saltern("tenant", "create", "life", "--display-name", "Life & Sons [bold]", "-o", "json")
    assert created.code == 0
    assert created.json["name"] == "tenants/life"
    assert created.json["state"] == "STATE_ACTIVE"
    assert created.json["displayName"] == "Life & Sons [bold]"
    assert "Life & Sons [bold]" in saltern("tenant", "list").out
    renamed = saltern("tenant", "update", "life", "--display-name", "", "--etag", created.json["etag"], "-o", "json")
    assert renamed.json["displayName"] == ""
    stale = saltern("tenant", "update", "life", "--display-name", "x", "--etag", created.json["etag"])
    assert stale.code == 5
    assert saltern("tenant", "suspend", "life", "--yes", "-o", "json").json["state"] == "STATE_SUSPENDED"
    assert saltern("tenant", "resume", "life", "-o", "json").json["state"] == "STATE_ACTIVE"
    assert saltern("tenant", "delete", "life").code == 2, "nobody can be asked here, so nothing is deleted"
    assert saltern("tenant", "get", "life").code == 0
    assert saltern("tenant", "delete", "life", "--yes").code == 0
    gone = saltern("tenant", "get", "life")
    assert (gone.code, gone.out) == (3, "")
    assert gone.err.startswith("error: ")


def test_an_identifier_that_is_taken_is_a_conflict_with_a_hint(saltern: Saltern, tenant: str) -> None:
    shown = saltern("tenant", "create", tenant)
    assert shown.code == 5
    assert re.fullmatch(r"error: .*\nhint: .*\n", shown.err)


def test_quota_keeps_what_is_not_given_and_passes_on_why_it_is_refused(saltern: Saltern, tenant: str) -> None:
    changed = saltern("quota", "set", tenant, "--weight", "300", "-o", "json").json
    (dram,) = [tier for tier in changed["tiers"] if tier["tier"] == "TIER_DRAM"]
    assert dram == {
        "tier": "TIER_DRAM", "reservedBytes": str(2 * MIB), "limitBytes": str(8 * MIB), "weight": 300,
    }  # fmt: skip
    assert "8 MiB" in saltern("quota", "get", tenant).out
    too_much = saltern("quota", "set", tenant, "--dram-limit", "1TiB", "--dram-reserved", "1TiB")
    assert too_much.code == 5
    assert "capacity" in too_much.err
    assert too_much.err.splitlines()[1].startswith("hint: ")
    upside_down = saltern("quota", "set", tenant, "--dram-limit", "1MiB", "--dram-reserved", "2MiB")
    assert upside_down.code == 2


def test_limits_of_a_namespace_are_set_changed_and_lifted(saltern: Saltern, tenant: str) -> None:
    made = ("--model-fingerprint", "m@1/bf16", "--block-tokens", "16", "--block-bytes", "64KiB")
    assert saltern("namespace", "create", tenant, "bulk", *made, "--dram-limit", "1MiB").code == 0
    shown = saltern("namespace", "update", tenant, "bulk", "--ssd-limit", "0", "-o", "json").json
    assert shown["tierLimits"] == [
        {"tier": "TIER_DRAM", "limitBytes": "1048576"},
        {"tier": "TIER_SSD", "limitBytes": "0"},
    ]
    assert "dram 1 MiB, ssd 0" in saltern("namespace", "get", tenant, "bulk").out
    assert saltern("namespace", "update", tenant, "bulk", "--dram-limit", "none", "--ssd-limit", "none").code == 0
    assert "none" in saltern("namespace", "list", tenant).out
    assert saltern("namespace", "update", tenant, "bulk").code == 2
    assert saltern("namespace", "update", tenant, "bulk", "--dram-limit", "much").code == 2
    stale = saltern("namespace", "update", tenant, "bulk", "--dram-limit", "1MiB", "--etag", shown["etag"])
    assert stale.code == 5
    assert saltern("namespace", "delete", tenant, "bulk", "--yes").code == 0


def test_namespaces_are_created_listed_and_deleted(saltern: Saltern, tenant: str) -> None:
    assert [item["name"] for item in saltern("namespace", "list", tenant, "-o", "json").json["namespaces"]] == [
        f"tenants/{tenant}/namespaces/chat"
    ]
    assert "64 KiB" in saltern("namespace", "get", tenant, "chat").out
    assert saltern("namespace", "delete", tenant, "chat", "--yes").code == 0
    assert saltern("namespace", "get", tenant, "chat").code == 3
    assert saltern("namespace", "list", tenant).out == "(none)\n"
    assert saltern("namespace", "list", tenant, "-o", "json").json == {"namespaces": []}


def test_a_secret_is_shown_once_alone_on_stdout_or_saved(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    shown = saltern("key", "create", "one", "--tenant", tenant, "--role", "writer", "--expires-in", "90d")
    assert SECRET.fullmatch(shown.out.strip())
    assert not SECRET.search(shown.err)
    as_json = saltern("key", "create", "two", "--tenant", tenant, "--role", "reader", "-o", "json").json
    assert SECRET.fullmatch(as_json["secret"])
    assert as_json["apiKey"]["role"] == "ROLE_READER"
    path = tmp_path / "three.key"
    saved = saltern("key", "create", "three", "--tenant", tenant, "--role", "reader", "--save", str(path), "-o", "json")
    assert "secret" not in saved.json
    assert not SECRET.search(saved.out + saved.err)
    assert SECRET.fullmatch(path.read_text().strip())
    assert path.stat().st_mode & 0o777 == 0o600
    listed = saltern("key", "list", "--tenant", tenant)
    assert {line.split()[0] for line in listed.out.splitlines()[1:]} == {"one", "two", "three"}
    assert not SECRET.search(listed.out)


def test_a_key_is_rotated_and_both_of_its_secrets_are_listed(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    owner = ("--tenant", tenant)
    old, new = tmp_path / "old.key", tmp_path / "new.key"
    saltern("key", "create", "ci", *owner, "--role", "writer", "--save", str(old))
    rotated = saltern("key", "rotate", "ci", *owner, "--overlap", "2h", "--save", str(new))
    assert rotated.code == 0 and "old one is good until" in rotated.err
    assert not SECRET.search(rotated.out + rotated.err)
    for secret in (old, new):
        assert saltern("usage", "--api-key-file", str(secret)).code == 0
    listed = saltern("key", "list", *owner)
    assert [path.read_text()[11:27] in listed.out for path in (new, old)] == [True, True]
    assert "(before its rotation)" in listed.out and not SECRET.search(listed.out)

    again = saltern("key", "rotate", "ci", *owner)
    assert again.code == 5 and "--end-previous" in again.err
    assert saltern("key", "rotate", "ci", *owner, "--overlap", "1h", "--no-overlap").code == 2
    ended = saltern("key", "rotate", "ci", *owner, "--no-overlap", "--end-previous", "--yes", "-o", "json").json
    assert SECRET.fullmatch(ended["secret"]) and "previous" not in ended["apiKey"]
    assert [saltern("usage", "--api-key-file", str(secret)).code for secret in (old, new)] == [4, 4]


def test_a_failed_creation_leaves_no_secret_file(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    create = ("key", "create", "k", "--role", "reader", "--save", str(path))
    assert saltern(*create, "--tenant", "no-such-tenant").code == 3
    assert not path.exists()
    path.write_text("mine")
    assert saltern(*create, "--tenant", tenant).code == 5
    assert path.read_text() == "mine"
    assert saltern("key", "list", "--tenant", tenant, "-o", "json").json == {"apiKeys": []}


def test_i1_a_tenants_key_sees_its_own_tenant_only(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    path = tmp_path / "auditor.key"
    saltern("key", "create", "auditor", "--tenant", tenant, "--role", "tenant-auditor", "--save", str(path))
    as_auditor = ("--api-key-file", str(path), "-o", "json")
    assert [item["tenant"] for item in saltern("usage", *as_auditor).json["usages"]] == [f"tenants/{tenant}"]
    assert saltern("key", "list", *as_auditor).json["apiKeys"][0]["name"] == f"tenants/{tenant}/apiKeys/auditor"
    assert saltern("audit", "list", *as_auditor).json["auditEvents"]
    for denied in (("tenant", "list"), ("node", "list"), ("audit", "list", "--platform"), ("tenant", "create", "mine")):
        assert saltern(*denied, *as_auditor).code == 3
    assert saltern("usage", "no-such-tenant", *as_auditor).code == 3


def test_a_revoked_key_is_not_authenticated(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    path = tmp_path / "gone.key"
    saltern("key", "create", "gone", "--tenant", tenant, "--role", "reader", "--save", str(path))
    assert saltern("key", "delete", "gone", "--tenant", tenant, "--yes").code == 0
    shown = saltern("usage", "--api-key-file", str(path))
    assert shown.code == 4
    assert path.read_text().strip() not in shown.err


def test_a_token_is_printed_only_when_asked(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    key = tmp_path / "w.key"
    saltern("key", "create", "w", "--tenant", tenant, "--role", "writer", "--save", str(key))
    issue = ("token", "issue", "--namespace", "chat", "--api-key-file", str(key))
    quiet = saltern(*issue)
    assert quiet.code == 0
    assert "eyJ" not in quiet.out
    as_json = saltern(*issue, "-o", "json").json
    assert as_json["tenantId"] == tenant
    assert not {"accessToken", "saltKeys"} & as_json.keys()
    shown = saltern(*issue, "--show").out.strip()
    assert shown.count(".") == 2
    saved = tmp_path / "grant.json"
    assert saltern(*issue, "--save", str(saved)).code == 0
    grant = json.loads(saved.read_text())
    assert grant["accessToken"].count(".") == 2
    assert grant["saltKeys"][0]["epoch"] == "1"
    assert saved.stat().st_mode & 0o777 == 0o600
    assert saltern(*issue[:2], "--namespace", "other", "--api-key-file", str(key)).code == 3


def test_usage_nodes_salt_and_audit_are_shown(saltern: Saltern, tenant: str) -> None:
    assert "8 MiB" in saltern("usage", tenant).out
    assert saltern("usage", tenant, "-o", "json").json["tenant"] == f"tenants/{tenant}"
    (node,) = saltern("node", "list", "-o", "json").json["nodes"]
    assert (node["state"], node["dramCapacityBytes"]) == ("STATE_LIVE", str(64 * MIB))
    assert saltern("salt", "show", tenant, "-o", "json").json["scope"] == "SCOPE_TENANT"
    events = saltern("audit", "list", "--tenant", tenant, "-o", "json").json["auditEvents"]
    assert [event["method"].rpartition("/")[2] for event in events] == [
        "CreateNamespace", "UpdateQuota", "CreateTenant",
    ]  # fmt: skip
    newest = saltern("audit", "list", "--tenant", tenant, "--limit", "1", "-o", "json").json["auditEvents"]
    assert newest == events[:1]
    listed = ("audit", "list", "--tenant", tenant, "-o", "json")
    assert saltern(*listed, "--method", "UpdateQuota", "--actor", "apiKeys/").json["auditEvents"] == events[1:2]
    assert saltern(*listed, "--outcome", "denied").json["auditEvents"] == []
    assert saltern(*listed, "--outcome", "success", "--since", "2020-01-01").json["auditEvents"] == events
    assert saltern(*listed, "--until", "2020-01-01").json["auditEvents"] == []


def test_lists_join_their_pages(saltern: Saltern, stack: Stack, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltern.admin_client.PAGE_ITEMS", 2)
    for number in range(5):
        saltern("key", "create", f"k{number}", "--tenant", tenant, "--role", "reader", "-o", "json")
    keys = saltern("key", "list", "--tenant", tenant, "-o", "json").json["apiKeys"]
    assert sorted(key["name"].rpartition("/")[2] for key in keys) == [f"k{number}" for number in range(5)]
    events = saltern("audit", "list", "--tenant", tenant, "--limit", "5", "-o", "json").json["auditEvents"]
    assert len({event["name"] for event in events}) == 5


def test_doctor_finds_a_healthy_stack_healthy(saltern: Saltern, tenant: str, tmp_path: Path) -> None:
    shown = saltern("doctor", "-o", "json")
    states = {item["check"]: item["state"] for item in shown.json["checks"]}
    assert shown.code == 0
    for check in ("control plane", "API key", "clock", "node node-1 wire", "node node-1 gRPC"):
        assert states[check] == "OK", check
    key = tmp_path / "w.key"
    saltern("key", "create", "w", "--tenant", tenant, "--role", "writer", "--save", str(key))
    shown = saltern("doctor", "--namespace", "chat", "--api-key-file", str(key), "-o", "json")
    assert shown.code == 0
    assert {item["check"]: item["state"] for item in shown.json["checks"]}["node-1 shm"] == "OK"
    key.chmod(0o644)
    warned = saltern("doctor", "--api-key-file", str(key))
    assert (warned.code, "chmod 600" in warned.out) == (0, True)


def test_doctor_fails_on_a_key_that_nobody_made(saltern: Saltern, tmp_path: Path) -> None:
    key = tmp_path / "made-up.key"
    key.write_text("sk-saltern-0123456789abcdef-" + "A" * 43)
    shown = saltern("doctor", "--api-key-file", str(key), "-o", "json")
    assert shown.code == 4
    assert {item["check"]: item["state"] for item in shown.json["checks"]}["API key"] == "FAIL"


def test_the_admin_client_gets_a_new_token_when_its_own_is_refused(stack: Stack) -> None:
    from saltern.admin.v1.tenants_pb2 import ListTenantsRequest

    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin:
        assert admin.tenant_id == ""
        assert admin._session is not None
        admin._session.access_token = admin._session.access_token[:-10] + "AAAAAAAAAA"
        admin.call(admin.tenants.ListTenants, ListTenantsRequest())
    with AdminClient(stack.control, ApiKey("sk-saltern-0123456789abcdef-" + "A" * 43)) as stranger:
        assert "AAAA" not in repr(stranger._api_key)
        with pytest.raises(UnauthenticatedError):
            stranger.call(stranger.tenants.ListTenants, ListTenantsRequest())


def test_the_admin_client_goes_on_when_all_tokens_of_its_tenant_were_revoked(
    saltern: Saltern, stack: Stack, tenant: str, tmp_path: Path
) -> None:
    from saltern.admin.v1.quotas_pb2 import GetQuotaRequest

    key = tmp_path / "admin.key"
    saltern("key", "create", "lasting", "--tenant", tenant, "--role", "tenant-admin", "--save", str(key))
    request = GetQuotaRequest(name=f"tenants/{tenant}/quota")
    with AdminClient(stack.control, read_api_key(key)) as admin:
        before = admin.call(admin.quotas.GetQuota, request)
        assert saltern("tenant", "revoke-tokens", tenant, "--yes").code == 0
        assert admin.call(admin.quotas.GetQuota, request) == before


def test_a_reader_that_goes_away_is_no_error(stack: Stack) -> None:
    program = f"{sys.executable} -m saltern tenant list -o json | true; exit ${{PIPESTATUS[0]}}"
    environment = {
        **os.environ, "SALTERN_CONTROL": stack.control, "SALTERN_API_KEY_FILE": str(stack.admin_api_key_file),
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_cannot_show_a_character_gets_it_escaped(stack: Stack, tenant: str) -> None:
    environment = {
        **os.environ, "SALTERN_CONTROL": stack.control, "SALTERN_API_KEY_FILE": str(stack.admin_api_key_file),
        "PYTHONIOENCODING": "ascii",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "saltern", "usage", tenant], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 MiB" in done.stdout


def test_on_a_terminal_deleting_asks_and_no_means_no(stack: Stack, saltern: Saltern, tenant: str) -> None:
    terminal, end = pty.openpty()
    environment = {
        **os.environ, "SALTERN_CONTROL": stack.control, "SALTERN_API_KEY_FILE": str(stack.admin_api_key_file),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "saltern", "tenant", "delete", tenant],
        stdin=end, stdout=end, stderr=end, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(end)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, b"n\n")
    assert process.wait(30) == 2
    os.close(terminal)
    assert saltern("tenant", "get", tenant).code == 0


def wait_until_served(client: Client) -> None:
    """Wait until the node has heard of the client's namespace, which was made a moment ago."""
    while isinstance(client.get_many(client.block_keys([BlockHash(b"none")]))[0], Error):
        time.sleep(0.02)


def test_a_quota_below_use_is_refused_unless_asked_for(
    saltern: Saltern, stack: Stack, tenant: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.key"
    saltern("key", "create", "w", "--tenant", tenant, "--role", "writer", "--save", str(path))
    with Client(
        control=stack.control, api_key=path.read_text().strip(), namespace="chat", deadline_ms=10_000
    ) as client:
        wait_until_served(client)
        keys = client.block_keys(BlockHash(b"%d" % number) for number in range(64))
        assert client.put_many((key, bytes(64 * 1024)) for key in keys) == [Stored()] * 64
    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin:
        with UsageWatch(admin, [tenant]) as watch:
            watch.wait_for_reports_after(time.time())
    shown = saltern("usage", tenant)
    assert "4 MiB" in shown.out
    lower = ("quota", "set", tenant, "--dram-limit", "1MiB", "--dram-reserved", "0")
    refused = saltern(*lower)
    assert refused.code == 5
    assert refused.err.splitlines()[1].startswith("hint: ")
    assert saltern(*lower, "--allow-below-use").code == 0


def test_rates_are_set_one_by_one_and_shown(saltern: Saltern, tenant: str) -> None:
    assert "none" in saltern("quota", "get", tenant).out
    set_rates = ("quota", "set", tenant, "-o", "json")
    saltern(*set_rates, "--operations-per-s", "1000", "--ssd-write-bytes-per-s", "3MiB")
    changed = saltern(*set_rates, "--bytes-per-s", "1.5GiB").json
    assert changed["rates"] == {
        "operationsPerS": "1000", "bytesPerS": str(1536 * MIB), "ssdWriteBytesPerS": str(3 * MIB),
    }  # fmt: skip
    assert changed["tiers"][0]["limitBytes"] == str(8 * MIB)
    assert saltern(*set_rates, "--weight", "200").json["rates"] == changed["rates"]
    shown = saltern("quota", "get", tenant).out
    assert "1000/s" in shown and "1.5 GiB/s" in shown and "3 MiB/s" in shown
    stale = saltern(*set_rates, "--operations-per-s", "1", "--etag", changed["etag"])
    assert stale.code == 5
    lifted = saltern(*set_rates, "--operations-per-s", "0", "--bytes-per-s", "0", "--ssd-write-bytes-per-s", "0")
    assert set(lifted.json["rates"].values()) == {"0"}
    assert saltern(*set_rates, "--bytes-per-s", "2TiB").code == 2  # above what the service takes


def test_a_tenant_sees_who_evicted_it_and_why_puts_were_refused(
    saltern: Saltern, stack: Stack, tenant: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.key"
    saltern("key", "create", "w", "--tenant", tenant, "--role", "writer", "--save", str(path))
    secret, block = path.read_text().strip(), bytes(64 * 1024)
    with Client(control=stack.control, api_key=secret, namespace="chat", deadline_ms=10_000) as client:
        wait_until_served(client)
        keys = (client.block_keys([BlockHash(b"%d" % number)])[0] for number in count())
        assert client.put_many((key, block) for key in islice(keys, 140)) == [Stored()] * 140  # the limit holds 128
        lower = ("--dram-limit", "32KiB", "--dram-reserved", "32KiB", "--allow-below-use")
        assert saltern("quota", "set", tenant, *lower).code == 0
        while client.put_many([(next(keys), block)]) == [Stored()]:
            pass  # until the node has the new limit, which holds no block
    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin:
        with UsageWatch(admin, [tenant]) as watch:
            watch.wait_for_reports_after(time.time())
    usage = saltern("usage", tenant, "--api-key-file", str(path), "-o", "json").json
    causes = {cause: int(count) for cause, count in usage["evictionsByCause"].items()}
    assert causes["own-limit"] >= 1 and causes["quota"] >= 1 and causes.keys() <= {"own-limit", "quota", "soft-mark"}
    assert sum(causes.values()) == int(usage["evictions"])
    (held,) = [tier for tier in usage["tiers"] if tier["tier"] == "TIER_DRAM"]
    assert (held["usedBytes"], held["lentBytes"], held["borrowedBytes"]) == ("0", str(32 * 1024), "0")
    assert usage["refusedByReason"] == {"ENTRY_TOO_LARGE": "1"} and usage["putsRefused"] == "1"
    shown = saltern("usage", tenant).out
    headings = [line.split()[0] for line in shown.splitlines() if line[:1].isupper()]
    assert headings == ["TENANT", "TENANT", "WHAT"]
    assert re.search(r"put refused +ENTRY_TOO_LARGE +1", shown) and re.search(r"evicted +own-limit +\d+", shown)
    everybody = saltern("usage").out
    assert "BY NEIGHBOURS" in everybody and "put refused" not in everybody


def test_each_tier_has_its_quota(saltern: Saltern, tenant: str) -> None:
    changed = saltern("quota", "set", tenant, "--ssd-limit", "64MiB", "--weight", "200", "-o", "json")
    assert changed.code == 0
    tiers = {tier["tier"]: tier for tier in changed.json["tiers"]}
    assert tiers["TIER_SSD"]["limitBytes"] == str(64 * MIB)
    assert tiers["TIER_DRAM"]["limitBytes"] == str(8 * MIB)
    assert [tier["weight"] for tier in tiers.values()] == [200, 200]
    above = saltern("quota", "set", tenant, "--ssd-reserved", "1MiB")
    assert above.code == 5 and "ssd" in above.err  # no node of this stack has an SSD tier
    assert saltern("quota", "set", tenant).code == 2


def test_wait_ends_a_change_when_it_is_in_force_everywhere(saltern: Saltern, tenant: str) -> None:
    waited = saltern("quota", "set", tenant, "--dram-limit", "4MiB", "--wait")
    assert waited.code == 0
    version = int(re.findall(r"in force on [1-9][0-9]* nodes \(policy ([0-9]+)\)", waited.err)[0])
    nodes = saltern("node", "list", "-o", "json").json["nodes"]
    assert all(int(node["policyVersion"]) >= version for node in nodes)
    silent = saltern("tenant", "suspend", tenant, "--yes", "--wait=20", "-o", "json")
    assert (silent.code, silent.err) == (0, "")
    assert silent.json["state"] == "STATE_SUSPENDED"
    assert saltern("tenant", "resume", tenant, "--wait=soon").code == 2
    misplaced = saltern("tenant", "resume", "--wait", tenant)
    assert misplaced.code == 2
    assert "--wait=SECONDS" in misplaced.err


def test_the_list_of_nodes_says_which_are_behind(saltern: Saltern) -> None:
    assert {"POLICY", "SETTLED", "BEHIND"} <= set(saltern("node", "list").out.split())


def test_a_program_gets_the_version_of_its_change_and_waits_for_it(stack: Stack, tenant: str) -> None:
    from saltern.admin.v1.tenants_pb2 import GetTenantRequest, ResumeTenantRequest

    with AdminClient(stack.control, read_api_key(stack.admin_api_key_file)) as admin:
        admin.call(admin.tenants.GetTenant, GetTenantRequest(name=f"tenants/{tenant}"))
        assert admin.policy_version == 0
        admin.call(admin.tenants.ResumeTenant, ResumeTenantRequest(name=f"tenants/{tenant}"))
        assert admin.policy_version > 0
        assert admin.wait_for_policy().version == admin.policy_version
        assert admin.wait_for_policy(0, timeout_s=10).acknowledged_nodes >= 1
