"""Writes the dashboards: ``python docker/grafana/build.py [FOLDER]``; without one into dashboards/ beside this file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from operations import FLEET, SLO, TIERS
from tenancy import FAIRNESS, TENANT

FOLDER = Path(__file__).parent / "dashboards"
ALL = (FLEET, TENANT, SLO, TIERS, FAIRNESS)


def files() -> dict[str, str]:
    """Every dashboard's file, by name."""
    return {f"{each.uid}.json": json.dumps(each.to_json(), indent=2) + "\n" for each in ALL}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)
