"""The worlds in which the Runner contract is judged: a fake one, and a real node with real Ansible.

A world knows the playbooks of the suite by name, lets a runner die and be made
anew, and says what happens on its node; the suite knows neither.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.ports import Host, InventorySnapshot, PinnedSource, Runner, RunRequest
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner, Script
from tests.contracts.fakes.sources import SOURCE
from tests.support.daemon_environment import WARM
from tests.support.sshd import Sshd

"""For anything that must come on a loaded machine."""

PLAYBOOKS = {
    "ok.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: note the start
      ansible.builtin.raw: echo {{ rolloutd_test_run }} >> {{ rolloutd_test_log }}
    - name: nothing
      ansible.builtin.debug: {msg: hello}
""",
    "fail.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: install package
      ansible.builtin.fail: {msg: no such package}
""",
    "nobody.yml": "- hosts: others\n  tasks: [{ansible.builtin.debug: {msg: never}}]\n",
    "broken.yml": "- hosts: all\n  tasks:\n    - name: x\n   - y\n",
    "change.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: read the log
      ansible.builtin.command: cat /dev/null
      check_mode: false
      changed_when: false
    - name: write the file
      ansible.builtin.copy: {content: "wanted\\n", dest: "{{ rolloutd_test_log }}.conf"}
""",
    "unchecked.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: never here
      ansible.builtin.command: "true"
      when: false
    - name: of each
      ansible.builtin.command: "true"
      loop: [1, 2]
      when: item == 2
    - name: of raw
      ansible.builtin.raw: "true"
    - name: of a condition
      ansible.builtin.raw: "true"
      when: false
    - name: of hidden raw
      ansible.builtin.raw: "true"
      no_log: true
    - name: of a hidden condition
      ansible.builtin.copy: {content: "", dest: /nowhere}
      no_log: true
      when: false
""",
    "defies.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: act at once
      ansible.builtin.shell: echo {{ rolloutd_test_run }} >> {{ rolloutd_test_log }}
      check_mode: false
""",
    "long.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: long
      ansible.builtin.command: sleep 8642
""",
}
"""`ok.yml` runs no module, which doubles the CPU time of a run; others do.

Pipelining, as the tree's ansible.cfg asks for it, keeps the remote command alive when ssh dies.
"""


def source_of(tree: Path) -> PinnedSource:
    """Return a source whose tree is this directory."""
    return PinnedSource("directory", str(tree))


def tree_of(source: PinnedSource) -> Path:
    """Return the directory of a source_of() it."""
    return Path(source.pin)


class RunnerBackend(Protocol):
    """What the suite needs of a world."""

    def runner(self) -> Runner:
        """Make a runner, as a daemon that has just started does."""
        ...

    def request(
        self,
        playbook: str,
        run: str = "r1",
        *,
        timeout_s: float = 300.0,
        fence: str = "",
        check_only: bool = False,
    ) -> RunRequest:
        """Ask for one of the suite's playbooks."""
        ...

    def host(self) -> Host:
        """Return the node."""
        ...

    def has_work(self) -> bool:
        """Say whether the long task's process is on the node."""
        ...

    def started_runs(self) -> list[str]:
        """Return the runs whose playbook has begun on the node, in order."""
        ...

    def kill(self, handle: str) -> None:
        """SIGKILL the run's process group on this machine."""
        ...


class FakeBackend:
    """The fake's world."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        scripts = {f"{script.value}.yml": script for script in Script}
        self._run_host = FakeRunHost(scripts)

    def runner(self) -> Runner:
        """See World."""
        return FakeRunner(self._run_host)

    def request(
        self,
        playbook: str,
        run: str = "r1",
        *,
        timeout_s: float = 300.0,
        fence: str = "",
        check_only: bool = False,
    ) -> RunRequest:
        """See World."""
        return RunRequest(
            run,
            self.host(),
            SOURCE,
            playbook,
            timeout_s=timeout_s,
            fencing_token=fence,
            check_only=check_only,
        )

    def host(self) -> Host:
        """See World."""
        return Host("n0")

    def has_work(self) -> bool:
        """See World."""
        return self._run_host.has_work("n0")

    def started_runs(self) -> list[str]:
        """See World."""
        return self._run_host.started_runs

    def kill(self, handle: str) -> None:
        """See World."""
        self._run_host.kill(handle)

    async def close(self) -> None:
        """Nothing is held."""


class AnsibleBackend:
    """A real sshd, a real tree, real Ansible, which starts as a fork of a fork server."""

    settings: Mapping[str, Any] = {"warm": WARM == "auto"}

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs_dir = directory / "runs"
        self.tree = directory / "tree"
        self.tree.mkdir()
        self.source = source_of(self.tree)
        for name, text in PLAYBOOKS.items():
            (self.tree / name).write_text(text)
        (self.tree / "ansible.cfg").write_text("[connection]\npipelining = True\n")
        self.node = Sshd().start(directory / "sshd")
        self.connection = self.node.connection()
        self.shell = SshShell(known_hosts=self.node.known_hosts)
        self._runners: list[AnsibleRunner] = []

    def runner(self, runs_dir: Path | None = None, **settings: Any) -> AnsibleRunner:
        """See World."""
        settings = {"known_hosts": self.node.known_hosts, **self.settings, **settings}
        fence_dir = str(self.directory / "fence")
        runner = AnsibleRunner(
            runs_dir or self.runs_dir, self.shell, tree_of, self.inventory, fence_dir=fence_dir, **settings
        )
        self._runners.append(runner)
        return runner

    def request(
        self,
        playbook: str,
        run: str = "r1",
        *,
        timeout_s: float = 300.0,
        fence: str = "",
        check_only: bool = False,
    ) -> RunRequest:
        """See World."""
        if playbook == "unreachable.yml":
            self.node.stop()
            playbook = "ok.yml"
        variables = {"rolloutd_test_run": run, "rolloutd_test_log": str(self.directory / "starts")}
        return RunRequest(
            run,
            self.host(),
            self.source,
            playbook,
            variables=variables,
            timeout_s=timeout_s,
            fencing_token=fence,
            check_only=check_only,
        )

    def host(self) -> Host:
        """See World."""
        return Host("n0", connection=dict(self.connection))

    def inventory(self) -> InventorySnapshot:
        """Return the inventory of the node; each run builds its own."""
        return InventorySnapshot({"n0": dict(self.connection)})

    def has_work(self) -> bool:
        """See World."""
        return bool(self.commands(b"sleep\x008642"))

    def commands(self, words: bytes) -> list[int]:
        """Return the processes on the node whose command line has these words."""
        return [
            pid for pid in self.node.processes() if words in wrapper.read_proc_file(f"/proc/{pid}/cmdline")
        ]

    def shells_of_runs(self) -> list[int]:
        """Return the shells on the node whose command line bears the mark of a run."""
        return self.commands(b"rolloutd-run-")

    def started_runs(self) -> list[str]:
        """See World."""
        log = self.directory / "starts"
        return log.read_text().split() if log.exists() else []

    def kill(self, handle: str) -> None:
        """See World."""
        pid = int((self.runs_dir / handle / "claim").read_text().split()[1])
        os.killpg(pid, signal.SIGKILL)

    def processes_of(self, run: str) -> list[int]:
        """Return what carries the run's mark on this machine."""
        return wrapper.find_processes(run.encode(), os.fsencode(self.runs_dir / run), b"")

    async def close(self) -> None:
        """End everything, also what a failed test left."""
        for runner in self._runners:
            await runner.close()
        await self.shell.close()
        for directory in self.runs_dir.glob("*"):
            wrapper.kill_processes(directory.name.encode(), os.fsencode(directory), b"")
        self.node.stop()


class NewProcessBackend(AnsibleBackend):
    """The same, with each run a new process."""

    settings: Mapping[str, Any] = {"warm": False}
