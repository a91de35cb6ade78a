from __future__ import annotations

from saltern.cli.charts import sparkline


def test_little_is_low_much_is_high_and_nothing_is_a_dot() -> None:
    assert sparkline([0, 1, 50, 100, None], encoding="utf-8") == "·▁▅█·"
    assert sparkline([0.5, 0.999, 1.0], top=1.0, encoding="utf-8") == "▅██"
    assert sparkline([], encoding="utf-8") == "" and sparkline([None, 0], encoding="utf-8") == "··"


def test_a_terminal_without_blocks_gets_digits() -> None:
    assert sparkline([0, 1, 8], encoding="ascii") == ".28"
