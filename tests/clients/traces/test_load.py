"""Loaders: each form as it is published, and files that nobody should trust."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from saltern.errors import InvalidArgumentError, NotFoundError
from saltern.traces import lines
from saltern.traces.hash_ids import encode_request
from saltern.traces.load import Format, detect_format, load_trace, parse_format
from saltern.traces.options import LoadOptions
from saltern.traces.request import Arrival, Identity, TraceRequest, block_ids

HASHED = b'{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}\n'


def write(tmp_path: Path, content: bytes | str, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def session(name: str = "s0", **fields: Any) -> dict[str, Any]:
    first = {"t": 0.0, "type": "n", "in": 130, "out": 9, "hash_ids": [1, 2], "stop": "tool_use", "api_time": 4.0}
    second = {"t": 9.0, "type": "s", "in": 200, "out": 5, "hash_ids": [1, 2, 3], "think_time": 5.0, "ttft": 0.5}
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": [first, second], **fields}


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_hash_ids_with_tenants_and_sessions_plain_and_gzip(tmp_path: Path) -> None:
    more = b'\n{"timestamp": 6.5, "input_length": 10, "hash_ids": [], "tenant": "a", "session_id": 4, "more": null}\n'
    expected = [
        TraceRequest(arrival_s=0.005, input_tokens=600, output_tokens=7, block_ids=block_ids([1, 2])),
        TraceRequest(arrival_s=0.0065, input_tokens=10, tenant="a", session="4"),
    ]
    plain = load_trace(write(tmp_path, b"\xef\xbb\xbf" + HASHED + more))
    packed = load_trace(write(tmp_path, gzip.compress(HASHED + more), "packed"))
    assert list(plain) == list(plain) == list(packed) == expected, "a trace is read as often as one likes"
    assert (plain.block_tokens, plain.identity, plain.arrival) == (512, Identity.RECORDED, Arrival.ABSOLUTE)


@pytest.mark.parametrize("block_tokens", [16, 64, 512])
def test_the_block_size_of_hash_ids_is_found(tmp_path: Path, block_tokens: int) -> None:
    rows = [
        {"timestamp": number, "input_length": length, "hash_ids": list(range(-(-length // block_tokens)))}
        for number, length in enumerate((8, 100, 2000))
    ]
    assert load_trace(write(tmp_path, jsonl(*rows))).block_tokens == block_tokens


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    request = TraceRequest(
        arrival_s=1.25, input_tokens=600, output_tokens=3, block_ids=block_ids([5, 6]), tenant="a", session="s/1",
        parent_session="s", think_s=0.5, stop="end_turn", api_s=2.0, ttft_s=0.25,
    )  # fmt: skip
    trace = load_trace(write(tmp_path, encode_request(request)))
    assert list(trace) == [request]
    assert trace.arrival is Arrival.CLOSED_LOOP


def test_claude_code_sessions_are_merged_with_their_sub_agents(tmp_path: Path) -> None:
    agent = {"t": 3.0, "type": "subagent", "agent_id": "x", "requests": [session()["requests"][0]]}
    first = session(requests=[session()["requests"][0], agent, {**session()["requests"][1], "t": 1000.0}])
    trace = load_trace(write(tmp_path, jsonl(first, session("s1"))), LoadOptions(session_every_s=5, gap_max_s=50))
    requests = list(trace)
    assert [(r.arrival_s, r.session, r.parent_session) for r in requests] == [
        (0.0, "s0", ""),
        (3.0, "s0/x", "s0"),
        (5.0, "s1", ""),
        (14.0, "s1", ""),
        (53.0, "s0", ""),  # 997 s after the sub-agent, capped at 50
    ]
    assert [r.think_s for r in requests] == [None, None, None, 5.0, 5.0]
    assert (requests[0].stop, requests[0].api_s, requests[3].ttft_s) == ("tool_use", 4.0, 0.5)
    assert not set(requests[0].block_ids) & set(requests[2].block_ids), "ids are local to a session"
    assert requests[0].block_ids == requests[1].block_ids, "and shared with its sub-agents"
    assert (trace.arrival, trace.block_tokens) == (Arrival.CLOSED_LOOP, 64)
    assert "capped at 50 s" in trace.notes[0]


def ragpulse(tmp_path: Path, *rows: object) -> Path:
    chunks = {"1_sys_prompt": "sys_prompt_id", "2_passages": "passage_id", "3_history": "history_id"}
    chunks |= {"4_user_input": "user_input_id", "5_web_search": "web_search_id"}
    for number, (stem, name) in enumerate(chunks.items()):
        write(tmp_path, jsonl({name: number, "token_length": 100}) + "\n", f"{stem}.jsonl")
    return write(tmp_path, jsonl(*rows), "0_trace.jsonl")


def rag_row(at: str, system: list[int], user: list[int], tokens: int) -> dict[str, Any]:
    ids = {"sys_prompt": system, "passages_ids": [], "history": [], "web_search": [], "user_input": user}
    return {"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids, "session_id": "x"}


def test_ragpulse_chunks_become_prefix_blocks_and_weeks_follow_each_other(tmp_path: Path) -> None:
    path = ragpulse(
        tmp_path, rag_row("604000", [0, 1], [3], 307), rag_row("5", [0, 1], [], 200), rag_row("6", [1], [], 100)
    )
    first, second, third = load_trace(path)
    assert [r.arrival_s for r in (first, second, third)] == [604_000, 604_805, 604_806]
    assert [len(r.block_ids) for r in (first, second, third)] == [5, 4, 2]
    assert first.block_ids[:3] == second.block_ids[:3], "192 tokens of the same chunks"
    assert first.block_ids[3] != second.block_ids[3]
    assert not set(third.block_ids) & set(first.block_ids), "the same chunk elsewhere is no prefix"


def test_tables_have_times_and_lengths_and_no_identity(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50,9,1"
    burst = (
        "Model,Timestamp,Request tokens,Response tokens,Total tokens,Log Type\nGPT-4,5,10,2,12,API log\nX,7.5,1,0,1,C\n"
    )
    first, second = load_trace(write(tmp_path, azure))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0, 374, 44)
    assert second.arrival_s == pytest.approx(3.31941)
    trace = load_trace(write(tmp_path, burst))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in trace] == [(0, 10, 2), (2.5, 1, 0)]
    assert (trace.identity, trace.block_tokens) == (Identity.NONE, 0)


@pytest.mark.parametrize("distribution", ["Gamma,0.5,1", "Weibull,0.6,1"])
def test_servegen_arrivals_are_drawn_from_a_seed_at_the_rate_of_each_window(tmp_path: Path, distribution: str) -> None:
    path = write(tmp_path, f"0,5,2,{distribution}\n600,0,0,,0,0\n1200,10,2,{distribution}\n", "client.csv")
    times = [request.arrival_s for request in load_trace(path, LoadOptions(seed=3, input_tokens=7))]
    windows = [sum(start <= at < start + 600 for at in times) for start in (0, 600, 1200)]
    assert windows[1] == 0
    assert 2400 < windows[0] < 3600 < 4800 < windows[2] < 7200
    assert times == sorted(times)
    assert times == [request.arrival_s for request in load_trace(path, LoadOptions(seed=3))]
    assert times != [request.arrival_s for request in load_trace(path, LoadOptions(seed=4))]


def test_texts_share_what_they_begin_with(tmp_path: Path) -> None:
    same = "x" * 256 * 2
    rows = [{"timestamp": 2_000_000 * n, "input": same + "yz"[n], "output": "12345", "session_id": "s"} for n in (0, 1)]
    first, second = load_trace(write(tmp_path, jsonl(*rows)))
    assert (second.arrival_s, first.input_tokens, first.output_tokens) == (2.0, 129, 2)
    assert [a == b for a, b in zip(first.block_ids, second.block_ids, strict=True)] == [True, True, False]
    prompts = load_trace(write(tmp_path, f"{same}\n\n{same}1\n", "some.txt"), LoadOptions(spacing_s=3))
    assert [(r.arrival_s, len(r.block_ids)) for r in prompts] == [(0, 2), (3, 3)]
    assert prompts.identity is Identity.DERIVED
    assert "4 of them to a token" in prompts.identity_note


def test_openai_logs_in_their_envelopes(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    bare = {"created": 1_700_000_000, "messages": messages, "user": "acme", "usage": {"completion_tokens": 12}}
    answer = {"body": {"choices": [{"message": {"role": "assistant", "content": "12345678"}}]}}
    batch = {"body": {"messages": messages}, "response": answer, "time": 1_700_000_002_000, "session_id": "c"}
    prompt = {"request": {"prompt": "p" * 8}, "timestamp": "2023-11-14T22:13:25Z"}
    first, second, third = load_trace(write(tmp_path, jsonl(bare, batch, prompt)))
    assert [r.arrival_s for r in (first, second, third)] == [0, 2, 5]
    assert [r.output_tokens for r in (first, second, third)] == [12, 2, 0]
    assert first.block_ids == second.block_ids
    assert (first.tenant, second.session, third.input_tokens) == ("acme", "c", 2)


GOOD_SESSION = jsonl(session())
DAMAGED: list[tuple[str, bytes | str, int, str]] = [
    ("", "", 1, "no request"),
    ("\n", "\n\n", 1, "no request"),
    ("nonsense", HASHED + b"nonsense\n", 2, "no sound JSON"),
    ("missing ids", HASHED + b'{"timestamp": 5, "input_length": 600}\n', 2, "hash_ids"),
    ("negative time", b'{"timestamp": -1, "input_length": 600, "hash_ids": [1, 2]}', 1, ">= 0"),
    ("endless time", b'{"timestamp": 1e999, "input_length": 600, "hash_ids": [1, 2]}', 1, "timestamp"),
    ("NaN", b'{"timestamp": NaN, "input_length": 600, "hash_ids": [1, 2]}', 1, "NaN is no number"),
    ("text time", b'{"timestamp": "1", "input_length": 600, "hash_ids": [1, 2]}', 1, "timestamp"),
    ("huge id", b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, 99999999999999999999]}', 1, "hash_ids"),
    ("huger id", b'{"timestamp": 1, "input_length": 6, "hash_ids": [' + b"9" * 5000 + b"]}", 1, "no sound JSON"),
    ("negative id", b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, -2]}', 1, "hash_ids"),
    ("name twice", b'{"timestamp": 1, "timestamp": 2, "input_length": 6, "hash_ids": [1]}', 1, "there twice"),
    ("deep", b'{"timestamp": ' + b"[" * 100_000, 1, "no sound JSON"),
    ("not UTF-8", HASHED + b'{"timestamp": 6, "input_length": 6, "hash_ids": [1], "tenant": "\xff"}', 2, "not UTF-8"),
    ("time goes back", HASHED + HASHED.replace(b"5,", b"4,", 1), 2, "before that of the request before it"),
    ("another block size", HASHED * 300 + HASHED.replace(b"[1, 2]", b"[1, 2, 3]"), 301, "3 hash_ids for 600 tokens"),
    ("too few ids", HASHED + HASHED.replace(b"600", b"6000"), 2, "2 hash_ids for 6000 tokens"),
    ("truncated", gzip.compress(HASHED * 9, mtime=0)[:-12], 5, "damaged or truncated"),
    ("session: block sizes", GOOD_SESSION + jsonl(session("b", block_size=32)), 2, "blocks of 32 tokens in a file of"),
    ("session: id twice", GOOD_SESSION * 2, 2, "there twice"),
    ("session: no ids", GOOD_SESSION + jsonl(session("b", requests=[{"t": 0, "in": 5}])), 2, "has no hash_ids"),
    ("session: time back", jsonl(session(requests=session()["requests"][::-1])), 1, "before the one before it"),
    ("azure: cells", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", 2, "2 cells"),
    ("azure: time", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", 2, "no time"),
    ("azure: tokens", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,-1,1\n", 2, "no numbers of tokens"),
    ("burstgpt: NaN", "Timestamp,Request tokens,Response tokens\nNaN,1,1\n", 2, "no number from 0 on"),
    ("servegen: window", "0,1,1,Gamma,1,1\n10,1,1,Gamma,1,1\n", 2, "a window at 10 s after"),
    ("openai: time", jsonl({"messages": []}), 1, "no time"),
    ("texts: order", jsonl({"timestamp": 9, "input": "a"}, {"timestamp": 3, "input": "a"}), 2, "--sort"),
    ("binary junk", bytes(range(256)) * 8, 1, ""),
    ("binary junk later", HASHED + bytes(range(256)) * 8, 2, ""),
    ("sessions: truncated", gzip.compress(GOOD_SESSION.encode(), mtime=0)[:-12], 1, "damaged or truncated"),
    ("unknown JSON", jsonl({"name": 1}), 1, "no format that is known ('name')"),
    ("unknown text", "hello\n", 1, "neither JSON nor a heading"),
]


@pytest.mark.parametrize(("content", "line", "expected"), [row[1:] for row in DAMAGED], ids=[row[0] for row in DAMAGED])
def test_damage_is_one_error_with_its_line(tmp_path: Path, content: bytes | str, line: int, expected: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidArgumentError) as caught:
        list(load_trace(path))
    error = caught.value
    assert error.reason == "INVALID_TRACE"
    assert error.metadata == {"line": str(line)}
    assert expected in error.message + error.hint
    assert error.hint


@pytest.mark.parametrize(
    ("content", "sound"), [(HASHED * 3 + b"{", 3), (jsonl(session(), session("b"), session("c")) + "{", 6)]
)
def test_what_is_sound_before_the_damage_is_not_lost(tmp_path: Path, content: bytes | str, sound: int) -> None:
    given: list[TraceRequest] = []
    with pytest.raises(InvalidArgumentError, match="line 4"):
        for request in load_trace(write(tmp_path, content)):
            given.append(request)
    assert len(given) == sound


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    with path.open("wb") as file:
        file.write(HASHED + b'{"timestamp": 5, "tenant": "')
        file.truncate(10 * 1024**3)  # sparse: 10 GiB that take no disk
    with pytest.raises(InvalidArgumentError, match=f"line 2: the line is longer than {lines.LINE_MAX_BYTES} bytes"):
        list(lines.read_lines(path))


def test_texts_are_sorted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl({"timestamp": 9e6, "input": "late"}, {"timestamp": 3e6, "input": "a"}))
    assert [(r.arrival_s, r.input_tokens) for r in load_trace(path, LoadOptions(sort=True))] == [(0, 1), (6, 1)]


def test_formats_have_names_and_files_that_are_not_there_are_said_to_be(tmp_path: Path) -> None:
    assert parse_format("azure") is Format.AZURE
    with pytest.raises(InvalidArgumentError, match="no trace format 'csv'"):
        parse_format("csv")
    with pytest.raises(NotFoundError):
        detect_format(tmp_path / "absent")
    with pytest.raises(InvalidArgumentError, match="lengths of its chunks are missing"):
        load_trace(write(tmp_path, jsonl(rag_row("1", [], [], 0))))


def test_reading_a_trace_holds_one_request_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    path = write(tmp_path, b"".join(HASHED.replace(b"5", b"%d" % n, 1) for n in range(20_000)))
    trace = load_trace(path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in trace) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
