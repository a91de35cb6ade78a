"""``python -m tests.isolation``: run the suite and print the table, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.isolation.adapter import NotOfferedError, StoreAdapter
from tests.isolation.cases_budget import full_length
from tests.isolation.suite import SUITE
from tests.isolation.table import Outcome, Row, run_case

DETAIL_CHARS = 96
#: Of a Mooncake cluster below the nodes of every case.
STORAGE_BYTES = 512 * 1024 * 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.isolation", description=__doc__)
    parser.add_argument("--store", choices=("saltern", "mooncake"), default="saltern", help="what to run it against")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm", help="of the honest clients")
    parser.add_argument("--engine", choices=("local", "mooncake"), default="local", help="what keeps Saltern's bytes")
    parser.add_argument("--case", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="the JSON of another store's run, for comparison")
    parser.add_argument("--full", action="store_true", help="10^6 puts and removes instead of 10^5")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    if arguments.full:
        full_length()
    resources = ExitStack()
    try:
        adapter = _adapter(arguments, resources)
    except NotOfferedError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 0
    beside: dict[str, Any] = json.loads(arguments.beside.read_text()) if arguments.beside else {"store": "", "rows": []}
    others: dict[str, dict[str, str]] = {row["case"]: row for row in beside["rows"]}
    rows = []
    with resources, closing(adapter):
        for tried in SUITE:
            if arguments.case and arguments.case not in tried.name:
                continue
            row = run_case(adapter, tried)
            rows.append(row)
            if arguments.output == "table":
                _show(row, others.get(row.case))
    failed = sum(row.outcome is Outcome.FAILS for row in rows)
    if arguments.output == "json":
        print(json.dumps({"store": adapter.name, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"\n{adapter.name}: {len(rows)} cases, {failed} failed")
        if others:
            failed_others = sum(row["outcome"] == Outcome.FAILS for row in others.values())
            print(f"{beside['store']} (second column and detail): {len(others)} cases, {failed_others} failed")
    return 1 if failed else 0


def _adapter(arguments: argparse.Namespace, resources: ExitStack) -> StoreAdapter:
    """Adapters are imported when asked for: each needs what its own store needs."""
    if arguments.store == "mooncake":
        from tests.isolation.mooncake_store import MooncakeAdapter

        return MooncakeAdapter()
    import structlog

    from tests.isolation.saltern_store import SalternAdapter

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the table is what is read here
    if arguments.engine == "local":
        return SalternAdapter(arguments.transport)
    from tests.support.mooncake_cluster import missing, running_cluster

    if why := missing():
        raise NotOfferedError(why)
    folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="saltern-mooncake-")))
    cluster = resources.enter_context(running_cluster(folder, STORAGE_BYTES))
    return SalternAdapter(arguments.transport, cluster.settings)


def _show(row: Row, other: dict[str, str] | None) -> None:
    beside = f" {other['outcome']:<6}" if other else ""
    print(f"{row.rule:<4} {row.outcome:<6}{beside} {row.case}")
    for detail in (row.detail, other["detail"] if other else ""):
        if detail:
            print(textwrap.fill(detail, DETAIL_CHARS, initial_indent=" " * 12, subsequent_indent=" " * 14), flush=True)


if __name__ == "__main__":
    sys.exit(main())
