"""The supervisor of one run, called in this process: time limits, output and removal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import wrapper

YEAR_S = 366 * 86_400.0


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wrapper's working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def supervised(program: str) -> tuple[str, int]:
    """Supervise a program until it ends."""
    output_read, output_write = os.pipe()
    wake_read, wake_write = os.pipe()
    redirect = [(os.POSIX_SPAWN_DUP2, output_write, 1)]
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", program], dict(os.environ), file_actions=redirect)
    os.close(output_write)
    try:
        return wrapper.supervise(pid, output_read, wake_read, time.monotonic() + YEAR_S)
    finally:
        for fd in (output_read, wake_read, wake_write):
            os.close(fd)


def test_limit_of_a_year_is_supervised(run_directory: Path) -> None:
    assert supervised("echo done; exit 3") == ("exit", 3)
    assert (run_directory / "output").read_text() == "done\n"


def test_output_without_a_file_does_not_end_supervision(run_directory: Path) -> None:
    """As on a disk without a free inode: the output is lost, and the status is not."""
    (run_directory / "output").mkdir()
    assert supervised("echo lost; exit 3") == ("exit", 3)


def test_endless_output_does_not_hold_the_supervisor(run_directory: Path) -> None:
    endless = os.open("/dev/zero", os.O_RDONLY)
    assert wrapper.OutputLog().copy_from(endless)
    os.close(endless)


def test_directory_of_another_user_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rolloutd-x" / "tmp").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    wrapper.remove_tree(str(tmp_path / "rolloutd-x"))
    assert (tmp_path / "rolloutd-x" / "tmp").is_dir()
    monkeypatch.undo()
    wrapper.remove_tree(str(tmp_path / "rolloutd-x"))
    assert not (tmp_path / "rolloutd-x").exists()
