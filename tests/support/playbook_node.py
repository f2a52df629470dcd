"""This machine as a node of the reference playbooks; commands stand for its kernel and its services."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.engine.check_mode import PROBLEMS
from rolloutd.ports import Failed, Host, InventorySnapshot, Ok, RunEvent, RunRequest, StepResult
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.fakes.sources import SOURCE
from tests.support.node_python import node_python

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"


def playbook_files() -> dict[str, str]:
    """Return the reference playbooks with their tasks and filters, by path."""
    files = [*PLAYBOOKS.rglob("*.yml"), *PLAYBOOKS.rglob("*.py")]
    return {str(path.relative_to(PLAYBOOKS)): path.read_text() for path in files}


KILLER = """
import os
import signal
from pathlib import Path

from ansible.plugins.callback import CallbackBase

KILLED_AFTER = Path(__file__).parents[1] / "killed_after"
ACTS = {"copy", "file", "command", "apt", "dnf", "package"}


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "killer"

    def v2_runner_on_ok(self, result):
        if result.task.loop is None:
            self.kill(result.task, "")

    def v2_runner_item_on_ok(self, result):
        self.kill(result.task, str(result.result.get("item")))

    def kill(self, task, item):
        acts = task.action.rpartition(".")[2] in ACTS and "check_mode" not in task.get_ds()
        acts = acts and task.args.get("state") != "directory"
        name = f"{task.get_name()} {item}"
        if acts and KILLED_AFTER.exists() and name not in KILLED_AFTER.read_text().splitlines():
            number = len(KILLED_AFTER.read_text().splitlines())
            with KILLED_AFTER.open("a") as file:
                file.write(f"{name}\\n")
            if number % STRIDE == 0:
                os.kill(os.getpid(), signal.SIGKILL)
""".replace("STRIDE", os.environ.get("ROLLOUTD_TEST_KILL_STRIDE", "1"))
"""Kills the run once after each task, or item of a loop, that acts; by a stride of 3 after each third."""

SYSCTL = """#!/bin/sh
# A kernel that is a directory.
cd {kernel} || exit 1
case $1 in
-n) cat "$2" ;;
-w) echo "${{2#*=}}" > "${{2%%=*}}" ;;
*) exit 1 ;;
esac
"""

SYSTEMCTL = """#!/bin/sh
# A service manager with one file per active service and one log of restarts.
cd {services} || exit 1
case $1 in
is-active) for last; do :; done; [ -e "$last" ] && echo active || {{ echo inactive; exit 3; }} ;;
restart | start | reload) touch "$2"; echo "$1 $2" >> log ;;
stop) rm -f "$2"; echo "$1 $2" >> log ;;
*) exit 1 ;;
esac
"""


class Node:
    """This machine as a node, and the commands that stand for its kernel and its service manager."""

    def __init__(self, directory: Path, tree_cache: TreeCache) -> None:
        self.directory = directory
        self.tree = directory / "tree"
        shutil.copytree(PLAYBOOKS, self.tree, ignore=shutil.ignore_patterns("__pycache__"))
        (self.tree / "callback_plugins").mkdir()
        (self.tree / "callback_plugins" / "killer.py").write_text(KILLER)
        (self.tree / "ansible.cfg").write_text("[defaults]\ncallback_plugins = callback_plugins\n")
        connection = {
            "ansible_connection": "local",
            "ansible_python_interpreter": node_python(),
            "ansible_become": False,
        }
        self.runner = AnsibleRunner(
            directory / "runs",
            FakeShell(),
            lambda source: self.tree,
            lambda: InventorySnapshot({"n0": connection}, generation=1),
            tree_cache=tree_cache,
            pipelining=True,
        )
        self._runs = 0
        self.kernel, self.services = directory / "kernel", directory / "services"
        for folder, name, text in (
            (self.kernel, "sysctl", SYSCTL),
            (self.services, "systemctl", SYSTEMCTL),
        ):
            folder.mkdir()
            command = directory / name
            command.write_text(text.format(kernel=self.kernel, services=self.services))
            command.chmod(0o755)

    async def play(self, playbook: str, *, rollout: str = "r1", **variables: Any) -> int:
        """Run a playbook that succeeds; return how many tasks changed something."""
        result, events = await self._run(playbook, rollout=rollout, **variables)
        assert isinstance(result, Ok), result
        return len([event for event in events if event.kind == "changed"])

    async def check(self, playbook: str, *, rollout: str = "r1", **variables: Any) -> list[str]:
        """Run a playbook in check mode, which can say what it would change; return these tasks."""
        result, events = await self._run(playbook, rollout=rollout, check_only=True, **variables)
        assert isinstance(result, Ok), result
        assert [event.text for event in events if event.kind in PROBLEMS] == []
        return [str(event.fields["task"]) for event in events if event.kind == "changed"]

    async def fail(self, playbook: str, *, rollout: str = "r1", **variables: Any) -> str:
        """Run a playbook that fails in a task; return why, and what it printed."""
        result, _ = await self._run(playbook, rollout=rollout, **variables)
        assert isinstance(result, Failed)
        assert result.code is FailureCode.FAILED
        return f"{result.text}\n{result.output}"

    async def play_killed(self, playbook: str, *, rollout: str = "r1", **variables: Any) -> int:
        """Run a playbook until it succeeds, killed after tasks that act; return how many acted."""
        killed_after = self.tree / "killed_after"
        killed_after.touch()
        while True:
            result, _ = await self._run(playbook, rollout=rollout, **variables)
            acted = killed_after.read_text().splitlines()
            if isinstance(result, Ok):
                killed_after.unlink()
                return len(acted)
            assert "signal 9" in result.text, result

    async def _run(
        self, playbook: str, *, rollout: str, check_only: bool = False, **variables: Any
    ) -> tuple[StepResult, list[RunEvent]]:
        self._runs += 1
        request = RunRequest(
            f"r{self._runs}",
            Host("n0"),
            SOURCE,
            playbook,
            variables=variables,
            check_only=check_only,
            rollout=rollout,
            attempt=1,
        )
        handle = await self.runner.start(request)
        while (result := (await self.runner.wait_for_change(handle)).result) is None:
            pass
        return result, [event async for event in self.runner.read_events(handle)]
