"""`rolloutctl demo` as its users meet it: it ends well, shows faults, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked_process import CLI, run_forked
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "rolloutd.cli", "demo")

LIMIT_S = 300.0
"""A demo takes half a minute; on a loaded machine some times that."""


@pytest.fixture
def away(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary directory and home are the test's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "t").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return {
        **kept,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "t"),
    }


def run(away: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, env=away, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def mentioning(directory: Path) -> list[str]:
    """Return the processes that have the directory in their command line or environment, ours apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            seen = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{directory}/".encode() in seen:
            found.append(f"{entry.name} {name}")
    return found


@pytest.mark.long
def test_fault_in_each_phase_is_shown_and_settled(away: dict[str, str]) -> None:
    faults = {"n3": "isolating", "n4": "maintaining", "n5": "verifying"}
    words = [word for node, phase in faults.items() for word in ("--fault", f"{node}:{phase}")]
    ended = run(away, "--headless", "--json", "--nodes", "5", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *lines, status = ended.stdout.splitlines()
    assert json.loads(status)["state"] == "done"
    for node, phase in faults.items():
        assert any(" paused " in line and node in line and "node-failed" in line for line in lines), node
        assert any(f"{node}: {phase} → failed" in line for line in lines), node
    assert sum("retry" in line for line in lines) >= len(faults)


@pytest.mark.long
def test_nothing_is_written_outside_its_directory(away: dict[str, str], tmp_path: Path) -> None:
    name = "k" * 100  # a socket's path has less room
    kept = tmp_path / name
    ended = run(away, "--headless", "--nodes", "2", "--dir", str(kept))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"home", "t", name}
    assert list((tmp_path / "home").iterdir()) == []
    assert list((tmp_path / "t").iterdir()) == []
    assert (kept / "state").is_dir()
    (socket,) = re.findall(r"export ROLLOUTD_SOCKET=(\S+)", ended.stderr)
    assert Path(socket).parent == kept or not Path(socket).parent.exists()
    wait_until(lambda: not mentioning(kept), f"no process has {kept}")
    again = run(away, "--headless", "--dir", str(kept))
    assert (again.returncode, "not empty" in again.stderr) == (2, True)


@pytest.fixture
def started(away: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A demo in the middle of a run; Ctrl-C is for it also where whoever runs the tests ignores it."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND, "--headless", "--nodes", "1"],
        cwd=ROOT,
        env=away,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "isolating → maintaining" in line:
            break
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        (signal.SIGKILL, -9),
    ],
)
def test_interrupted_it_leaves_nothing_behind(
    started: subprocess.Popen[str], away: dict[str, str], number: int, code: int
) -> None:
    assert started.poll() is None
    started.send_signal(number)
    started.communicate(timeout=LIMIT_S)
    assert started.returncode == code
    temporary = Path(away["TMPDIR"])
    wait_until(lambda: not mentioning(temporary), f"no process has {temporary}")
    wait_until(lambda: not list(temporary.iterdir()), f"{temporary} is empty")


def test_a_person_is_asked_at_each_gate(away: dict[str, str]) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--plain", "--nodes", "1"],
        cwd=ROOT,
        env={**away, "TERM": "xterm"},
        stdin=secondary,
        stdout=secondary,
    )
    os.close(secondary)
    said = b""
    try:
        while b"Vote yes? [Y/n] " not in said:
            said += _read(primary)
            assert process.poll() is None
        os.write(primary, b"n\n")
        while chunk := _read(primary):
            said += chunk
        assert process.wait(LIMIT_S) == 1
    finally:
        process.kill()
        process.wait()
        os.close(primary)
    assert b"cancelled" in said


@pytest.mark.long
def test_quitting_the_console_is_no_failure(away: dict[str, str]) -> None:
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 80))
    environment = {**away, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*COMMAND, "--nodes", "1"], cwd=ROOT, env=environment, stdin=secondary, stdout=secondary
    )
    os.close(secondary)
    until = time.monotonic() + LIMIT_S
    try:
        # A key that comes before the console does may be lost, so it is pressed until the demo has ended.
        while process.poll() is None and time.monotonic() < until:
            os.write(primary, b"q")
            if select.select([primary], [], [], 1.0)[0]:
                _read(primary)
        assert process.wait(0) == 0
    finally:
        process.kill()
        process.wait()
        os.close(primary)


@pytest.mark.parametrize("words", [["--fault", "n3"], ["--fault", "n99:verifying"], ["--nodes", "0"]])
def test_wrong_usage(away: dict[str, str], words: list[str]) -> None:
    ended = run_forked(CLI, ["demo", "--headless", *words], timeout_s=LIMIT_S, environment=away)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def _read(descriptor: int) -> bytes:
    assert select.select([descriptor], [], [], LIMIT_S)[0], "the terminal stays silent"
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the last process of the terminal has ended
        return b""
