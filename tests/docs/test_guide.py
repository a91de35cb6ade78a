"""The page of a tenant's administrator is typed in as it stands, with nothing but that administrator's key."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.markdown import ROOT, commands
from tests.docs.typing_in import running, type_in

PAGE = "docs/tenant-admin.md"


def test_what_a_tenants_administrator_types(reachable_tmp_path: Path) -> None:
    folder = reachable_tmp_path
    data_dir = folder / "data"
    server = f"saltern up --data-dir {data_dir} --dram 256MiB --ports auto"
    with running(server, folder, data_dir / "run.json") as run:
        platform = {"SALTERN_DATA_DIR": str(data_dir)}
        type_in("saltern tenant create alpha", folder, **platform)
        type_in("saltern quota set alpha --dram-reserved 32MiB --dram-limit 128MiB", folder, **platform)
        type_in("saltern key create admin --tenant alpha --role tenant-admin --save admin.key", folder, **platform)
        headings = re.findall(r"^## (.+)$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
        connect, *session = [command for heading in headings for command in commands(PAGE, heading)]
        assert "127.0.0.1:7700" in connect
        environment = dict(pair.split("=") for pair in connect.removeprefix("export ").split())
        environment["SALTERN_CONTROL"] = run["control_endpoint"]
        for command in session:
            type_in(command, folder, **environment)
        assert len(session) > 15
        assert (folder / "alpha.jsonl").read_text(encoding="utf-8").count("\n") > 10
        assert "PUBLIC KEY" in (folder / "audit.pem").read_text(encoding="utf-8")
        refused = type_in("saltern tenant get beta", folder, status=3, **environment)
        assert refused == ""
