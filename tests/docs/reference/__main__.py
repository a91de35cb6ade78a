"""``python -m tests.docs.reference``: writes ``docs/reference/`` from the code; tests compare the two."""

from __future__ import annotations

from tests.docs.markdown import ROOT
from tests.docs.reference.pages import PAGES

for name, write in PAGES.items():
    (ROOT / "docs" / "reference" / name).write_text(write(ROOT), encoding="utf-8")
