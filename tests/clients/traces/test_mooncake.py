"""The trace loader: real traces, and files that nobody should trust."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError, NotFoundError, SalternError
from saltern.traces import TraceRequest, encode_jsonl, file_sha256, read_trace
from saltern.traces.mooncake import LINE_MAX_BYTES

GOOD = b'{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}\n'


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    return path


def test_reads_requests_in_order_plain_and_gzip(tmp_path: Path) -> None:
    lines = GOOD + b'{"timestamp": 6.5, "input_length": 10, "hash_ids": [3], "tenant": "a", "more": null}\n'
    expected = [
        TraceRequest(timestamp_ms=5, input_tokens=600, output_tokens=7, block_ids=(1, 2)),
        TraceRequest(timestamp_ms=6.5, input_tokens=10, block_ids=(3,), tenant="a"),
    ]
    assert list(read_trace(write(tmp_path, lines))) == expected
    assert list(read_trace(write(tmp_path, gzip.compress(lines)))) == expected
    assert list(read_trace(write(tmp_path, lines.rstrip()))) == expected
    assert list(read_trace(write(tmp_path, lines), limit_requests=1)) == expected[:1]


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        (b"", 1, "no request"),
        (b"\n", 1, "truncated"),
        (GOOD + b"nonsense\n", 2, "malformed"),
        (GOOD + b'{"timestamp": 5, "input_length": 600, "output_length": 7}\n', 2, "hash_ids"),
        (b'{"timestamp": -1, "input_length": 600, "hash_ids": [1]}', 1, ">= 0"),
        (b'{"timestamp": 1e999, "input_length": 600, "hash_ids": [1]}', 1, "timestamp"),
        (b'{"timestamp": NaN, "input_length": 600, "hash_ids": [1]}', 1, "malformed"),
        (b'{"timestamp": "1", "input_length": 600, "hash_ids": [1]}', 1, "timestamp"),
        (b'{"timestamp": true, "input_length": 600, "hash_ids": [1]}', 1, "timestamp"),
        (b'{"timestamp": 1, "input_length": 600.5, "hash_ids": [1]}', 1, "input_length"),
        (b'{"timestamp": 1, "input_length": -600, "hash_ids": [1]}', 1, "input_length"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": []}', 1, "hash_ids"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": "12"}', 1, "hash_ids"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, null]}', 1, "hash_ids"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, -2]}', 1, "hash_ids"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": [99999999999999999999]}', 1, "hash_ids"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, 2, 3]}', 1, "3 hash_ids for 600 tokens"),
        (b"[1]", 1, "object"),
        (b"\xff\xfe\x00", 1, "malformed"),
        (b"[" * 100_000, 1, "object"),
        (GOOD.replace(b"{", b'{"tenant": "\xff",'), 1, "UTF-8"),
    ],
)
def test_a_bad_line_is_one_error_with_file_and_line(tmp_path: Path, content: bytes, line: int, expected: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgumentError, match=expected) as caught:
        list(read_trace(path))
    assert f"{str(path)!r}, line {line}:" in caught.value.message
    assert caught.value.reason == "INVALID_TRACE"
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_truncated_or_damaged_gzip_is_reported_not_shortened(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(GOOD.replace(b"5,", b"%d," % i) for i in range(5000)))
    with pytest.raises(InvalidArgumentError, match="damaged or truncated"):
        list(read_trace(write(tmp_path, packed[: len(packed) // 2])))
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 0xFF
    with pytest.raises(InvalidArgumentError):
        list(read_trace(write(tmp_path, bytes(damaged))))


def test_an_endless_line_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(10 * 1024**3)  # sparse: 10 GiB of NULs without a newline
    with pytest.raises(InvalidArgumentError, match=str(LINE_MAX_BYTES)):
        list(read_trace(path))


def test_what_is_no_readable_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no trace file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(InvalidArgumentError, match="directory"):
        list(read_trace(tmp_path))
    with pytest.raises(InvalidArgumentError, match="null"):
        file_sha256(Path("a\0b"))


@given(st.binary(max_size=200))
def test_any_bytes_are_requests_or_one_typed_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp(), content)
    try:
        list(read_trace(path))
    except SalternError as error:
        assert isinstance(error, InvalidArgumentError)


def test_encoding_reads_back_as_equal_values(tmp_path: Path) -> None:
    requests = [
        TraceRequest(timestamp_ms=1, input_tokens=513, output_tokens=3, block_ids=(7, 2**63 - 1), tenant="t"),
        TraceRequest(timestamp_ms=2, input_tokens=1, block_ids=(0,)),
    ]
    assert list(read_trace(write(tmp_path, encode_jsonl(requests)))) == requests


def test_sha256_is_of_the_file_as_it_lies_there(tmp_path: Path) -> None:
    packed = gzip.compress(GOOD)
    assert file_sha256(write(tmp_path, packed)) == hashlib.sha256(packed).hexdigest()


@pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")
@pytest.mark.parametrize(
    ("name", "sha256", "requests", "blocks"),
    [
        (
            "conversation_trace.jsonl.gz",
            "f44195697c46b9cb97a5fc5f52756969104d6f7174e4c3a16484f7d3c46391a5",
            12031,
            288500,
        ),
        ("synthetic_trace.jsonl.gz", "06a1ba7f8991791d0f504774265a498816ed9d35522cd6a5337a738bc5b5f1ea", 3993, None),
    ],
)
def test_real_traces_read_whole(name: str, sha256: str, requests: int, blocks: int | None) -> None:
    path = Path(os.environ["SALTERN_TRACES"]) / "mooncake" / name
    read = list(read_trace(path))
    assert file_sha256(path) == sha256
    assert len(read) == requests
    assert blocks is None or sum(len(request.block_ids) for request in read) == blocks


@pytest.mark.skipif("SALTERN_TRACES" not in os.environ, reason="SALTERN_TRACES names no folder of traces")
def test_a_trace_that_names_tenants_keeps_them() -> None:
    path = Path(os.environ["SALTERN_TRACES"]) / "multitenant" / "four_tenants_15min.jsonl.gz"
    assert {request.tenant for request in read_trace(path)} >= {"scan", "agent"}
