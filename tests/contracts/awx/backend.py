"""A fake AWX and one node, for the contract of runners and for what AWX alone does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.awx.http import AwxClient, TimeLimits
from rolloutd.adapters.awx.runner import AwxRunner, AwxTimes
from rolloutd.adapters.awx.templates import Templates
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.timers import SystemClock
from rolloutd.contracts.runner import Work
from rolloutd.ports import (
    Host,
    InventorySnapshot,
    PinnedSource,
    RunnerContext,
    RunRequest,
    Shell,
    ShellResult,
)
from tests.support.fake_awx import FakeAwx
from tests.support.fake_awx.server import TOKEN
from tests.support.sshd import Sshd

NODE = "n0"
GIT_URL = "https://git.example/playbooks.git"
PIN = "0123456789abcdef0123456789abcdef01234567"
OTHER_PIN = "fedcba9876543210fedcba9876543210fedcba98"
MACHINE = "0a1b2c3d4e5f"

NO_NODE = {
    "ansible_host": "192.0.2.1",
    "ansible_ssh_private_key_file": "/etc/rolloutd/id",
    "ansible_python_interpreter": "/usr/bin/python3",
}

PLAYBOOKS = {
    "succeeds.yml": """
- hosts: web
  gather_facts: false
  tasks:
    - name: note the start
      ansible.builtin.command: sh -c 'echo {{ rolloutd_test_run }} >> {{ rolloutd_test_log }}'
    - name: nothing
      ansible.builtin.debug: {msg: hello}
""",
    "fails.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: install package
      ansible.builtin.fail: {msg: no such package}
""",
    "never-ends.yml": """
- hosts: all
  gather_facts: false
  tasks:
    - name: long
      ansible.builtin.command: sleep 8642
""",
}

FAST = AwxTimes(poll_s=0.05, late_launch_s=0.5, late_events_s=0.5)
"""Times of an AWX that forgets a request, and an event, after half a second."""


@dataclass
class AwxBackend:
    """A fake AWX that runs playbooks on one sshd."""

    url: str
    """Its address with the prefix of the API."""
    directory: Path
    node: Sshd | None
    shell: Shell
    server: FakeAwx | None = None
    times: AwxTimes = FAST
    variables: dict[str, Any] = field(default_factory=dict)
    """Further variables of the node."""
    closers: list[Any] = field(default_factory=list)

    @property
    def fake(self) -> FakeAwx:
        assert self.server is not None, "AWX is in another process"
        return self.server

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def log(self) -> Path:
        return self.directory / "starts"

    def open_runner(self, **params: Any) -> AwxRunner:
        """See RunnerBackend."""
        client = AwxClient(
            "runner awx",
            self.url,
            self.directory / "token",
            None,
            TimeLimits(5.0, 5.0),
        )
        # The daemon's own runner inspects the nodes.
        stale_runs = AnsibleRunner(
            self.directory / "runs", self.shell, lambda _: self.tree, self.inventory, fence_dir=self.fence_dir
        )
        self.closers += [client, stale_runs]
        given = {"url": self.url, "prefix": "", "organization": "rolloutd"}
        context = RunnerContext(
            "awx",
            self.shell,
            SystemClock(),
            self.inventory,
            SimpleNamespace(ansible=SimpleNamespace(fence_dir=self.fence_dir)),
            lambda _: self.tree,
            params={**given, **params},
            machine=MACHINE,
            stale_runs=stale_runs,
        )
        templates = Templates(client, "rolloutd", {GIT_URL: "playbooks"})
        return AwxRunner(context, client, templates, self.times)

    @property
    def fence_dir(self) -> str:
        return str(self.directory / "fence")

    def host(self) -> Host:
        return Host(NODE, connection=self.connection())

    def connection(self) -> Mapping[str, Any]:
        reached = NO_NODE if self.node is None else self.node.connection()
        return {**reached, "group_names": ["web"], **self.variables}

    def inventory(self) -> InventorySnapshot:
        return InventorySnapshot({NODE: self.connection()})

    def request(
        self, work: Work, run_id: str, *, timeout_s: float = 300.0, fencing_token: str = ""
    ) -> RunRequest:
        """See RunnerBackend."""
        return RunRequest(
            run_id,
            self.host(),
            PinnedSource("git", PIN, url=GIT_URL),
            f"{work.value}.yml",
            {"rolloutd_test_run": run_id, "rolloutd_test_log": str(self.log)},
            timeout_s=timeout_s,
            fencing_token=fencing_token,
        )

    async def begun(self) -> Sequence[str]:
        """See RunnerBackend."""
        return self.log.read_text().split() if self.log.exists() else []

    async def has_work(self) -> bool:
        """See RunnerBackend."""
        assert self.node is not None
        return any(
            b"sleep\x008642" in wrapper.read_proc_file(f"/proc/{pid}/cmdline")
            for pid in self.node.processes()
        )

    async def lose(self, handle: str) -> None:
        """See RunnerBackend."""
        job = next(
            each for each in self.fake.jobs.by_id.values() if each.inventory and handle in each.inventory.name
        )
        self.fake.jobs.processes[job.id].kill()

    async def set_reachable(self, reachable: bool) -> None:
        """See RunnerBackend."""
        self.fake.is_cut_off = not reachable

    async def wait_for_job(self) -> Any:
        """Return the newest job once its playbook runs on the node."""
        async with asyncio.timeout(60):
            while not await self.has_work():
                await asyncio.sleep(0.02)
        return self.fake.jobs.by_id[max(self.fake.jobs.by_id)]


class WrapperShell:
    """The shell of a node on which each script succeeds, for runs of which no process is looked at."""

    async def run(self, host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        return ShellResult(0, "/var/tmp/wrapper\n" if "wrapper" in command else "clear\n", "")

    async def disconnect(self, node: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@asynccontextmanager
async def open_backend(directory: Path) -> AsyncIterator[AwxBackend]:
    """Open a fake AWX with the playbooks' templates, and a node."""
    node = Sshd().start(directory / "sshd")
    try:
        shell = SshShell(known_hosts=node.known_hosts)
        async with open_scripted(directory, shell=shell, node=node) as backend:
            credential = backend.fake.jobs.credential
            credential.user, credential.key_file = node.user, str(node.key_file)
            backend.fake.jobs.is_paused = False
            yield backend
    finally:
        node.stop()


@asynccontextmanager
async def open_scripted(
    directory: Path, prefix: str = "/api/v2", *, shell: Shell | None = None, node: Sshd | None = None
) -> AsyncIterator[AwxBackend]:
    """Open a fake AWX whose jobs have no process, and no node: a test says what happens to them."""
    (directory / "tree").mkdir()
    for name, text in PLAYBOOKS.items():
        (directory / "tree" / name).write_text(text)
    (directory / "token").write_text(TOKEN + "\n")
    async with FakeAwx(prefix) as fake:
        trees = {PIN: directory / "tree", OTHER_PIN: directory / "tree"}
        project = fake.add_project("playbooks", GIT_URL, trees.__getitem__)
        for name in PLAYBOOKS:
            fake.add_template(f"run {name}", project, name)
        fake.jobs.is_paused = True
        backend = AwxBackend(fake.url + fake.prefix, directory, node, shell or WrapperShell(), fake)
        try:
            yield backend
        finally:
            for each in (*backend.closers, backend.shell):
                await each.close()


@asynccontextmanager
async def open_client(directory: Path, url: str, variables: Mapping[str, Any]) -> AsyncIterator[AwxBackend]:
    """Open what runs need beside an AWX and a node that another process has in this directory."""
    shell = SshShell(known_hosts=directory / "sshd" / "known_hosts")
    backend = AwxBackend(url, directory, None, shell, times=AwxTimes(), variables=dict(variables))
    try:
        yield backend
    finally:
        for each in (*backend.closers, shell):
            await each.close()
