"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError
from saltern.sizes import SIZE_MAX_BYTES, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), ("4096", 4096), ("1B", 1), ("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("1gib", 2**30),
        ("2GB", 2 * 10**9), (" 1 KiB ", 1024), ("8PiB", 2**53), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_units_are_powers_of_1024_or_1000(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        "1e9",
        "nan",
        "inf",
        "0x10",
        "1 MiB B",
        "1,5GiB",
        "MiB",
        "0.3B",
        "9PiB",
        "9" * 17,
        "1_000",
        "\u0661",
        "1\0",
    ],
)
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="dram limit") as caught:
        parse_size(text, what="dram limit")
    assert caught.value.reason == "INVALID_SIZE"
    assert caught.value.hint


@given(st.integers(0, SIZE_MAX_BYTES))
def test_plain_bytes_are_exact(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**53, "8 PiB"), (2**63, "8192 PiB")],
)
def test_people_read_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
