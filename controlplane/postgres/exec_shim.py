"""Become the server's account, arrange to end with the launcher, then become the given program.

A script, run as ``python -I -S exec_shim.py PARENT_PID UID GID PROGRAM [ARGUMENT...]``; see ``process.shim_command``.

Why a script between the launcher and PostgreSQL:

* ``preexec_fn`` runs Python between fork and exec, which may deadlock in a program with threads.
* The kernel clears the parent-death signal whenever a process changes its user, so it has to be set after that change
  and before exec. ``subprocess(user=...)`` leaves no room there, and ``setpriv`` is not installed everywhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent_pid, uid, gid = (int(argument) for argument in sys.argv[1:4])
    program = sys.argv[4:]
    libc = ctypes.CDLL(
        None, use_errno=True
    )  # loaded before the change of user: the libraries may be out of reach after
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    # SIGINT is PostgreSQL's "fast shutdown": sessions end, a checkpoint is written, files are consistent. A shell that
    # started us in the background may have had it ignored, and that would outlive exec.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the line above: no signal will ever come
        sys.exit("the launcher ended before the server was started")
    try:
        os.execv(program[0], program)  # noqa: S606 - the absolute path comes from the launcher
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
