"""``saltern trace``: what is in a file, several tenants from options, and what is known when reading ends early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saltern.cli import main


def rows(count: int, block_tokens: int = 64) -> str:
    made = [
        {"timestamp": 100 * n, "input_length": 3 * block_tokens, "hash_ids": [1, 2, n + 3], "session_id": n % 3}
        for n in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in made)


def test_show_says_what_is_in_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(rows(10))
    assert main(["trace", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "30, 12 of them distinct" in shown
    assert "0.6000 of prompt tokens" in shown
    assert main(["trace", "show", str(path), "-o", "json", "--requests", "5"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["requests"], said["blockTokens"], said["sessions"], said["complete"]) == (5, 64, 3, True)
    assert sum(said["arrivals"]["requests"]) == 5


def test_damage_leaves_what_was_read_and_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(rows(4) + "{")
    assert main(["trace", "show", str(path)]) == 2
    shown = capsys.readouterr()
    assert "NOT COMPLETE" in shown.out
    assert "12, 6 of them distinct" in shown.out
    assert shown.err.count("error: ") == 1
    assert "line 5" in shown.err


def test_compose_from_options_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "t.jsonl", tmp_path / "mix.jsonl.gz"
    path.write_text(rows(20))
    parts = ["--tenant", f"a={path},shift=5", "--tenant", f"b={path},clip=0.5..1.5", "--block-tokens", "128"]
    scan = ["--scan", "scan,rate=2,seconds=9,tokens=256", "--output-file", str(made)]
    assert main(["trace", "compose", *parts, *scan, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tenants"]["a"]["requests"], said["tenants"]["b"]["requests"]) == (20, 10)
    assert said["tenants"]["scan"]["infiniteHitRate"] == 0
    assert [len(part["steps"]) for part in said["provenance"]["parts"]] == [3, 3, 2]
    assert main(["trace", "show", str(made), "-o", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["tenants"] == said["tenants"]
    assert again["identity"] == "synthesised"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--tenant", "a"], ["--tenant", "a=x,speed=2"], ["--tenant", "a=x,clip=5"], ["--scan", "s,rate=no"]],
)
def test_options_that_make_no_sense_are_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "compose", *arguments]) == 2
    assert "hint: " in capsys.readouterr().err
