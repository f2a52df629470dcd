"""A runner of the tests' own: each run is a directory and a process, the nodes are directories too.

It has nothing of Ansible, and no machine in its handles; its system can be cut off.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.ports import Failed, Host, Ok, RunEvent, RunnerStatus, RunRequest, RunState, Unknown

POLL_S = 0.02
"""Interval of looking at a run that is followed."""

PROGRAM = r"""
import fcntl, json, os, signal, subprocess, sys, time
run, node = sys.argv[1:]
request = json.load(open(run + "/request"))
try:
    os.close(os.open(run + "/claim", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    sys.exit()

def tell(kind, text):
    with open(run + "/events", "a") as file:
        file.write(json.dumps([time.time(), kind, text]) + "\n")

def end(kind, text):
    with open(run + "/status.new", "w") as file:
        json.dump([kind, text], file)
    try:
        os.link(run + "/status.new", run + "/status")
    except FileExistsError:
        pass
    sys.exit()

os.makedirs(node, exist_ok=True)
with open(node + "/fence", "a+") as fence:
    fcntl.flock(fence, fcntl.LOCK_EX)
    fence.seek(0)
    newest = json.loads(fence.read() or '[[0], ""]')
    if request["token"]:
        mine = [[int(part) for part in request["token"].split(" ")[0].split(".")], request["run"]]
        if mine[0] < newest[0] or mine[0] == newest[0] and mine[1] != newest[1]:
            end("failed", "a newer run has been on the node")
        fence.truncate(0)
        fence.write(json.dumps(mine))
    if "fail" not in request["playbook"] and "never" not in request["playbook"]:
        with open(node + "/begun", "a") as journal:
            journal.write(request["run"] + "\n")
tell("task", request["playbook"])
if "fail" in request["playbook"]:
    end("failed", "task failed")
if "never" in request["playbook"]:
    work = subprocess.Popen(["sleep", "8642"], start_new_session=True)
    with open(node + "/work", "w") as file:
        file.write(str(work.pid))
    try:
        work.wait(request["timeout_s"])
    except subprocess.TimeoutExpired:
        end("failed", "time limit passed")
end("ok", "done")
"""


class DirectoryRunner:
    """ports.Runner over `directory`."""

    def __init__(self, directory: Path) -> None:
        self._runs, self._nodes = directory / "runs", directory / "nodes"
        self._runs.mkdir(parents=True, exist_ok=True)
        self._down = directory / "down"
        self.place = str(directory)
        self.status = RunnerStatus(parallel=100)

    async def check_available(self) -> None:
        if self._down.exists():
            raise RunnerUnavailable(f"{self.place}: down")

    def set_reachable(self, reachable: bool) -> None:
        """Cut the directory off from all of its runners, or connect it."""
        if reachable:
            self._down.unlink()
        else:
            self._down.touch()

    def begun(self, node: str) -> list[str]:
        """Return the runs that succeed and have begun on a node, in order."""
        journal = self._nodes / node / "begun"
        return journal.read_text().split() if journal.exists() else []

    async def start(self, request: RunRequest) -> str:
        await self.check_available()
        run = self._runs / request.run_id
        with suppress(FileExistsError):
            run.mkdir()
            content = {"run": request.run_id, "playbook": request.playbook, "token": request.fencing_token}
            (run / "node").write_text(request.node)
            (run / "request").write_text(json.dumps({**content, "timeout_s": request.timeout_s}))
            argv = [sys.executable, "-IS", "-c", PROGRAM, str(run), str(self._nodes / request.node)]
            pid = os.posix_spawn(argv[0], argv, os.environ, setsid=True)
            (run / "pid").write_text(str(pid))
        return request.run_id

    async def get_state(self, handle: str) -> RunState:
        await self.check_available()
        run = self._runs / handle
        if not run.is_dir():
            raise NotFound(f"there is no run {handle}")
        is_alive = _is_alive(run / "pid")  # before the status, which the process writes before it ends
        status = _read(run / "status")
        if status is None:
            return RunState(None if is_alive else Unknown("the run was lost"))
        kind, text = status
        if kind == "ok":
            return RunState(Ok(text), 100.0)
        return RunState(
            Failed(text, code=FailureCode.INTERFERENCE if kind == "cancelled" else FailureCode.FAILED)
        )

    async def wait_for_change(self, handle: str) -> RunState:
        await asyncio.sleep(POLL_S)
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        await self.get_state(handle)
        events = self._runs / handle / "events"
        lines = events.read_text().splitlines() if events.exists() else []
        for number, line in enumerate(lines[offset:], offset + 1):
            at, kind, text = json.loads(line)
            yield RunEvent(number, at, kind, text)

    async def cancel(self, handle: str) -> None:
        if (await self.get_state(handle)).result is not None:
            return
        run = self._runs / handle
        _kill(run / "pid")
        (run / "status").write_text(json.dumps(["cancelled", "cancelled"]))
        _kill(self._nodes / (run / "node").read_text() / "work")

    async def discard(self, handle: str) -> None:
        run = self._runs / handle
        for path in run.glob("*"):
            path.unlink()
        if run.is_dir():
            run.rmdir()

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        _kill(self._nodes / host.name / "work")
        return Ok()

    def has_work(self, node: str) -> bool:
        """Return whether the process of a run that never ends is there."""
        return _is_alive(self._nodes / node / "work")

    def lose(self, handle: str) -> None:
        """End a run's process without a word; its work continues."""
        _kill(self._runs / handle / "pid")

    def end_all(self) -> None:
        """End what a failed test left."""
        for path in (*self._runs.glob("*/pid"), *self._nodes.glob("*/work")):
            _kill(path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _pid(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


def _is_alive(path: Path) -> bool:
    """Return whether a process runs, and not only waits for its parent to notice its end."""
    pid = _pid(path)
    with suppress(ChildProcessError):
        if pid and os.waitpid(pid, os.WNOHANG)[0]:
            return False
    try:
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _kill(path: Path) -> None:
    pid = _pid(path)
    if not pid:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    while _is_alive(path):  # a grandchild: its parent, or init, reaps it
        os.sched_yield()
