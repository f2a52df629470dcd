"""Runs in forks of the fork server: the same as new processes, and independent of the server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.fast import fork_servers
from rolloutd.adapters.ansible.launcher import LocalRun
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Failed, Host, InventorySnapshot, Ok, RunRequest
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.runner_backends import source_of, tree_of
from tests.rolloutd.adapters.ansible import playbook_corpus
from tests.support.node_python import node_python
from tests.support.waiting import wait_in_loop_until

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": node_python()}
FLEET = InventorySnapshot(
    {
        "n0": {**LOCAL, "own": 1, "derived": "{{ own + 1 }}"},
        "db1": {**LOCAL, "hidden": playbook_corpus.VAULTED},
    },
    {"web": ["n0"], "db": ["db1"]},
    generation=1,
)

FORKED = "Ansible started as a fork"


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[AnsibleRunner]:
    made = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: FLEET)
    yield made
    await made.close()


def request(tree: Path, playbook: str, run: str) -> RunRequest:
    return RunRequest(run, Host("n0"), source_of(tree), f"{playbook}.yml", timeout_s=60.0)


async def finish(runner: AnsibleRunner, asked: RunRequest) -> RunDirectory:
    """Run to the end, without the runner's judgement."""
    handle = await runner.start(asked)
    while (await runner.wait_for_change(handle)).result is None:
        pass
    return RunDirectory(runner._runs_dir / handle)


def way(directory: RunDirectory) -> str:
    """Return how the run was started, as its log says."""
    return next(
        str(line.event["text"]) for line in directory.read_events(0) if line.event["kind"] == "process"
    )


VARIABLE = (
    (r"/\S*/runs/[^/\s]+", "RUN"),
    (r"/\S*\.ansible/tmp\S*|/tmp/ansible\S*", "TMP"),
    (r"ansible-(tmp|local)-[\w.-]+", "TMP"),
    (r"\d+:\d\d:\d\d\.\d+", "TIME"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,\d]*", "DATE"),
    (r"\bj\d+\.\d+", "JOB"),
    (r"0x[0-9a-f]+", "ADDRESS"),
)
"""What differs between two runs of the same playbook."""


def normal(text: str) -> str:
    for pattern, name in VARIABLE:
        text = re.sub(pattern, name, text)
    return text


def observed(directory: RunDirectory) -> Mapping[str, Any]:
    """Return everything that a run shows but times and temporary names."""
    events = [
        {name: normal(str(value)) for name, value in line.event.items() if name not in {"at", "seconds"}}
        for line in directory.read_events(0)
        if line.event["kind"] != "process"
    ]
    status = directory.read_status()
    output = directory.path / "output"
    assert status is not None
    return {
        "ended": (status.ended, status.code, status.left),
        "output": normal(output.read_text()) if output.exists() else "",
        "events": events,
    }


async def compare(tmp_path: Path, tree: Path, playbook: str, forking: AnsibleRunner) -> str:
    """Assert that a fork shows what a new process shows; return how the first was started."""
    new_runs = tmp_path / f"new-{playbook}" / "runs"
    starting = AnsibleRunner(new_runs, FakeShell(), tree_of, lambda: FLEET, warm=False)
    forked = await finish(forking, request(tree, playbook, playbook))
    new = await finish(starting, request(tree, playbook, playbook))
    assert observed(forked) == observed(new), playbook
    await starting.close()
    return way(forked)


@pytest.mark.long
async def test_fork_shows_what_new_process_shows(tmp_path: Path, runner: AnsibleRunner) -> None:
    """The whole corpus, by one fork server, so that a run that left something there would show."""
    tree = tmp_path / "tree"
    playbook_corpus.write_tree(tree, "[defaults]\nvault_password_file = vault-password\n")
    together = asyncio.Semaphore(3)

    async def one(name: str) -> None:
        async with together:
            assert await compare(tmp_path, tree, name, runner) == FORKED, name

    async with asyncio.TaskGroup() as group:
        for name in playbook_corpus.PLAYBOOKS:
            group.create_task(one(name))
    assert len(playbook_corpus.PLAYBOOKS) + len(playbook_corpus.CONFIGURATIONS) >= 60


@pytest.mark.long
@pytest.mark.parametrize("name", playbook_corpus.CONFIGURATIONS)
async def test_configured_tree_shows_the_same(tmp_path: Path, runner: AnsibleRunner, name: str) -> None:
    tree = tmp_path / "tree"
    playbook_corpus.write_tree(tree, playbook_corpus.CONFIGURATIONS[name])
    started = await compare(tmp_path, tree, "sample", runner)
    imported = "could not be imported"
    unusual = {"log-path": "log_path", "broken": imported, "invalid-value": imported}
    assert unusual.get(name, FORKED) in started


def is_alive(pid: int) -> bool:
    return wrapper.is_alive(pid)


WAIT = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: wait
      command: sh -c 'touch began; while [ ! -e go ]; do sleep 0.05; done'
      args: {chdir: "{{ inventory_dir }}"}
"""

COPY = """\
- hosts: all
  gather_facts: false
  tasks:
    - copy: {content: x, dest: "{{ inventory_dir }}/copied"}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source whose playbook waits until the test lets it end."""
    made = tmp_path / "tree"
    made.mkdir()
    (made / "wait.yml").write_text(WAIT)
    return made


def let_end(directory: RunDirectory) -> None:
    (directory.path / "go").touch()


async def start(runner: AnsibleRunner, tree: Path, run: str = "r1") -> RunDirectory:
    """Start the run that waits, up to its command."""
    directory = RunDirectory(runner._runs_dir / await runner.start(request(tree, "wait", run)))
    await wait_in_loop_until((directory.path / "began").exists)
    return directory


async def test_run_outlives_killed_fork_server(runner: AnsibleRunner, tree: Path) -> None:
    directory = await start(runner, tree)
    assert way(directory) == FORKED
    (server,) = runner.status.servers
    os.kill(server, signal.SIGKILL)
    await wait_in_loop_until(lambda: not is_alive(server))
    second = await start(runner, tree, "r2")
    assert (way(second), len(runner.status.servers)) == (FORKED, 1)
    for run in (directory, second):
        let_end(run)
        while (state := await runner.wait_for_change(run.path.name)).result is None:
            pass
        assert isinstance(state.result, Ok)


async def test_first_run_of_server_has_its_temporary_directory(runner: AnsibleRunner, tree: Path) -> None:
    """The server starts with the variables of its first run."""
    (tree / "copy.yml").write_text(COPY)
    directory = await finish(runner, request(tree, "copy", "r1"))
    assert isinstance((await runner.get_state("r1")).result, Ok), directory.read_output_tail()


async def test_processes_of_fork_show_run(runner: AnsibleRunner, tree: Path) -> None:
    """By its environment a run is found after a crash, and by its command line people know it."""
    directory = await start(runner, tree)
    found = wrapper.find_processes(b"r1", os.fsencode(directory.path), b"")
    commands = [wrapper.read_proc_file(f"/proc/{pid}/cmdline") for pid in found]
    assert len([command for command in commands if b"ansible-playbook\0--inventory" in command]) == 2
    assert [command for command in commands if command.startswith(b"sh\0-c\0touch")]
    with pytest.raises(AdapterFailed):  # the node of this test cannot be asked
        await runner.cancel("r1")
    assert not wrapper.find_processes(b"r1", os.fsencode(directory.path), b"")
    (server,) = runner.status.servers
    assert b"ROLLOUTD_RUN" not in wrapper.read_proc_file(f"/proc/{server}/environ")


async def test_servers_end_with_daemon(tmp_path: Path, tree: Path) -> None:
    runner = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: FLEET)
    directory = await start(runner, tree)
    (server,) = runner.status.servers
    await runner.close()
    await wait_in_loop_until(lambda: not is_alive(server))
    later = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: FLEET)
    let_end(directory)
    while (state := await later.wait_for_change("r1")).result is None:
        pass
    assert isinstance(state.result, Ok)
    await later.close()


async def test_servers_end_when_memory_is_short(
    runner: AnsibleRunner, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start(runner, tree)
    (server,) = runner.status.servers
    monkeypatch.setattr(fork_servers, "MIN_AVAILABLE_MEMORY", 1.1)  # no machine has that much
    second = await start(runner, tree, "r2")
    assert way(second).endswith("new process: the machine is short of memory")
    await wait_in_loop_until(lambda: not is_alive(server))
    await wait_in_loop_until(lambda: not runner.status.servers)
    assert runner.status.started == {"fork": 1, "new process": 1}
    for run in (first, second):
        let_end(run)


async def test_new_generation_of_inventory_replaces_server(tmp_path: Path, tree: Path) -> None:
    """The server has the inventory in its memory, so it serves one generation."""
    fleet, servers = FLEET, []
    runner = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: fleet)
    (tree / "own.yml").write_text(playbook_corpus.PLAYBOOKS["inventory-own"])
    for run, own in (("r1", 1), ("r2", 1), ("r3", 2)):
        fleet = replace(FLEET, hosts={**FLEET.hosts, "n0": {**LOCAL, "own": own}}, generation=own)
        directory = await finish(runner, request(tree, "own", run))
        assert (way(directory), f"own is {own}" in directory.read_output_tail()) == (FORKED, True)
        servers.append(set(runner.status.servers))
    await wait_in_loop_until(lambda: len(runner.status.servers) == 1)
    assert servers[0] == servers[1]
    assert not servers[0] & runner.status.servers
    await runner.close()


async def test_run_after_cancelled_start_gets_its_own_answer(runner: AnsibleRunner, tree: Path) -> None:
    (tree / "own.yml").write_text(playbook_corpus.PLAYBOOKS["inventory-own"])
    starting = asyncio.create_task(runner.start(request(tree, "own", "r1")))
    await wait_in_loop_until(lambda: runner.status.servers)
    starting.cancel()
    await asyncio.wait((starting,))
    for run in ("r2", "r3"):
        assert way(await finish(runner, request(tree, "own", run))) == FORKED
        assert isinstance((await runner.get_state(run)).result, Ok)


def test_run_of_this_machine_stays_here_despite_inventory() -> None:
    here = replace(request(Path("tree"), "build", "r1"), host=Host("localhost", connection=LOCAL))
    fleet = InventorySnapshot({"localhost": {"ansible_host": "10.0.0.1"}}, generation=1)
    run = LocalRun.resolve(here, Path("tree"), fleet)
    assert (run.variables, run.inventory.generation) == (LOCAL, None)
    known = replace(fleet, hosts={"localhost": LOCAL})
    assert LocalRun.resolve(here, Path("tree"), known).inventory is known


async def test_foreign_command_is_not_forked(tmp_path: Path, tree: Path) -> None:
    runner = AnsibleRunner(
        tmp_path / "runs", FakeShell(), tree_of, lambda: FLEET, ansible_playbook="/bin/false"
    )
    directory = await finish(runner, request(tree, "wait", "r1"))
    assert way(directory).endswith("new process: /bin/false is not the command of rolloutd's Python")
    assert isinstance((await runner.get_state("r1")).result, Failed)
    await runner.close()
