"""Pages of the guide are typed in as they stand, over one stack: each with the keys of those whom it speaks to."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import saltern
from tests.docs.markdown import ROOT, commands, page_blocks, page_commands
from tests.docs.typing_in import running, type_in

#: Commands that ask before they do it; a test has nobody to ask.
ASKS = re.compile(r"saltern (salt rotate|salt set .*--scope|share accept|share leave)\b")
TENANTS = """\
apiVersion: saltern/v1
kind: Tenant
name: {name}
quota:
  dram: {{reserved: 16MiB, limit: 32MiB}}
namespaces:
  - {{name: chat, modelFingerprint: "qwen3-8b@1/bf16", blockTokens: 16, blockBytes: 2MiB}}
keys:
  - {{name: admin, role: tenant-admin}}
  - {{name: engine, role: writer}}
"""


@dataclass(frozen=True, slots=True)
class Guide:
    """A stack with the tenants that pages name: acme and blue, and gamma, whose salts one page changes."""

    folder: Path
    control: str
    data_dir: Path

    @property
    def platform(self) -> Mapping[str, str]:
        return {"SALTERN_DATA_DIR": str(self.data_dir)}

    def secret(self, tenant: str, key: str) -> str:
        return (self.folder / "secrets" / f"{tenant}.{key}.key").read_text().strip()

    def admin(self, tenant: str) -> Mapping[str, str]:
        return {"SALTERN_CONTROL": self.control, "SALTERN_API_KEY": self.secret(tenant, "admin")}

    def type_in(self, command: str, who: Mapping[str, str], status: int = 0) -> str:
        asks = ASKS.search(command) and "--yes" not in command
        return type_in(
            re.sub(r"( +#|$)", r" --yes\1", command, count=1) if asks else command, self.folder, status=status, **who
        )


@pytest.fixture(scope="module")
def guide() -> Iterator[Guide]:
    with tempfile.TemporaryDirectory(prefix="saltern-guide-") as name:
        folder, data_dir = Path(name), Path(name) / "data"
        folder.chmod(0o755)  # PostgreSQL's unprivileged user passes through it
        server = f"saltern up --data-dir {data_dir} --dram 256MiB --ports auto"
        with running(server, folder, data_dir / "run.json", SALTERN_AUDIT_CHECKPOINT_INTERVAL_S="1") as run:
            (folder / "tenants.yaml").write_text(
                "---\n".join(TENANTS.format(name=one) for one in ("acme", "blue", "gamma"))
            )
            (folder / "secrets").mkdir(mode=0o700)
            ready = Guide(folder, run["control_endpoint"], data_dir)
            ready.type_in("saltern apply -f tenants.yaml --yes --save-secrets secrets/ --wait", ready.platform)
            yield ready


def test_what_a_tenants_administrator_types(guide: Guide) -> None:
    """docs/tenant-admin.md, with nothing but that administrator's key."""
    page = "docs/tenant-admin.md"
    guide.type_in("saltern tenant create alpha", guide.platform)
    guide.type_in("saltern quota set alpha --dram-reserved 32MiB --dram-limit 128MiB", guide.platform)
    guide.type_in("saltern key create admin --tenant alpha --role tenant-admin --save admin.key", guide.platform)
    headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    connect, *session = [command for heading in headings for command in commands(page, heading)]
    assert "127.0.0.1:7700" in connect
    environment = dict(pair.split("=") for pair in connect.removeprefix("export ").split())
    environment["SALTERN_CONTROL"] = guide.control
    for command in session:
        guide.type_in(command, environment)
    assert len(session) > 15
    assert (guide.folder / "alpha.jsonl").read_text(encoding="utf-8").count("\n") > 10
    assert "PUBLIC KEY" in (guide.folder / "audit.pem").read_text(encoding="utf-8")
    assert guide.type_in("saltern tenant get beta", environment, status=3) == ""


def test_two_tenants_share_and_part(guide: Guide) -> None:
    """docs/sharing.md: each side with its own administrator's key; its client is in the group meanwhile."""
    create, invite, accept, show, leave = page_commands("docs/sharing.md")
    (program,) = page_blocks("docs/sharing.md", "python")
    guide.type_in(create, guide.admin("acme"))
    guide.type_in(invite, guide.admin("acme"))
    assert "invited" in guide.type_in(show, guide.admin("blue"))
    guide.type_in(accept, guide.admin("blue"))
    told = program.replace('control="..."', f'control="{guide.control}"')
    told = told.replace('api_key="..."', f'api_key="{guide.secret("blue", "engine")}"')
    with eval(told, {"Client": saltern.Client}) as client:
        assert client.get_many(client.block_keys([b"nobody's block"])) == [saltern.Miss()]
    guide.type_in(leave, guide.admin("blue"))
    assert "research" not in guide.type_in(show, guide.admin("blue"))


def test_salts_are_set_and_rotated(guide: Guide) -> None:
    """docs/salts.md, of a tenant of its own: the last of it loses what is stored."""
    for command in page_commands("docs/salts.md"):
        told = guide.type_in(command.replace("acme", "gamma"), guide.admin("gamma"))
    assert (guide.folder / "ann.key").stat().st_mode & 0o777 == 0o600
    told = guide.type_in("saltern salt get gamma -o json", guide.admin("gamma"))
    assert json.loads(told)["scope"] == "SCOPE_USER"
    refused = guide.type_in("saltern salt rotate acme --no-grace", guide.admin("gamma"), status=3)
    assert refused == ""


def test_the_audit_trail_is_exported_and_verified(guide: Guide) -> None:
    """docs/audit.md: its recipes and the verification, without jq or an agent that collects."""
    follow, *recipes, verify = page_commands("docs/audit.md")
    assert "--follow" in follow and "/var/lib/siem" in follow
    once = follow.replace(" --follow", "").replace("/var/lib/siem", ".").replace("siem-agent --stdin", "head -1")
    assert json.loads(guide.type_in(once, guide.platform))["metadata"]["product"]
    guide.type_in("saltern audit public-key > audit.pem", guide.platform)
    daily, *others = recipes
    for recipe in (*others, daily):  # what is verified last: each of them is an event of the trail itself
        guide.type_in(re.sub(r"\| jq .*", "| wc -l", recipe), guide.admin("acme"))
    folder = guide.data_dir / "control" / "audit-checkpoints"
    told = guide.type_in(verify.replace("/mnt/audit", str(folder)), {})
    assert [line.split()[0] for line in told.splitlines() if line.strip()] == ["chain", "read", "signed", "intact"]


def test_usage_is_read_and_priced(guide: Guide) -> None:
    """docs/metering.md: tables, a bill by the page's own prices, and the digest of an hour."""
    page = "docs/metering.md"
    (prices,) = page_blocks(page, "json")
    (guide.folder / "prices.json").write_text(prices)
    for command in page_commands(page):
        told = guide.type_in(command, guide.platform)
    assert re.match(r"[0-9a-f]{64} ", told)
    assert "tokens_saved_value" in (guide.folder / "november.csv").read_text()


def test_a_plan_is_made(tmp_path: Path) -> None:
    """docs/planning.md, over traces of a few requests under the names that the page has."""
    requests = [
        {
            "timestamp": 500 * number,
            "input_length": 4 * 512,
            "output_length": 8,
            "hash_ids": [0, 1, number % 7 + 2, 100 + number],
        }
        for number in range(60)
    ]
    for name in ("conversation.jsonl", "sessions.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in requests))
        type_in(f"gzip {name}", tmp_path)
    for command in page_commands("docs/planning.md"):
        assert type_in(command, tmp_path)
    assert "<html" in (tmp_path / "plan.html").read_text()


def test_commands_that_look_for_a_cause(guide: Guide) -> None:
    """docs/troubleshooting.md names them in its text; each says something of a deployment that is well."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = {command.replace("TENANT", "acme") for command in re.findall(r"`(saltern [a-z][^`]*)`", text)}
    assert {"saltern doctor", "saltern node list", "saltern usage acme", "saltern audit list"} <= named
    named -= {
        "saltern namespace get",
        "saltern usage",
        "saltern top acme",
    }  # which one, the table says; and one runs on
    for command in sorted(named):
        assert guide.type_in(command, guide.platform)
    guide.type_in("saltern namespace get acme chat && saltern top acme --once", guide.platform)
    assert "FAIL" not in guide.type_in("saltern doctor", guide.platform)
