"""The generated pages are those of this code, and leave nothing out."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import ROOT
from tests.docs.reference import errors
from tests.docs.reference.pages import PAGES

SOURCES = [
    path for package in errors.PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name
]

#: Reasons of log lines and metrics that are no errors.
LOG_ONLY = {"CONNECTED", "RDMA_NOT_ENCRYPTED", "STOPPING"}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_this_code_writes(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == PAGES[name](ROOT), "run `make reference`"


def test_every_reason_that_the_code_names_is_on_the_page() -> None:
    named = {
        reason
        for path in SOURCES
        for reason in re.findall(r'reason="([A-Z][A-Z0-9_]{3,})"', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 300
    assert named - {row.reason for row in errors.sorted_rows(ROOT)} - LOG_ONLY == set()


def test_most_errors_say_what_to_do() -> None:
    rows = errors.sorted_rows(ROOT)
    silent = [row.reason for row in rows if not row.hint and row.status != "INTERNAL"]
    assert len(silent) < len(rows) // 3, silent


def test_every_environment_variable_is_documented() -> None:
    used = {
        variable
        for path in SOURCES
        for variable in re.findall(r"\bSALTERN_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8"))
    }
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/**/*.md"))
    assert [variable for variable in sorted(used) if variable not in pages] == []
