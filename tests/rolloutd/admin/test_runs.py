"""What the doctor says of runs: their number, their processes, and pipelining after a test on a node."""

from __future__ import annotations

import os

from rolloutd.admin.runs import TEST_SUDO, describe_runs, suggest_pipelining
from rolloutd.control.daemons.runner_serializers import runs
from rolloutd.ports import WITHHELD, ShellResult, TunedRunnerStatus
from tests.contracts.fakes.shell import FakeShell

CONNECTIONS = {"n1": {WITHHELD: ["ansible_password"]}, "n2": {}, "n10": {}}
REQUIRES = ShellResult(1, "", "sudo: sorry, you must have a tty to run sudo\n")


async def test_node_without_requiretty_gets_suggestion() -> None:
    shell = FakeShell({TEST_SUDO: ShellResult(1, "", "sudo: a password is required\n")})
    shell.down.add("n2")
    found = await suggest_pipelining(shell, CONNECTIONS)
    assert found is not None
    assert found.text.startswith(
        "sudo on n10 needs no terminal: `ansible.pipelining: on` would save about 5 ssh"
    )


async def test_node_with_requiretty_gets_warning() -> None:
    found = await suggest_pipelining(FakeShell({TEST_SUDO: REQUIRES}), CONNECTIONS)
    assert found is not None
    assert found.text.startswith("sudo on n2 requires a terminal (`requiretty`)")


async def test_no_node_answers_and_nothing_is_suggested() -> None:
    shell = FakeShell()
    shell.down.update(CONNECTIONS)
    assert await suggest_pipelining(shell, CONNECTIONS) is None


def test_runs_are_described_with_memory_of_fork_servers() -> None:
    status = TunedRunnerStatus(parallel=8, active=2, waiting={"n1": 1.0}, servers={os.getpid()})
    status.started.update({"fork": 3, "new process": 1})
    shown = runs({"local": status}, ())
    assert shown["fork_servers_bytes"] > 2**20
    assert describe_runs(shown).text.startswith(
        "2 of at most 8 active, 1 waiting; 3 started as forks and 1 as new processes; 1 fork server, "
    )
    gone = TunedRunnerStatus(servers={2**22 + 1}, plain_because="not tested")
    shown = runs({"local": gone}, ())
    assert shown["fork_servers_bytes"] == 0
    assert describe_runs(shown).text.endswith("; none is forked: not tested")
