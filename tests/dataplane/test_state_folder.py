"""A state folder is one process's at a time and keeps its name; the lock ends with the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.state_folder import LOCK_FILE, hold_state_folder
from saltern.errors import FailedPreconditionError

HOLD = "import sys; from pathlib import Path; from dataplane.state_folder import hold_state_folder; "


def held_by_another(folder: Path, then: str) -> subprocess.Popen[str]:
    """Another process that holds ``folder``, prints its name and goes on with ``then``."""
    code = HOLD + f"print(hold_state_folder(Path(sys.argv[1])), flush=True); {then}"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_folder_is_held_by_one_process_and_keeps_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with held_by_another(folder, "sys.stdin.read()") as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        with pytest.raises(FailedPreconditionError) as caught:
            hold_state_folder(folder)
        assert caught.value.reason == "STATE_DIR_IN_USE"
        other.kill()  # kill -9 frees the lock too
    assert len(name) == 32
    assert (folder / LOCK_FILE).stat().st_mode & 0o777 == 0o600
    with held_by_another(folder, "pass") as successor:
        assert successor.communicate()[0].strip() == name


def test_a_torn_name_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("0123")
    assert len(hold_state_folder(tmp_path)) == 32


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPreconditionError) as caught:
        hold_state_folder(tmp_path / "file" / "state")
    assert caught.value.reason == "STATE_DIR_UNUSABLE"
