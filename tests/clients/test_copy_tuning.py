from __future__ import annotations

import os
import subprocess
import sys

import pytest

from saltern.copy_tuning import can_tune, tuned_environment

NAME = "glibc.cpu.x86_non_temporal_threshold"
PROGRAM = """
import os, signal, sys
from saltern.copy_tuning import restart_tuned
first = "STARTED" not in os.environ
os.environ["STARTED"] = "yes"
if first:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    print(os.getpid(), flush=True)
restart_tuned(sys.argv[1:])
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], signal.getsignal(signal.SIGUSR1).name)
"""


def run(*arguments: str, environment: dict[str, str] | None = None) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-P", "-c", PROGRAM, *arguments]
    done = subprocess.run(
        command, env={**clean, **(environment or {})}, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_threshold_joins_what_is_set() -> None:
    assert tuned_environment({})["GLIBC_TUNABLES"] == f"{NAME}=0x20000"
    joined = tuned_environment({"GLIBC_TUNABLES": "glibc.malloc.check=1", "HOME": "/"})
    assert joined == {"GLIBC_TUNABLES": f"glibc.malloc.check=1:{NAME}=0x20000", "HOME": "/"}


def test_a_threshold_of_the_operator_stays() -> None:
    own = {"GLIBC_TUNABLES": f"{NAME}=0x100000"}
    assert tuned_environment(own) == own


def test_other_machines_and_libraries_are_left_alone() -> None:
    assert can_tune("x86_64", "glibc")
    assert not can_tune("aarch64", "glibc")
    assert not can_tune("x86_64", "musl")


def test_a_process_starts_itself_again_once_and_stays_itself() -> None:
    first, second = run("serve", "node")
    pid, tunables, *rest = second.split(" ", 2)
    assert pid == first
    assert tunables == f"{NAME}=0x20000"
    assert rest == ["['serve', 'node'] SIG_IGN"]


def test_a_process_that_has_the_threshold_is_not_started_again() -> None:
    first, second = run("serve", "node", environment={"GLIBC_TUNABLES": f"{NAME}=0x40000"})
    assert second.startswith(f"{first} {NAME}=0x40000 ")


@pytest.mark.parametrize("words", [["serve", "node"], ["node"]])
def test_a_program_with_another_command_line_is_never_replaced(words: list[str]) -> None:
    code = f"from saltern.copy_tuning import restart_tuned; restart_tuned({words!r} + ['--now']); print('same')"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout == "same\n"
