"""``python -m tests.faults.upgrade``: a rolling upgrade and the way back, under load, with real processes.

Two control planes and three nodes of an earlier release are replaced one by one by this one, and back; then the schema
goes back too, and forward again. Everybody works meanwhile. Prints what was felt, as ``make faults``; an act that was
acknowledged and not audited, a lease above a quota, or whoever is not well after a step is a violation.

The earlier release is a commit of this repository: by default the last one with an earlier schema.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.__main__ import described, told
from tests.support.network import enter_private_network

if TYPE_CHECKING:
    from tests.faults.run import Outcome

ROOT = Path(__file__).resolve().parents[2]
_OURS = ("clients", "controlplane", "dataplane", "migrations", "tenants")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.upgrade", description=__doc__)
    parser.add_argument("--from", dest="commit", metavar="COMMIT", help="the earlier release")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what the processes said")
    arguments = parser.parse_args()
    enter_private_network("tests.faults.upgrade", sys.argv[1:])

    commit = arguments.commit or earlier_schema()
    with tempfile.TemporaryDirectory(prefix="saltern-earlier-") as folder:
        earlier = Path(folder)
        check_out(commit, earlier)
        figures = described(lambda say: rehearse(earlier, arguments.log, say))
        schema = newest_revision(earlier)
    print(f"from {commit[:12]}, schema {schema}, to schema {newest_revision(ROOT)}")
    return told(figures | {"from": commit}, arguments.json)


def rehearse(earlier: Path, log: Path | None, say: Callable[[str], None]) -> tuple[list[Outcome], bool]:
    """All steps; the outcomes, and whether each process had a network of its own."""
    from migrations.run import current_revision, downgrade
    from tests.faults.deployment import CONTROLS, NODES, POSTGRES, running_deployment
    from tests.faults.run import FaultRun, Target

    with running_deployment(log, earlier) as deployment:
        run = FaultRun(deployment, say)
        outcomes: list[Outcome] = []

        def replace(name: str, code: Path, way: str) -> None:
            service = deployment.services[name]

            def restart() -> None:
                service.terminate()
                deployment.code[name] = code
                service.start()
                service.wait_ready()

            target = Target.NODE if name in NODES else Target.CONTROL
            outcomes.append(run.watch(target, way, service, restart))

        def take_schema_back() -> None:
            downgrade(deployment.owner_url(), newest_revision(earlier))

        def require_schema(of: Path) -> None:
            found, expected = current_revision(deployment.owner_url()), newest_revision(of)
            assert found == expected, f"the schema is at {found}, not at {expected}: the wrong release ran"

        require_schema(earlier)
        with run.load():
            for name in (*CONTROLS, *NODES):
                replace(name, ROOT, "to this release")
            require_schema(ROOT)
            for name in (*NODES, *CONTROLS):
                replace(name, earlier, "and back")
            outcomes.append(run.watch(Target.POSTGRES, "schema back", deployment.services[POSTGRES], take_schema_back))
            require_schema(earlier)
            replace(CONTROLS[0], ROOT, "forward again")
            require_schema(ROOT)
        return outcomes, deployment.can_cut


def earlier_schema() -> str:
    """The last commit before the newest revision of the schema was added."""
    newest = f"migrations/versions/{newest_revision(ROOT)}_*.py"
    added = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", newest).strip()
    return _git("rev-parse", f"{added}^").strip()


def check_out(commit: str, folder: Path) -> None:
    """The packages of ``commit``, in ``folder``."""
    archive = subprocess.run(["git", "archive", commit, *_OURS], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    folder.chmod(0o755)


def newest_revision(folder: Path) -> str:
    """Of the schema, in the release in ``folder``: revisions are numbered, and named by their number."""
    return max(path.name[:4] for path in (folder / "migrations" / "versions").glob("[0-9]*.py"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
