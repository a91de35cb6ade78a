"""Copies that go around the caches: a node moves far more bytes than any cache holds, and reads none of them again.

A store that is not told otherwise first reads the line that it overwrites. glibc's memcpy avoids that with non-temporal
stores, but only for copies above a threshold made for programs that use what they copied (three quarters of a thread's
share of the last cache, on a large server many MiB). The threshold is a tunable that glibc reads once, when a process
starts (glibc manual, "Tunables"), so a node that was started without it starts itself again, once.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Final

_TUNABLES: Final = "GLIBC_TUNABLES"
_THRESHOLD: Final = "glibc.cpu.x86_non_temporal_threshold"
#: Copies of smaller entries, and of wire headers, stay in the caches. glibc 2.36 accepts no less than 16 KiB.
THRESHOLD_BYTES: Final = 128 * 1024
_MACHINES: Final = frozenset({"x86_64", "AMD64"})


def tuned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with the threshold merged into its GLIBC_TUNABLES; one that is set already stays as it is."""
    tunables = [tunable for tunable in environment.get(_TUNABLES, "").split(":") if tunable]
    if not any(tunable.partition("=")[0] == _THRESHOLD for tunable in tunables):
        tunables.append(f"{_THRESHOLD}={THRESHOLD_BYTES:#x}")
    return {**environment, _TUNABLES: ":".join(tunables)}


def tuned() -> dict[str, str]:
    """What to add to the environment of a child so that it copies past the caches; nothing where that is not known."""
    if not can_tune(platform.machine(), platform.libc_ver()[0]):
        return {}
    return {_TUNABLES: tuned_environment(os.environ)[_TUNABLES]}


def can_tune(machine: str, libc: str) -> bool:
    """Whether the tunable exists here; for ``platform.machine()`` and ``platform.libc_ver()[0]``."""
    return machine in _MACHINES and libc == "glibc"


def restart_tuned(command: Sequence[str]) -> None:
    """Replace this process by itself with the tunable set, unless it is set, cannot be, or this is another program.

    The process keeps its id, its parent, ignored signals and inherited descriptors (execve(2)).

    Args:
        command: words that this process's command line must hold, one behind the other; where it does not, a test or
            another program is calling, which must not be replaced.
    """
    wanted = tuned()
    if wanted.items() <= os.environ.items() or not _holds(sys.orig_argv, command):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})  # noqa: S606 - our own


def _holds(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether ``wanted`` stands in ``words``, one behind the other."""
    width = len(wanted)
    return any(tuple(words[start : start + width]) == tuple(wanted) for start in range(len(words) - width + 1))
