"""Completion: scripts for three shells, and names that the real stack knows."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from saltern.cli import completion
from saltern.demo.stack import Stack

Saltern = Callable[..., Any]
_numbers = count(1)


def complete(line: str, environment: dict[str, str]) -> tuple[list[str], str]:
    """What a shell is offered for ``line``, whose last word is incomplete; and what goes to stderr."""
    typed = line.split(" ")
    asked = {"_SALTERN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(typed) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "saltern"], env={**environment, **asked}, capture_output=True, text=True, check=False
    )
    return [one.partition(",")[2] for one in done.stdout.splitlines() if one], done.stderr


@pytest.fixture
def there(saltern: Saltern, stack: Stack) -> Iterator[tuple[str, dict[str, str]]]:
    """A tenant with a namespace, a key and a group, and the environment of a shell that reaches it."""
    name = f"completed-{next(_numbers)}"
    assert saltern("tenant", "create", name).code == 0
    made = ("--model-fingerprint", "m@1", "--block-tokens", "16", "--block-bytes", "64KiB")
    assert saltern("namespace", "create", name, "chat", *made).code == 0
    assert saltern("key", "create", "writer-1", "--tenant", name, "--role", "writer").code == 0
    assert saltern("share", "create", f"{name}/research", "--namespace", "chat").code == 0
    yield (
        name,
        {
            "SALTERN_CONTROL": stack.control,
            "SALTERN_API_KEY_FILE": str(stack.admin_api_key_file),
            "SALTERN_DEADLINE_MS": "60000",  # whatever else this machine does meanwhile
        },
    )
    saltern("tenant", "delete", name, "--yes")


def test_names_are_completed_by_asking_the_service(there: tuple[str, dict[str, str]]) -> None:
    tenant, environment = there
    for line, offered in (
        ("saltern tenant get completed-", tenant),
        (f"saltern namespace get {tenant} ch", "chat"),
        (f"saltern key delete --tenant {tenant} wr", "writer-1"),
        ("saltern key list --tenant completed", tenant),
        ("saltern share get completed-", f"{tenant}/"),
        (f"saltern share get {tenant}/", f"{tenant}/research"),
        (f"saltern share invite {tenant}/research {tenant}/c", f"{tenant}/chat"),
        ("saltern node drain ", "node-1"),
    ):
        names, errors = complete(line, environment)
        assert names == [offered], line
        assert errors == "", line
    assert complete("saltern tenant get zz", environment) == ([], "")


def test_completion_is_silent_where_nothing_answers(tmp_path: Path) -> None:
    here = {"SALTERN_DATA_DIR": str(tmp_path)}
    assert complete("saltern tenant get a", here) == ([], "")
    assert complete("saltern --no-such-option tenant get a", here)[1] == ""
    assert complete("saltern apply -f x --show", here) == (["--show-secrets"], "")
    (tmp_path / "key").write_text("sk-saltern-0123456789abcdef-" + "A" * 43)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        frozen = {
            "SALTERN_CONTROL": f"127.0.0.1:{silent.getsockname()[1]}",
            "SALTERN_API_KEY_FILE": str(tmp_path / "key"),
            "SALTERN_DEADLINE_MS": "200",
        }
        assert complete("saltern tenant get a", frozen) == ([], "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_are_printed_and_the_shell_takes_them(saltern: Saltern, shell: str) -> None:
    shown = saltern("completion", shell)
    assert shown.code == 0
    assert "_SALTERN_COMPLETE" in shown.out
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=shown.out, text=True, check=True)


def test_bash_completes_a_line_with_the_script(saltern: Saltern, there: tuple[str, dict[str, str]]) -> None:
    """The script itself, in a real bash: its function is called as readline would."""
    tenant, environment = there
    script = saltern("completion", "bash").out
    program = (
        f'saltern() {{ "{sys.executable}" -m saltern "$@"; }}\n'
        f"{script.replace(' $1)', ' ' + sys.executable + ' -m saltern)')}\n"
        f"COMP_WORDS=(saltern namespace get {tenant} ''); COMP_CWORD=4\n"
        '_saltern_completion saltern; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["chat"]
