"""The command line where nothing runs: help, wrong use, hostile arguments, exit codes. No server is needed here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltern import errors
from saltern.cli import cli, failure, main
from saltern.cli.deferred import DeferredCommand, ServerCommand
from saltern.cli.secret_file import secret_file
from saltern.errors import AlreadyExistsError, InvalidArgumentError, SalternError, StatusCode

Saltern = Callable[..., Any]
SECRET = "sk-saltern-0123456789abcdef-" + "A" * 43


def commands(command: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command of ours; those that a server package brings are its own tests' business."""
    if isinstance(command, ServerCommand):
        return
    if isinstance(command, DeferredCommand):
        if path == ("bench",):
            return
        command = command.load()
    yield path
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_explains_itself(offline: Saltern, path: tuple[str, ...]) -> None:
    shown = offline(*path, "--help")
    assert shown.code == 0
    assert shown.out.startswith("Usage: saltern")
    assert "Options of every command" in shown.out
    assert shown.err == ""


def test_help_loads_neither_grpc_nor_rich_nor_a_server() -> None:
    """Startup is quick because heavy imports wait until they are needed: proven by what is loaded, not by a clock."""
    heavy = ("grpc", "google.protobuf", "rich", "cryptography", "controlplane", "dataplane", "asyncio", "msgspec")
    program = (
        "import sys; from saltern.cli import main; code = main(['--help']); "
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_python_m_saltern_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "saltern", "--data-dir", str(tmp_path), "tenant", "list"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stderr.startswith("error: no Saltern runs on the data directory")


def test_no_stack_says_how_to_start_one(offline: Saltern) -> None:
    shown = offline("tenant", "list")
    assert shown.code == 7
    assert shown.out == ""
    error, hint = shown.err.splitlines()
    assert error.startswith("error: no Saltern runs on")
    assert "saltern up" in hint


def test_errors_are_json_for_programs(offline: Saltern) -> None:
    for arguments in (
        ("--output", "json", "tenant", "list"),
        ("tenant", "list", "-o", "json"),
        ("-ojson", "node", "list"),
    ):
        shown = offline(*arguments)
        assert shown.code == 7
        assert json.loads(shown.err)["error"]["reason"] == "NO_LOCAL_STACK"
    shown = offline("--output=json", "quota", "set", "alpha", "--dram-limit", "lots")
    assert shown.code == 2
    assert json.loads(shown.err)["error"]["code"] == "INVALID_ARGUMENT"


def test_global_options_work_before_and_after_the_command_and_beat_the_environment(
    offline: Saltern, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_DATA_DIR", "/from-environment")
    assert "/from-environment" in offline("node", "list").err
    here = str(tmp_path / "given")
    assert here in offline("--data-dir", here, "node", "list").err
    assert here in offline("node", "list", "--data-dir", here).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-command",), "No such command"),
        (("tenant", "create"), "TENANT"),
        (("tenant", "create", ""), "not a valid identifier"),
        (("tenant", "create", "UPPER"), "not a valid identifier"),
        (("tenant", "create", "a" * 64), "not a valid identifier"),
        (("tenant", "create", "a\nb"), "not a valid identifier"),
        (("tenant", "create", "platform"), "reserved"),
        (("tenant", "create", "\udcff\udcfe"), "not a valid identifier"),
        (("tenant", "create", "a\0b"), "not a valid identifier"),
        (("tenant", "create", "a", "--display-name", "x\x1b[31m"), "control characters"),
        (("tenant", "create", "a", "--display-name", "\udcff"), "not UTF-8"),
        (("tenant", "create", "a", "--display-name", "x" * 5000), "above the limit"),
        (("quota", "set", "alpha"), "nothing to set"),
        (("quota", "set", "alpha", "--dram-limit", "-1"), "whole number of bytes"),
        (("quota", "set", "alpha", "--dram-limit", "9" * 30), "whole number of bytes"),
        (("quota", "set", "alpha", "--dram-limit", "1e9"), "whole number of bytes"),
        (("quota", "set", "alpha", "--dram-limit", "0.3B"), "whole number of bytes"),
        (("quota", "set", "alpha", "--dram-limit", "nan"), "whole number of bytes"),
        (("quota", "set", "alpha", "--weight", "0"), "1<=x<=1000"),
        (("quota", "set", "alpha", "--weight", "99999999999999999999"), "1<=x<=1000"),
        (("quota", "set", "alpha", "--operations-per-s", "-1"), "0<=x<=1099511627776"),
        (("quota", "set", "alpha", "--operations-per-s", "1KiB"), "not a valid integer"),
        (("quota", "set", "alpha", "--bytes-per-s", "-1"), "whole number of bytes"),
        (("quota", "set", "alpha", "--ssd-write-bytes-per-s", "fast"), "whole number of bytes"),
        (("namespace", "create", "a", "b"), "Missing option"),
        (
            ("namespace", "create", "a", "b", "--model-fingerprint", "m", "--block-tokens", "x", "--block-bytes", "1"),
            "x",
        ),
        (("key", "create", "k", "--role", "root"), "root"),
        (("key", "create", "k", "--role", "writer", "--expires-in", "-1d"), "not a duration"),
        (("key", "create", "k", "--role", "writer", "--expires-in", "9999999d"), "not a duration"),
        (("key", "create", "k", "--role", "writer", "--save", "/"), "directory"),
        (("audit", "list", "--limit", "0"), "range"),
        (("audit", "list", "--tenant", "a", "--platform"), "exclude each other"),
        (("--deadline-ms", "0", "node", "list"), "range"),
        (("--output", "xml", "node", "list"), "xml"),
        (("demo", "--requests", "1"), "2<=x<=100000"),
    ],
)
def test_wrong_use_is_two_lines_and_exit_code_2(offline: Saltern, arguments: tuple[str, ...], message: str) -> None:
    shown = offline(*arguments)
    assert shown.code == 2
    assert shown.out == ""
    error, hint = shown.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert message in error


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["tenant", "quota", "set", "get", "key", "--dram-limit", "--output", "json", "-o", "--", "-h"]
            ),
            st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF), max_size=12),
        ),
        max_size=6,
    )
)
def test_any_arguments_end_in_an_exit_code_and_never_in_a_traceback(arguments: list[str]) -> None:
    os.environ["SALTERN_DATA_DIR"] = "/nothing-here"
    try:
        assert main(arguments) in {0, 2, 7}
    finally:
        del os.environ["SALTERN_DATA_DIR"]


def test_arguments_that_are_not_utf8_reach_us_as_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"saltern", b"tenant", b"get", b"\xff\xfe"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"error: ")


def test_every_error_of_the_tree_has_an_exit_code() -> None:
    expected = {
        "InvalidArgumentError": 2, "ProtocolError": 2, "NotFoundError": 3, "PermissionDeniedError": 3,
        "UnauthenticatedError": 4, "FailedPreconditionError": 5, "AlreadyExistsError": 5, "AbortedError": 5,
        "ResourceExhaustedError": 6, "EntryTooLargeError": 6, "UnavailableError": 7, "DeadlineExceededError": 7,
        "InternalError": 1, "DataLossError": 1,
    }  # fmt: skip
    for name, code in expected.items():
        assert failure.exit_code(getattr(errors, name)("x")) == code
    assert set(failure._EXIT_CODES) == set(StatusCode) - {StatusCode.OK}


def test_a_message_cannot_drive_the_terminal_or_forge_a_line() -> None:
    lines = failure.error_lines(SalternError("a\nhint: run this\x1b[2J\u202e", hint="b\rc"))
    assert lines == "error: a hint: run this\\x1b[2J\\u202e\nhint: b c"


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", 2, "does not hold an API key"),
        (b"hunter2-hunter2", 2, "does not hold an API key"),
        (b"\xff" * 100, 2, "does not hold an API key"),
        (SECRET.encode() * 100, 2, "does not hold an API key"),
    ],
)
def test_a_bad_key_file_is_explained_and_never_shown(
    offline: Saltern, tmp_path: Path, content: bytes, code: int, message: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    shown = offline("--control", "127.0.0.1:1", "--api-key-file", str(path), "tenant", "list")
    assert shown.code == code
    assert message in shown.err
    assert "hunter2" not in shown.err
    assert "AAAA" not in shown.err


def test_missing_credentials_say_what_to_pass(offline: Saltern, tmp_path: Path) -> None:
    shown = offline("--control", "127.0.0.1:1", "tenant", "list")
    assert (shown.code, "--api-key-file" in shown.err) == (4, True)
    shown = offline("--control", "127.0.0.1:1", "--api-key-file", str(tmp_path / "absent"), "tenant", "list")
    assert (shown.code, "there is no API key file" in shown.err) == (3, True)


@pytest.mark.parametrize("control", ["", "localhost", "http://x:1", "x:0", "x:70000", "x:1:2", "\udcff:1", "a b:1"])
def test_a_malformed_control_endpoint_is_wrong_use(
    offline: Saltern, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_API_KEY", SECRET)
    shown = offline("--control", control, "tenant", "list")
    assert shown.code == 2
    assert "HOST:PORT" in shown.err


def test_an_unreachable_control_plane_is_unavailable(offline: Saltern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SALTERN_API_KEY", SECRET)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    shown = offline("--control", "127.0.0.1:1", "--deadline-ms", "2000", "tenant", "list")
    assert shown.code == 7
    assert "127.0.0.1:1" in shown.err
    assert SECRET not in shown.err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"control_endpoint": 1, "admin_api_key_file": "x"}', "[" * 9999])
def test_a_damaged_run_file_is_explained(offline: Saltern, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    shown = offline("--data-dir", str(tmp_path), "tenant", "list")
    assert shown.code == 5
    assert "not what `saltern up` writes" in shown.err


def test_i1_the_admins_key_does_not_go_to_the_port_of_a_stack_that_was_killed(offline: Saltern, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "admin.key").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        run = {
            "control_endpoint": f"127.0.0.1:{impostor.getsockname()[1]}",
            "admin_api_key_file": str(tmp_path / "admin.key"),
            "pid": ended.pid,
        }
        (tmp_path / "run.json").write_text(json.dumps(run))
        shown = offline("--data-dir", str(tmp_path), "--deadline-ms", "500", "tenant", "list")
        assert (shown.code, "has ended without a word" in shown.err) == (7, True)
        impostor.setblocking(False)
        with pytest.raises(BlockingIOError):
            impostor.accept()


def test_destructive_work_is_not_done_when_nobody_can_be_asked(
    offline: Saltern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALTERN_API_KEY", SECRET)
    shown = offline("--control", "127.0.0.1:1", "tenant", "delete", "alpha")
    assert shown.code == 2
    assert "--yes" in shown.err


def test_without_the_server_package_up_says_what_to_install(offline: Saltern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saltern.cli.deferred.entry_points", lambda group: [])
    for arguments in (("up",), ("serve", "control"), ("serve", "node", "--help")):
        shown = offline(*arguments)
        assert shown.code == 5
        assert "pip install" in shown.err


def test_a_secret_file_is_for_its_owner_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with secret_file(path) as write:
        assert path.stat().st_mode & 0o777 == 0o600
        write(SECRET)
    assert path.read_text() == SECRET + "\n"
    assert path.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(AlreadyExistsError), secret_file(taken):
            pytest.fail("the block ran")
    with pytest.raises(InvalidArgumentError), secret_file(tmp_path / "absent" / "key"):
        pytest.fail("the block ran")
    assert path.read_text() == SECRET + "\n"


def test_a_secret_file_is_gone_when_there_was_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), secret_file(tmp_path / "key"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_fault_of_ours_is_one_line_and_a_traceback_only_when_asked(
    offline: Saltern, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: object) -> None:
        raise RuntimeError("boom\nboom")

    monkeypatch.setattr("saltern.cli.tenant.connect", explode)
    shown = offline("tenant", "list")
    assert shown.code == 1
    assert shown.err.splitlines()[0] == "error: RuntimeError: boom boom"
    assert "Traceback" not in shown.err
    assert "Traceback" in offline("--debug", "tenant", "list").err


def test_ctrl_c_is_130(offline: Saltern, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("saltern.cli.tenant.connect", interrupt)
    assert offline("tenant", "list").code == 130


def test_doctor_reports_what_it_can_without_a_stack(offline: Saltern) -> None:
    shown = offline("doctor", "--output", "json")
    checks = {item["check"]: item for item in shown.json["checks"]}
    assert shown.code == 7
    assert checks["dependencies"]["state"] == "OK"
    assert checks["configuration"]["state"] == "FAIL"
    assert "saltern up" in checks["configuration"]["hint"]
    assert all(item["hint"] for item in checks.values() if item["state"] != "OK")


def test_completion_completes_commands_and_options() -> None:
    words = {"_SALTERN_COMPLETE": "bash_complete", "COMP_WORDS": "saltern quota set --dram", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "saltern"], env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["plain,--dram-limit", "plain,--dram-reserved"]
