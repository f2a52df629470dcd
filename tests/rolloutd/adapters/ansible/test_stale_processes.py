"""What a run leaves on a node: all of it is found and ended, but for daemons that are to stay."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import stale_processes, wrapper
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.ports import Ok, ShellResult, Unknown
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.runner_backends import AnsibleBackend, tree_of
from tests.rolloutd.adapters.ansible.test_runner import ended
from tests.support.sshd import MARK
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[AnsibleBackend]:
    """A real node with real Ansible."""
    made = AnsibleBackend(tmp_path)
    yield made
    await made.close()


ESCAPES = {
    "nohup": "nohup sleep 8651 >/dev/null 2>&1 & wait",
    "ignored signals": "trap '' TERM INT HUP; sleep 8652",
    "new session": "setsid sh -c 'trap \"\" TERM INT HUP; (sleep 8653; :) & wait' & wait",
    "double fork": "(setsid sh -c 'sleep 8654 & ' >/dev/null 2>&1 &); sleep 8643",
    "no environment": f"env -i {MARK}={{directory}} nohup setsid sleep 8655 >/dev/null 2>&1 & wait",
}
"""Ways in which a process on the node leaves its parent, its session or the reach of signals.

The last one keeps the test server's own mark, by which the test finds it.
"""


async def test_escaped_processes_of_a_killed_run_are_ended(real: AnsibleBackend) -> None:
    """All ways in one run, each in a shell of its own."""
    escapes = dict(ESCAPES)
    if not cgroup_is_writable():
        del escapes["no environment"]  # it needs a control group of cgroup v2
    scripts = []
    for number, escape in enumerate(escapes.values()):
        script = real.directory / f"escape{number}.sh"
        script.write_text(escape.replace("{directory}", str(real.node.directory)) + "\n")
        scripts.append(f"sh {script} &")
    task = {"ansible.builtin.shell": " ".join([*scripts, "wait"])}
    (real.tree / "escape.yml").write_text(
        json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}])
    )

    def left() -> set[str]:
        seconds = {name: re.search(r"sleep (\d+)", escape) for name, escape in escapes.items()}
        return {
            name for name, found in seconds.items() if found and real.commands(f"sleep\0{found[1]}".encode())
        }

    runner = real.runner()
    handle = await runner.start(real.request("escape.yml"))
    await wait_in_loop_until(lambda: left() == escapes.keys())
    real.kill(handle)
    assert isinstance((await ended(runner, handle))[0].result, Unknown)
    for pid in real.shells_of_runs():
        os.kill(pid, signal.SIGHUP)
    cleared = await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    assert isinstance(cleared, Ok), cleared
    assert left() == set()
    token = stale_processes.RunMarkers(str(real.runs_dir)).node_token("n0")
    assert not [*Path("/sys/fs/cgroup").glob(f"rolloutd-run-{token}-*")]
    assert not [*Path("/sys/fs/cgroup/unified").glob(f"rolloutd-run-{token}-*")]


async def test_cancel_ends_processes_that_ignore_signals(real: AnsibleBackend) -> None:
    task = {"ansible.builtin.shell": "trap '' TERM INT HUP; nohup sleep 8642"}
    (real.tree / "deaf.yml").write_text(
        json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}])
    )
    runner = real.runner()
    handle = await runner.start(real.request("deaf.yml"))
    await wait_in_loop_until(real.has_work)
    await runner.cancel(handle)
    assert not real.has_work()


async def test_daemon_with_a_pid_file_stays(real: AnsibleBackend) -> None:
    """A background job without a pid file is ended."""
    pid_file = real.directory / "app.pid"
    daemon = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'w').write(f'{os.getpid()}\\n')\n"
        "os.closerange(0, 3)\n"
        "time.sleep(8641)\n"
    )
    (real.directory / "daemon.py").write_text(daemon)
    start = f"{sys.executable} {real.directory}/daemon.py {pid_file}"
    tasks = [
        {"ansible.builtin.command": start, "async": 300, "poll": 0},
        {"ansible.builtin.command": "sleep 8642", "async": 300, "poll": 0},
        {"ansible.builtin.command": "sleep 8640"},
    ]
    (real.tree / "daemon.yml").write_text(
        json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}])
    )
    runner = real.runner()
    handle = await runner.start(real.request("daemon.yml"))
    await wait_in_loop_until(
        lambda: pid_file.exists() and bool(real.commands(b"sleep\x008640")) and real.has_work()
    )
    real.kill(handle)
    assert isinstance((await ended(runner, handle))[0].result, Unknown)
    cleared = await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    assert isinstance(cleared, Ok), cleared
    assert not real.has_work()
    assert wrapper.is_alive(int(pid_file.read_text()))


def test_pid_file_of_earlier_process_spares_nothing(tmp_path: Path) -> None:
    """Pids come again: a file that was written before the process began names another one."""
    mark = {"ROLLOUTD_RUN_MARK": "rolloutd-run-0123456789abcdef-r1+"}
    processes = [
        subprocess.Popen(["sleep", "8642"], env=mark, cwd=tmp_path, start_new_session=True) for _ in range(2)
    ]
    try:
        for process, age_s in zip(processes, (0.0, 60.0), strict=True):
            pid_file = tmp_path / f"{process.pid}.pid"
            pid_file.write_text(f"{process.pid}\n")
            os.utime(pid_file, (time.time() - age_s,) * 2)
        script = subprocess.run(
            ["/bin/sh", "-s", "--", "0123456789abcdef", "0", "1", "600", "/nonexistent"],
            input=stale_processes.SCRIPT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert script.stdout.split() == ["clear", str(processes[1].pid)]
        assert [process.poll() for process in processes] == [None, -signal.SIGTERM]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("marked", [True, False], ids=["of a run", "unseen"])
def test_more_processes_take_no_more_commands(tmp_path: Path, marked: bool) -> None:
    """A node may have thousands of processes: the shell does nothing for each of them."""
    few, many = (commands_of_search(tmp_path / str(count), count, marked) for count in (20, 400))
    # The commands of a pipe may write their lines into each other.
    assert abs(many - few) < 20


def commands_of_search(directory: Path, processes: int, marked: bool) -> int:
    """Return how many commands the shell executes on a node with so many processes.

    One of them is a run's; without it the search asks, as a login other than root, what it may not inspect.
    """
    first = 5_000_000  # above all pids of Linux, so signals reach no process
    pids = range(first, first + processes)
    for pid in pids:
        process = directory / "proc" / str(pid)
        process.mkdir(parents=True)
        numbers = f"{pid - 1} {pid} {first} {'0 ' * 15}100"
        (process / "stat").write_text(f"{pid} (a) b\n) S {numbers}\n")
        (process / "environ").write_bytes(b"HOME=/\0")
        (process / "cmdline").write_bytes(b"sleep\x001\0")
    (directory / "proc" / "1").mkdir()
    (directory / "proc" / "uptime").write_text("100.00 100.00\n")
    if marked:
        mark = b"ROLLOUTD_RUN_MARK=rolloutd-run-0123456789abcdef-r1+\0"
        (directory / f"proc/{pids[-1]}/environ").write_bytes(mark)
    programs = directory / "bin"
    programs.mkdir()
    for name, text in {"sleep": "", "sudo": "exit 1", "id": f"echo {0 if marked else 1000}"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    script = subprocess.run(
        ["/bin/sh", "-xs", "--", "0123456789abcdef", "0", "1", "600", "/nonexistent"],
        input=stale_processes.SCRIPT.replace("/proc", str(directory / "proc")),
        capture_output=True,
        text=True,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        check=False,
    )
    assert script.stdout.splitlines()[0].split() == (["left", str(pids[-1])] if marked else ["clear"])
    return sum(line.startswith("+") for line in script.stderr.splitlines())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_process_that_cannot_be_inspected_is_unseen() -> None:
    """An orphan of another user can be the run's: the login that may not read its environment cannot say."""
    orphan = subprocess.run(
        ["setsid", "sh", "-c", "sleep 8642 >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(orphan.stdout)
    try:
        script = subprocess.run(
            ["/bin/sh", "-s", "--", "0123456789abcdef", "1", "1", "600", "/nonexistent"],
            input=stale_processes.SCRIPT,
            capture_output=True,
            text=True,
            user=65534,
            check=False,
        )
        assert (script.returncode, script.stdout.split()[0]) == (2, "unseen"), script
        assert str(pid) in script.stdout.split()
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_unseen_process_makes_cleanup_unknown(real: AnsibleBackend) -> None:
    """A node that reports `unseen` has not been cleared."""
    real.node.stop()
    shell = FakeShell()
    runner = AnsibleRunner(real.runs_dir, shell, tree_of, real.inventory)
    await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    ((_, command, _),) = shell.calls
    shell.answers[command] = ShellResult(2, "unseen 17\n", "")
    cleared = await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    assert isinstance(cleared, Unknown)
    assert "17" in cleared.text


def cgroup_is_writable() -> bool:
    """Return whether a run of this user gets a control group of its own."""
    paths = [Path("/sys/fs/cgroup/cgroup.procs"), Path("/sys/fs/cgroup/unified/cgroup.procs")]
    return any(os.access(path, os.W_OK) for path in paths)
