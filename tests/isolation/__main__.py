"""``python -m tests.isolation``: run the suite and print the table, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict

import structlog

from tests.isolation.saltern_store import SalternAdapter
from tests.isolation.suite import SUITE
from tests.isolation.table import Outcome, Row, run_case

DETAIL_CHARS = 96


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.isolation", description=__doc__)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm", help="of the honest clients")
    parser.add_argument("--case", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the table is what is read here

    adapter = SalternAdapter(arguments.transport)
    rows = []
    with closing(adapter):
        for tried in SUITE:
            if arguments.case and arguments.case not in tried.name:
                continue
            row = run_case(adapter, tried)
            rows.append(row)
            if arguments.output == "table":
                _show(row)
    failed = sum(row.outcome is Outcome.FAILS for row in rows)
    if arguments.output == "json":
        print(json.dumps({"store": adapter.name, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"\n{adapter.name}: {len(rows)} cases, {failed} failed")
    return 1 if failed else 0


def _show(row: Row) -> None:
    print(f"{row.rule:<4} {row.outcome:<6} {row.case}")
    print(textwrap.fill(row.detail, DETAIL_CHARS, initial_indent=" " * 12, subsequent_indent=" " * 12), flush=True)


if __name__ == "__main__":
    sys.exit(main())
