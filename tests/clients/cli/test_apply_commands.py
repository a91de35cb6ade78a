"""``saltern apply`` and ``saltern export-config`` against the session's real stack."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saltern.admin.v1.credentials_pb2 import RotateApiKeyRequest
from saltern.admin_client import AdminClient, ApiKey
from saltern.demo.stack import Stack
from saltern.errors import UnavailableError

Saltern = Callable[..., Any]
_numbers = count(1)

PAIR = """\
apiVersion: saltern/v1
kind: Tenant
name: {owner}
displayName: The owner
quota:
  dram: {{reserved: 1MiB, limit: 8MiB, weight: 200}}
rates: {{bytesPerSecond: 500MiB}}
salt: {{scope: tenant, rotateEvery: 30d, grace: 12h}}
namespaces:
  - name: chat
    modelFingerprint: "m@1/bf16"
    blockTokens: 16
    blockBytes: 64KiB
    limits: {{dram: 4MiB}}
keys:
  - {{name: ci, role: writer, expires: 2099-01-01, project: web}}
sharing:
  groups:
    - {{name: research, namespace: chat, invite: [{other}/chat]}}
---
apiVersion: saltern/v1
kind: Tenant
name: {other}
quota: {{dram: {{limit: 8MiB}}}}
namespaces:
  - {{name: chat, modelFingerprint: "m@1/bf16", blockTokens: 16, blockBytes: 64KiB}}
sharing:
  accepts: [{{group: {owner}/research, namespace: chat}}]
"""


@pytest.fixture
def pair(saltern: Saltern) -> Iterator[SimpleNamespace]:
    """Names of two tenants that are not there yet, and a file that declares them."""
    number = next(_numbers)
    owner, other = f"declared-{number}", f"partner-{number}"
    yield SimpleNamespace(owner=owner, other=other, text=PAIR.format(owner=owner, other=other))
    for name in (owner, other):
        saltern("tenant", "delete", name, "--yes")


def test_a_file_is_planned_applied_and_then_nothing_is_left_to_do(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path
) -> None:
    file, secrets = tmp_path / "tenants.yaml", tmp_path / "secrets"
    file.write_text(pair.text)
    secrets.mkdir()
    planned = saltern("apply", "-f", str(file), "--dry-run")
    assert planned.code == 0
    assert f"+ tenant tenants/{pair.owner}" in planned.out and "limit: 8MiB" in planned.out
    assert "! every member of the group reads what the namespace stores in it" in planned.out
    assert saltern("tenant", "get", pair.owner).code == 3, "a dry run changes nothing"

    nowhere = saltern("apply", "-f", str(file), "--yes")
    assert (nowhere.code, "--save-secrets" in nowhere.err) == (2, True)
    nobody = saltern("apply", "-f", str(file), "--save-secrets", str(secrets))
    assert (nobody.code, "--yes" in nobody.err) == (2, True)
    assert saltern("tenant", "get", pair.owner).code == 3

    done = saltern("apply", "-f", str(file), "--save-secrets", str(secrets), "--yes", "--wait")
    assert done.code == 0, done.err
    assert "in force on" in done.err
    secret = secrets / f"{pair.owner}.ci.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().startswith("sk-saltern-") and "sk-saltern-" not in done.out + done.err
    group = saltern("share", "get", f"{pair.owner}/research")
    assert group.out.count("(accepted since") == 2
    (key,) = saltern("key", "list", "--tenant", pair.owner, "-o", "json").json["apiKeys"]
    assert (key["expireTime"], key["projectId"]) == ("2099-01-01T00:00:00Z", "web")

    again = saltern("apply", "-f", str(file), "--yes", "--wait")
    assert again.code == 0
    assert again.out.startswith("nothing to do: ")
    assert saltern("apply", "-f", str(file), "-o", "json").json["plan"]["steps"] == []


def test_an_export_changes_nothing_where_it_was_made_and_holds_no_secret(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text)
    assert saltern("apply", "-f", str(file), "--show-secrets", "--yes").code == 0
    exported = saltern("export-config", pair.owner, pair.other)
    assert exported.code == 0 and "sk-saltern" not in exported.out
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(exported.out.encode()), isatty=lambda: False))
    same = saltern("apply", "-f", "-", "--prune", "-o", "json").json["plan"]
    assert (same["steps"], same["notDeclared"], same["waiting"]) == ([], [], [])
    listed = saltern("export-config", pair.owner, "-o", "json")
    (tmp_path / "as.json").write_text(listed.out)
    assert saltern("apply", "-f", str(tmp_path / "as.json"), "--prune", "--yes").out.startswith("nothing to do")
    assert pair.owner in saltern("export-config").out
    assert saltern("export-config", "never-made").code == 3


def test_a_change_shows_before_and_after_and_pruning_is_asked_for(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(pair.text)
    shown = saltern("apply", "-f", str(tmp_path), "--show-secrets", "--yes", "-o", "json").json
    assert list(shown["secrets"]) == [f"tenants/{pair.owner}/apiKeys/ci"]
    assert shown["failed"] is None and shown["notDone"] == []
    (tmp_path / "a.yaml").write_text(
        f"apiVersion: saltern/v1\nkind: Tenant\nname: {pair.owner}\nstate: suspended\n"
        "quota: {dram: {reserved: 0, limit: 4MiB}}\nsalt: {grace: 0}\nkeys: []\nsharing: {groups: []}\n"
    )
    planned = saltern("apply", "-f", str(tmp_path), "--dry-run").out
    assert "limit: 8MiB -> 4MiB" in planned and "! lowers what it is promised" in planned
    assert "grace: 12h -> 0" in planned and "left alone:" in planned and "0 to delete" in planned
    pruned = saltern("apply", "-f", str(tmp_path), "--prune", "--yes")
    assert pruned.code == 0, pruned.err
    assert f"deleted API key tenants/{pair.owner}/apiKeys/ci" in pruned.err
    assert saltern("share", "get", f"{pair.owner}/research").code == 3
    assert saltern("tenant", "get", pair.owner, "-o", "json").json["state"] == "STATE_SUSPENDED"
    quota = saltern("quota", "get", pair.owner, "-o", "json").json
    assert quota["tiers"][0]["weight"] == 200, "what the file does not mention stays"
    assert quota["rates"]["bytesPerS"] == str(500 * 2**20)
    assert saltern("apply", "-f", str(tmp_path), "--prune").out.startswith("nothing to do")


def test_tenants_in_no_file_go_only_when_that_is_asked_for(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(pair.text)
    assert saltern("apply", "-f", str(tmp_path), "--show-secrets", "--yes").code == 0
    everything = saltern("export-config").out
    kept = [one for one in everything.split("---\n") if one and f"name: {pair.other}\n" not in one]
    (tmp_path / "a.yaml").write_text("---\n" + "---\n".join(kept))
    assert "tenants/" + pair.other not in saltern("apply", "-f", str(tmp_path), "--prune", "--dry-run").out
    planned = saltern("apply", "-f", str(tmp_path), "--prune-tenants", "-o", "json", "--dry-run").json["plan"]["steps"]
    deleted = [step["name"] for step in planned if step["action"] == "delete"]
    assert deleted == [f"tenants/{pair.other}"]


def test_what_cannot_be_had_is_refused_whole_with_its_place(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text)
    assert saltern("apply", "-f", str(file), "--show-secrets", "--yes").code == 0
    file.write_text(pair.text.replace("64KiB", "128KiB").replace("limit: 8MiB", "limit: 9MiB"))
    refused = saltern("apply", "-f", str(file), "--yes")
    assert refused.code == 5
    assert f"{file}:10:5" in refused.err and "never changes" in refused.err
    assert "8388608" in saltern("quota", "get", pair.owner, "-o", "json").out, "nothing of it was done"
    file.write_text(pair.text.replace("quota:", "qouta:"))
    wrong = saltern("apply", "-f", str(file), "--yes")
    assert (wrong.code, "did you mean 'quota'?" in wrong.err) == (2, True)
    assert wrong.err.count(f"{file}:") == 3, "each problem in a line of its own, then the error"


def test_i5_a_failure_in_the_middle_says_what_is_done_and_the_next_run_goes_on(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text.replace("reserved: 1MiB, limit: 8MiB", "reserved: 1TiB, limit: 2TiB"))
    failed = saltern("apply", "-f", str(file), "--show-secrets", "--yes", "-o", "json")
    assert failed.code == 5 and json.loads(failed.err)["error"]["metadata"]
    outcome = failed.json
    assert outcome["failed"]["name"] == f"tenants/{pair.owner}/quota/dram"
    assert [step["name"] for step in outcome["done"]] == [f"tenants/{pair.owner}", f"tenants/{pair.other}"]
    assert len(outcome["done"]) + 1 + len(outcome["notDone"]) == len(outcome["plan"]["steps"])
    told = saltern("apply", "-f", str(file), "--show-secrets", "--yes")
    assert "1 of 10 steps" in told.err and "was refused; run the same command again" in told.err
    file.write_text(pair.text)
    assert saltern("apply", "-f", str(file), "--show-secrets", "--yes").code == 0
    assert saltern("apply", "-f", str(file)).out.startswith("nothing to do")


def test_what_somebody_else_changed_meanwhile_is_refused_not_overwritten(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text)
    assert saltern("apply", "-f", str(file), "--show-secrets", "--yes").code == 0
    file.write_text(pair.text.replace("limit: 8MiB, weight: 200", "limit: 9MiB, weight: 200"))

    def meanwhile(*_: object) -> None:
        """The question is answered after another administrator has changed the quota."""
        assert saltern("quota", "set", pair.owner, "--weight", "300").code == 0

    monkeypatch.setattr("saltern.cli.apply.confirm", meanwhile)
    refused = saltern("apply", "-f", str(file))
    assert refused.code == 5
    assert "has changed since the etag" in refused.err
    assert saltern("quota", "get", pair.owner, "-o", "json").json["tiers"][0]["limitBytes"] == str(8 * 2**20)


def test_an_answer_that_is_lost_does_nothing_twice_and_loses_no_secret(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    """Every changing call is made, its answer thrown away, and made again as it was."""
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text)
    real, answered = AdminClient.call, set[tuple[str, str]]()

    def lossy(client: AdminClient, method: Any, request: Any, **options: Any) -> Any:
        response = real(client, method, request, **options)
        rotates = isinstance(request, RotateApiKeyRequest)  # each with another etag: only the first one's is lost
        sent = type(request).__name__, "" if rotates else request.request_id if hasattr(request, "request_id") else ""
        if hasattr(request, "request_id") and sent not in answered:
            answered.add(sent)
            raise UnavailableError("the answer was lost", retry_after_ms=1)
        return response

    monkeypatch.setattr(AdminClient, "call", lossy)
    done = saltern("apply", "-f", str(file), "--show-secrets", "--yes", "-o", "json")
    monkeypatch.setattr(AdminClient, "call", real)
    assert done.code == 0, done.err
    assert len(answered) == len(done.json["done"]) + 1, "each step once, and the key a new secret"
    assert saltern("apply", "-f", str(file)).out.startswith("nothing to do")
    (secret,) = done.json["secrets"].values()
    with AdminClient(stack.control, ApiKey(secret)) as client:
        assert client.tenant_id == pair.owner, "the secret that was shown is the key's"


def test_i1_a_tenants_admin_applies_what_is_its_own(
    saltern: Saltern, pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(pair.text)
    assert saltern("apply", "-f", str(file), "--show-secrets", "--yes").code == 0
    made = saltern(
        "key", "create", "boss", "--tenant", pair.owner, "--role", "tenant-admin", "--save", str(tmp_path / "k")
    )
    assert made.code == 0
    monkeypatch.setenv("SALTERN_API_KEY_FILE", str(tmp_path / "k"))
    foreign = saltern("apply", "-f", str(file))
    assert (foreign.code, f"{file}:23:1" in foreign.err) == (3, True)
    own = pair.text.split("---\n")[0]
    file.write_text(own.replace("limits: {dram: 4MiB}", "limits: {dram: none}"))
    changed = saltern("apply", "-f", str(file), "--prune", "--yes")
    assert changed.code == 0, changed.err
    assert "4MiB -> none" in changed.out
    assert "boss" not in changed.out, "the key in use is never pruned"
    file.write_text(own.replace("weight: 200", "weight: 900"))
    refused = saltern("apply", "-f", str(file), "--yes")
    assert (refused.code, "only a platform administrator" in refused.err) == (5, True)
    exported = saltern("export-config")
    assert exported.code == 0 and exported.out.count("kind: Tenant") == 1


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        (["absent.yaml"], 3, "there is no file"),
        (["empty/"], 3, "holds no .yaml"),
        (["a.yaml", "a.yaml"], 2, "given twice"),
        (["nothing.yaml"], 2, "declare nothing"),
    ],
)
def test_files_that_cannot_be_applied(offline: Saltern, tmp_path: Path, files: list[str], code: int, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.yaml").write_text("apiVersion: saltern/v1\nkind: Tenant\nname: acme\n")
    (tmp_path / "nothing.yaml").write_text("# nothing\n---\n")
    shown = offline("apply", *(part for name in files for part in ("-f", str(tmp_path / name))))
    assert (shown.code, said in shown.err) == (code, True), shown.err
