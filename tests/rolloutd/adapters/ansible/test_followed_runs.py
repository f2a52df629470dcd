"""A daemon that lives for months does not know by heart every run that there ever was."""

from __future__ import annotations

from pathlib import Path

from rolloutd.adapters.ansible.runner import MAX_FINISHED_RUNS, AnsibleRunner
from rolloutd.ports import Failed, Host, InventorySnapshot, RunRequest
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.runner_backends import source_of, tree_of


async def test_runs_that_are_over_are_read_again_when_asked_for(tmp_path: Path) -> None:
    runner = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: InventorySnapshot({}))
    requests = [
        RunRequest(f"r{number}", Host("n1"), source_of(tmp_path), "none.yml")
        for number in range(MAX_FINISHED_RUNS + 5)
    ]
    for request in requests:
        state = await runner.get_state(await runner.start(request))
        assert isinstance(state.result, Failed)
    assert len(runner._tracked) == MAX_FINISHED_RUNS
    first = await runner.get_state("r0")
    assert isinstance(first.result, Failed)
    assert "playbook none.yml: the source does not have it" in first.result.text
    assert await runner.start(requests[0]) == "r0"
    await runner.close()
