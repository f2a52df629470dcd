"""The embedded fleet: real Ansible changes its nodes, faults bite, and nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from machines.model.node import NodeHealth
from rolloutd.adapters.ssh.reachable import ReachableObserver
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.demo.fleet import Fleet, clear_fault, node_labels, set_fault
from rolloutd.demo.node import Fault
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host
from tests.contracts.fakes.clock import FakeClock

LIMIT_S = 120.0
ANSIBLE = Path(sys.executable).with_name("ansible-playbook")

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.command: sysctl -w net.core.somaxconn=65535
    - ansible.builtin.copy:
        content: "net.core.somaxconn = 65535\\n"
        dest: "{{ node_root }}/etc/sysctl.d/90-rolloutd.conf"
        mode: "0644"
    - ansible.builtin.lineinfile:
        path: "{{ node_root }}/etc/sysctl.d/90-rolloutd.conf"
        line: "vm.swappiness = 10"
    - ansible.builtin.command: sysctl --system
      become: true
"""


@pytest.fixture
async def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """Three nodes."""
    async with Fleet(tmp_path / getattr(request, "param", "fleet"), nodes=3) as running:
        yield running


@pytest.fixture
async def shell() -> AsyncIterator[SshShell]:
    """A shell that knows nothing but what the nodes' variables say."""
    made = SshShell()
    yield made
    await made.close()


def host(fleet: Fleet, node: str) -> Host:
    """Return a node of the fleet as the inventory gives it."""
    return Host(node, connection=fleet.variables(node))


async def play(fleet: Fleet, directory: Path) -> tuple[int, str]:
    """Run the playbook on all nodes as anybody with ansible-core would; home is elsewhere."""
    (directory / "play.yml").write_text(PLAYBOOK)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory / "home"),
        "LANG": "C.UTF-8",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(directory / "cp"),
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=no",
    }
    process = await asyncio.create_subprocess_exec(
        str(ANSIBLE),
        "-i",
        str(fleet.inventory_file),
        str(directory / "play.yml"),
        env=environment,
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


needs_ansible = pytest.mark.skipif(
    not ANSIBLE.exists() or shutil.which("ssh") is None, reason="needs ansible-core and the ssh client"
)


@needs_ansible
@pytest.mark.parametrize("fleet", ["a fleet"], indirect=True)  # a path with a space
async def test_real_ansible_changes_nodes_without_fault(fleet: Fleet, tmp_path: Path) -> None:
    set_fault(fleet.directory, "n2", Fault.TASK_FAILS)
    status, output = await play(fleet, tmp_path)
    assert status == 2, output
    assert 'setting key \\"net.core.somaxconn\\": Input/output error' in output.replace('\\\\"', '\\"')
    assert (fleet.root("n2") / "proc/sys/net/core/somaxconn").read_text() == "4096\n"
    for node in ("n1", "n3"):
        root = fleet.root(node)
        assert (root / "proc/sys/net/core/somaxconn").read_text() == "65535\n"
        assert (root / "proc/sys/vm/swappiness").read_text() == "10\n"
        written = (root / "etc/sysctl.d/90-rolloutd.conf").read_text()
        assert written == "net.core.somaxconn = 65535\nvm.swappiness = 10\n"
    for node in fleet.nodes:
        assert list((fleet.root(node) / "tmp/ansible").iterdir()) == []
    assert fleet.processes() == []


async def test_each_node_is_a_world_of_its_own(fleet: Fleet, shell: SshShell) -> None:
    for node in fleet.nodes:
        result = await shell.run(
            host(fleet, node), "pwd; echo $HOME; sysctl -n vm.swappiness", timeout_s=LIMIT_S
        )
        root = fleet.root(node)
        assert result.stdout == f"{root}\n{root}\n60\n"


async def test_sysctl_answers_as_a_kernel_does(fleet: Fleet, shell: SshShell) -> None:
    node = host(fleet, "n1")

    async def sysctl(arguments: str) -> tuple[int, str, str]:
        result = await shell.run(node, f"sysctl {arguments}", timeout_s=LIMIT_S)
        return result.exit_status, result.stdout, result.stderr

    assert await sysctl("vm.swappiness") == (0, "vm.swappiness = 60\n", "")
    assert await sysctl("-w vm.swappiness=10 kernel.panic=5") == (
        0,
        "vm.swappiness = 10\nkernel.panic = 5\n",
        "",
    )
    assert await sysctl("-n vm.swappiness kernel.panic") == (0, "10\n5\n", "")
    missing = "sysctl: cannot stat /proc/sys/no/such: No such file or directory\n"
    assert await sysctl("no.such") == (255, "", missing)
    (fleet.root("n1") / "extra.conf").write_text("# more\n; and more\n\n vm.swappiness = 20 \n")
    assert await sysctl("-p extra.conf") == (0, "vm.swappiness = 20\n", "")
    assert (await sysctl("-a"))[1].count(" = ") == 15


async def test_a_wrong_answer_is_wrong_until_healed(fleet: Fleet, shell: SshShell) -> None:
    node = host(fleet, "n1")
    await shell.run(node, "sysctl -w net.core.somaxconn=65535", timeout_s=LIMIT_S)
    set_fault(fleet.directory, "n1", Fault.CHECK_WRONG)
    assert (await shell.run(node, "sysctl -n net.core.somaxconn", timeout_s=LIMIT_S)).stdout == "4096\n"
    assert (await shell.run(node, "healthcheck", timeout_s=LIMIT_S)).exit_status == 1
    clear_fault(fleet.directory, "n1")
    assert (await shell.run(node, "sysctl -n net.core.somaxconn", timeout_s=LIMIT_S)).stdout == "65535\n"
    assert (await shell.run(node, "healthcheck", timeout_s=LIMIT_S)).stdout == "healthy\n"


async def test_an_sshd_that_refuses_refuses_old_and_new_connections(fleet: Fleet, shell: SshShell) -> None:
    node = host(fleet, "n1")
    observer = ReachableObserver(shell, FakeClock())
    await shell.run(node, "true", timeout_s=LIMIT_S)
    assert [o.sight for o in await observer.observe([node])] == [NodeHealth.UP]
    set_fault(fleet.directory, "n1", Fault.SSHD_REFUSES)
    with pytest.raises(NodeUnreachable, match="n1: "):
        await shell.run(node, "true", timeout_s=LIMIT_S)
    assert [o.sight for o in await observer.observe([node])] == [NodeHealth.DOWN]
    assert (await shell.run(host(fleet, "n2"), "true", timeout_s=LIMIT_S)).exit_status == 0
    clear_fault(fleet.directory, "n1")
    assert (await shell.run(node, "true", timeout_s=LIMIT_S)).exit_status == 0


def test_an_unknown_node_has_no_faults(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="has no node n99"):
        set_fault(tmp_path, "n99", Fault.TASK_FAILS)


async def test_a_command_that_ran_out_of_time_is_ended_on_the_node(fleet: Fleet, shell: SshShell) -> None:
    await shell.run(host(fleet, "n1"), "true", timeout_s=LIMIT_S)  # logging in may take longer than that
    with pytest.raises(TimeoutError):
        await shell.run(host(fleet, "n1"), "sleep 3600", timeout_s=0.5)
    async with asyncio.timeout(LIMIT_S):
        while fleet.processes():
            await asyncio.sleep(0.01)


async def test_much_goes_through_in_both_directions(fleet: Fleet, shell: SshShell) -> None:
    text = "x" * 3_000_000
    count = await shell.run(host(fleet, "n1"), "wc -c", timeout_s=LIMIT_S, stdin=text)
    assert count.stdout.strip() == str(len(text))
    flood = await shell.run(host(fleet, "n1"), "head -c 9000000 /dev/zero; exit 4", timeout_s=LIMIT_S)
    assert flood.exit_status == 4
    assert flood.stdout.endswith("of 9000000 bytes]")


async def test_no_command_outlives_the_fleet(tmp_path: Path) -> None:
    async with Fleet(tmp_path / "fleet", nodes=1) as fleet:
        shell = SshShell()
        await shell.run(host(fleet, "n1"), "setsid sleep 3600 > /dev/null 2>&1 & echo", timeout_s=LIMIT_S)
        hanging = asyncio.create_task(shell.run(host(fleet, "n1"), "sleep 3600 | cat", timeout_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            while len(fleet.processes()) < 3:
                await asyncio.sleep(0.01)
    assert fleet.processes() == []
    with pytest.raises(NodeUnreachable):
        await hanging
    await shell.close()


@pytest.mark.parametrize("count", [12, 24, 100])
def test_every_team_has_a_canary_and_nodes_on_both_racks(count: int) -> None:
    labels = [node_labels(number) for number in range(1, count + 1)]
    teams = Counter(label["team"] for label in labels)
    assert len(teams) == 4
    assert max(teams.values()) - min(teams.values()) <= 1
    for team in teams:
        assert {label["rack"] for label in labels if label["team"] == team} == {"r1", "r2"}
        assert sum(label["team"] == team and label.get("canary") == "true" for label in labels) == 1


# -- as a process of its own --------------------------------------------------

STARTER = """\
import subprocess, sys
fleet = subprocess.Popen([sys.executable, "-m", "rolloutd.demo.fleet", "--dir", sys.argv[1], "--nodes", "4"])
print(fleet.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A process that has started a fleet, the fleet's pid and its directory."""
    directory = tmp_path / "fleet"
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(directory)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        yield parent, pid, directory
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()


async def ready(directory: Path) -> dict[str, int]:
    """Wait until the fleet is ready; return its ports."""
    async with asyncio.timeout(LIMIT_S):
        while not (directory / "fleet.json").exists():
            await asyncio.sleep(0.01)
    ports: dict[str, int] = json.loads((directory / "fleet.json").read_text())["nodes"]
    return ports


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(LIMIT_S):
        while Path(f"/proc/{pid}/exe").is_symlink() and _state(pid) not in {"Z", ""}:
            await asyncio.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _marked(directory: Path) -> list[int]:
    fleet = Fleet(directory, nodes=1)
    return fleet.processes()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "parent"])
async def test_a_fleet_process_ends_with_all_that_it_started(
    started: tuple[subprocess.Popen[bytes], int, Path], how: str
) -> None:
    parent, pid, directory = started
    assert set(await ready(directory)) == {"n1", "n2", "n3", "n4"}
    inventory = yaml.safe_load((directory / "inventory.yml").read_text())["all"]
    shell = SshShell()
    node = Host("n1", connection={**inventory["vars"], **inventory["hosts"]["n1"]})
    await shell.run(node, "setsid sleep 3600 > /dev/null 2>&1 & echo", timeout_s=LIMIT_S)
    await shell.close()
    async with asyncio.timeout(LIMIT_S):
        while len(_marked(directory)) != 1:  # it shows its mark once it has become `sleep`
            await asyncio.sleep(0.02)
    if how == "parent":
        parent.kill()
        parent.wait()
    else:
        os.kill(pid, signal.Signals[how])
    await gone(pid)
    assert _marked(directory) == []
    assert not (directory / "fleet.json").exists()
