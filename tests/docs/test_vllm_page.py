"""docs/vllm.md names every option with its default, every metric, and commands that exist."""

from __future__ import annotations

import re

import pytest

from saltern.sizes import format_size
from saltern.vllm.options import ConnectorOptions
from saltern.vllm.stats import COUNTERS, DURATIONS
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")


def _rows(section: str) -> dict[str, str]:
    """Of a section's table: the first column, without its quotes, and the second one."""
    _, found, after = PAGE.partition(f"## {section}\n")
    assert found
    body = after.partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", body, re.M))


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes"):
        return f"`{format_size(int(str(value)))}`".replace(" ", "")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_every_option_is_there_with_its_default_and_none_that_is_not() -> None:
    given = _rows("Options")
    assert list(given) == list(ConnectorOptions.__struct_fields__)
    defaults = {name: getattr(ConnectorOptions(), name) for name in given}
    assert {name: given[name] for name, value in defaults.items() if value != ""} == {
        name: _shown(name, value) for name, value in defaults.items() if value != ""
    }


def test_every_metric_is_there() -> None:
    names = [f"vllm:saltern_{counter.name}_total" for counter in COUNTERS]
    names += [f"vllm:saltern_{duration.name}" for duration in DURATIONS]
    assert list(_rows("Metrics")) == names


def test_eight_lines_lead_to_the_first_hit() -> None:
    (lines,) = re.findall(r"^## Eight lines to the first hit\n\n```text\n(.*?)^```", PAGE, re.M | re.S)
    assert lines.count("\n") == 8


@pytest.mark.parametrize("reason", sorted(set(re.findall(r"\(`([A-Z]+_[A-Z_]+)`\)", PAGE))))
def test_every_reason_that_is_named_is_given_by_the_connector(reason: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "clients/saltern/vllm").glob("*.py"))
    assert f'"{reason}"' in sources
