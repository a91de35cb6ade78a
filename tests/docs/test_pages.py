"""The documentation is typed in as it stands, on a real stack; only folders and ports are this test's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT, blocks, commands
from tests.docs.typing_in import running, type_in


def test_the_first_session_of_the_readme(reachable_tmp_path: Path) -> None:
    setup, up, *session = [
        part for command in commands("README.md", "First session") for part in command.split(" && ")
        if not part.startswith((". .venv", "export "))
    ]  # fmt: skip
    assert setup == "make setup"
    assert up.startswith("saltern up --data-dir ")
    data_dir = reachable_tmp_path / "data"
    server = f"saltern up --data-dir {data_dir} --dram 512MiB --ports auto"
    with running(server, reachable_tmp_path, data_dir / "run.json") as run:
        here = {"SALTERN_DATA_DIR": str(data_dir)}
        after = next(index for index, command in enumerate(session) if command.startswith("saltern usage"))
        for command in session[:after]:
            type_in(command, reachable_tmp_path, **here)
        (program,) = blocks("README.md", "First session", "python")
        assert '"127.0.0.1:7700"' in program
        (reachable_tmp_path / "program.py").write_text(
            program.replace("127.0.0.1:7700", run["control_endpoint"]), encoding="utf-8"
        )
        printed = type_in(f"{sys.executable} program.py", reachable_tmp_path)
        assert printed.splitlines() == ["2", "b'state of block 0'", "b'state of block 1'"]
        usage, audit, doctor = (type_in(command, reachable_tmp_path, **here) for command in session[after:])
        assert "alpha" in usage
        assert "CreateApiKey" in audit
        assert "FAIL" not in doctor


def test_the_services_of_the_operators_page(reachable_tmp_path: Path, postgres: Any) -> None:
    control, node, redeem, export, create_key = commands("docs/operating.md", "As services")
    folder = reachable_tmp_path
    replaced: dict[str, str] = {"/var/lib/saltern": str(folder)}

    def adapted(command: str) -> str:
        for old, new in replaced.items():
            assert old in command or not old.startswith("127"), f"{old} is not in {command}"
            command = command.replace(old, new)
        return command

    with postgres.fresh_database() as database:
        urls = {
            "SALTERN_MIGRATION_DATABASE_URL": database.owner.render_as_string(hide_password=False),
            "SALTERN_DATABASE_URL": database.app.render_as_string(hide_password=False),
        }
        assert "--database-url postgresql://..." in control
        control = adapted(control).replace(" --database-url postgresql://...", "").replace(":7700", ":0")
        ready = folder / "control.json"
        with running(f"{control} --ready-file {ready}", folder, ready, **urls) as serving:
            replaced["127.0.0.1:7700"] = serving["endpoint"]
            type_in(adapted(redeem), folder)
            assert export.startswith("export ")
            names = dict(pair.split("=") for pair in adapted(export).removeprefix("export ").split())
            del replaced["127.0.0.1:7700"]
            type_in(adapted(create_key), folder, **names)
            replaced["127.0.0.1:7700"] = serving["endpoint"]
            node = adapted(node).replace(":7701", ":0").replace(":7702", ":0").replace("64GiB", "64MiB")
            ready = folder / "node.json"
            with running(f"{node} --ready-file {ready}", folder, ready):
                assert "node-1" in type_in("saltern node list", folder, **names)


PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    here = [link.split("#")[0] for link in links if "://" not in link]
    assert [link for link in here if link and not ((ROOT / page).parent / link).exists()] == []
