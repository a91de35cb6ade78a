"""Prefill times fitted to measured ones: exact where those are, never negative, and one clear error for bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saltern.cli import main
from saltern.errors import InvalidArgumentError
from saltern.replay.calibrate import Sample, fit, read_samples
from saltern.replay.prefill import TimeModel
from saltern.replay.profiles import builtin_profiles, read_profiles

LENGTHS = (128, 1024, 4096, 16_384, 65_536)
HEADING = "prompt_tokens,cached_tokens,ttft_ms\n"


def samples(overhead_s: float, linear_s: float, attention_s: float) -> list[Sample]:
    made = []
    for tokens in LENGTHS:
        for cached in (0, tokens // 2):
            new, pairs = tokens - cached, tokens**2 - cached**2
            made.append(Sample(tokens, cached, overhead_s + linear_s * new + attention_s * pairs))
    return made


def test_times_of_the_model_give_the_model_back() -> None:
    found = fit(samples(0.012, 5e-5, 2e-9))
    assert found.overhead_s == pytest.approx(0.012, rel=1e-6)
    assert found.linear_s == pytest.approx(5e-5, rel=1e-6)
    assert found.attention_s == pytest.approx(2e-9, rel=1e-6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.rms_s < 1e-9


def test_no_term_is_negative_although_that_would_fit_better() -> None:
    # Times that grow ever more slowly: a free fit has a negative quadratic term.
    bent = [one._replace(ttft_s=one.prompt_tokens**0.5 / 100) for one in samples(0, 1, 1) if not one.cached_tokens]
    found = fit(bent)
    assert found.attention_s == 0.0
    assert min(found.overhead_s, found.linear_s) >= 0
    # The best of those that are allowed: any other slope is worse.
    squares = sum(off**2 for off in found.residuals_s)
    for factor in (0.99, 1.01):
        other = [one.ttft_s - found.overhead_s - found.linear_s * factor * one.prompt_tokens for one in bent]
        assert sum(off**2 for off in other) > squares


def test_fitted_profiles_take_the_measured_times(tmp_path: Path) -> None:
    path, written = tmp_path / "ttft.csv", tmp_path / "mine.json"
    measured = samples(0.02, 8e-5, 3e-9)
    path.write_text(HEADING + "".join(f"{n},{p},{ttft_s * 1e3!r}\n" for n, p, ttft_s in measured))
    arguments = ["--model", "qwen3-8b", "--hardware", "1xh100", "--name", "ours", "--write", str(written)]
    assert main(["replay", "calibrate", str(path), *arguments]) == 0
    profiles = read_profiles(written)
    times = TimeModel(profiles.model("ours"), profiles.machine("ours"))
    for one in measured:
        assert times.prefill_s(one.prompt_tokens, one.cached_tokens) == pytest.approx(one.ttft_s, rel=1e-6)
    assert profiles.model("ours").kv_bytes_per_token == builtin_profiles().model("qwen3-8b").kv_bytes_per_token
    assert "ttft.csv" in profiles.machine("ours").source


@pytest.mark.parametrize(
    "content",
    [
        HEADING + "10,0,5\n20,5,9.5\n",
        "ttft_ms,prompt_tokens\n5,10\n9.5,20\n",
        '{"prompt_tokens": 10, "ttft_ms": 5}\n\n{"prompt_tokens": 20, "cached_tokens": 5, "ttft_ms": 9.5}\n',
        '[{"prompt_tokens": 10, "ttft_ms": 5},\n {"prompt_tokens": 20, "cached_tokens": 5, "ttft_ms": 9.5}]',
        "\ufeff" + HEADING + "10,0,5\r\n20,5,9.5\r\n",
    ],
)
def test_the_forms_of_a_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ttft"
    path.write_text(content, encoding="utf-8", newline="")
    first, second = read_samples(path)
    assert first == Sample(10, 0, 0.005)
    assert (second.prompt_tokens, second.ttft_s) == (20, 0.0095)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: expected a heading"),
        (b"a,b\n1,2\n", "line 1: expected a heading"),
        (HEADING.encode(), "line 1: there is no sample"),
        (HEADING.encode() + b"10,0,5\n10,0\n", "line 3: 2 values under 3 headings"),
        (HEADING.encode() + b"10,0,5\n10.5,0,5\n", "line 3: expected prompt_tokens as a whole number"),
        (HEADING.encode() + b"10,10,5\n", "line 2: expected cached_tokens below"),
        (HEADING.encode() + b"10,-1,5\n", "line 2: expected cached_tokens as a whole number"),
        (HEADING.encode() + b"10,0,nan\n", "line 2: expected ttft_ms as milliseconds above 0"),
        (HEADING.encode() + b"10,0,-5\n", "line 2: expected ttft_ms"),
        (HEADING.encode() + b"\xff\n", "line 2: expected UTF-8"),
        (b'{"prompt_tokens": 10, "ttft_ms": 5}\n{"prompt_tokens": 10,\n', "line 2: expected JSON"),
        (b'[{"prompt_tokens": 10, "ttft_ms": 5},\n\n 7]', "line 3: expected an object"),
        (b'{"prompt_tokens": true, "ttft_ms": 5}\n', "line 1: expected prompt_tokens"),
        (b'{"prompt_tokens": 10, "ttft_ms": 1e999}\n', "line 1: expected ttft_ms"),
        (b"[" * 100_000, "line 1: "),
    ],
)
def test_damage_is_one_error_with_its_line(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "ttft.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="ttft.csv, " + told.replace("(", r"\(")) as caught:
        read_samples(path)
    assert caught.value.reason == "INVALID_CALIBRATION"
    assert "prompt_tokens,cached_tokens,ttft_ms" in caught.value.hint


def test_samples_that_tell_nothing_apart_are_refused() -> None:
    for useless in ([Sample(10, 0, 1.0)] * 9, [Sample(10, 0, 1.0), Sample(20, 0, 2.0)]):
        with pytest.raises(InvalidArgumentError, match="fewer than 3 different prompts"):
            fit(useless)
    flat = fit([Sample(n, 0, 1.0) for n in LENGTHS])
    assert (flat.overhead_s, flat.r_squared) == (pytest.approx(1.0), None)
    with pytest.raises(InvalidArgumentError, match="no time for each token"):
        flat.profiles("x", builtin_profiles().model("qwen3-8b"), builtin_profiles().machine("1xh100"), "f")


def test_the_command_tells_the_fit_and_a_replay_uses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "ttft.csv", tmp_path / "t.jsonl"
    path.write_text(HEADING + "".join(f"{n},{p},{ttft_s * 1e3!r}\n" for n, p, ttft_s in samples(0.5, 1e-3, 1e-9)))
    assert main(["replay", "calibrate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "500" in shown and "R^2 1.000000" in shown and "RESIDUAL MS" in shown
    assert main(["replay", "calibrate", str(path), "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["overheadS"] == pytest.approx(0.5)
    assert len(said["residuals"]) == len(LENGTHS) * 2

    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n')
    small = ["--column", "no-cache", "--engines", "1", "--nodes", "1", "--calibrate", str(path), "-o", "json"]
    assert main(["replay", str(trace), *small]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["columns"][0]["ttft"]["meanS"] == pytest.approx(0.5 + 1.024 + 1e-9 * 1024**2, rel=1e-6)
    assert "fitted to 10 times" in said["setup"]["hardware"]["source"]
