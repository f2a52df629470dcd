"""The error about a held lock names the holder, its state and what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutd.errors import AlreadyRunning
from rolloutd.store.sqlite.lock import FILE_NAME, StateLock

HOLD_LOCK = """
import sys, pathlib
from rolloutd.store.sqlite.lock import StateLock
held = StateLock(pathlib.Path(sys.argv[1]), now=lambda: 0.0)
held.take()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder_of(state_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock in another process."""
    command = [sys.executable, "-c", HOLD_LOCK, str(state_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def refusal(state_dir: Path) -> str:
    with pytest.raises(AlreadyRunning) as refused:
        StateLock(state_dir).take()
    return str(refused.value)


def test_running_holder_named_with_remedy(tmp_path: Path) -> None:
    with holder_of(tmp_path) as process:
        assert refusal(tmp_path) == (
            f"{tmp_path}: daemon pid {process.pid}, started 1970-01-01T00:00:00Z, holds it and runs;"
            " stop that daemon first"
        )


def test_suspended_holder_named_with_remedy(tmp_path: Path) -> None:
    with holder_of(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        text = refusal(tmp_path)
        assert "is suspended" in text
        assert f"kill -CONT {process.pid}" in text


def test_holder_without_content_explained(tmp_path: Path) -> None:
    with holder_of(tmp_path):
        (tmp_path / FILE_NAME).write_text("")
        assert "another daemon holds it" in refusal(tmp_path)
