"""A daemon that lives for months does not know by heart every run that there ever was."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import stale_processes, wrapper
from rolloutd.adapters.ansible.run_directory import RunDirectory, RunEventLine
from rolloutd.adapters.ansible.runner import MAX_FINISHED_RUNS, POLL_INTERVAL_S, AnsibleRunner
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


async def test_cut_event_line_does_not_keep_daemon_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk cuts a line, and the run writes the rest when there is space."""
    runner = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: InventorySnapshot({}))
    directory = RunDirectory(tmp_path / "runs" / "r1")
    directory.create()
    directory.write_metadata({"node": "n1"})
    assert wrapper.take_claim(str(directory.path / "claim"), "run", os.getpid())
    directory.events_file.write_text('{"kind": "task", "task": "a"}\n{"kind": "ta')
    reads = 0

    def count_reads(self: RunDirectory, offset: int) -> list[RunEventLine]:
        nonlocal reads
        reads += 1
        return list(self.iter_events(offset))

    monkeypatch.setattr(RunDirectory, "read_events", count_reads)
    assert (await runner.get_state("r1")).task == "a"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(runner.wait_for_change("r1"), timeout=2 * POLL_INTERVAL_S)
    assert reads < 10
    with directory.events_file.open("a") as file:
        file.write('sk", "task": "b"}\n')
    assert (await runner.wait_for_change("r1")).task == "b"
    await runner.close()


def test_bytes_of_node_that_are_not_text_are_printable(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    text = json.dumps({"kind": "failed", "text": "bad \udcff", "task": "\N{GRINNING FACE}"})
    directory.events_file.write_text(f"{text}\n")
    (line,) = directory.iter_events(0)
    assert line.event == {"kind": "failed", "text": "bad ?", "task": "\N{GRINNING FACE}"}


async def test_run_with_long_names_is_started_and_found(tmp_path: Path) -> None:
    run_id = f"{'p' * 69}.{'n' * 128}.1.{'s' * 63}.1"
    runner = AnsibleRunner(tmp_path / "runs", FakeShell(), tree_of, lambda: InventorySnapshot({}))
    request = RunRequest(run_id, Host("n1"), source_of(tmp_path), "none.yml")
    handle = await runner.start(request)
    assert await runner.start(request) == handle
    assert handle != await runner.start(replace(request, run_id=f"{run_id}2"))
    assert len(stale_processes.RunMarkers(str(tmp_path)).run_marker("n1", f"{handle}~16")) < 255
    assert (await runner.get_state(run_id)).result == (await runner.get_state(handle)).result
    slightly_too_long = run_id[: stale_processes.MAX_RUN_NAME + 1]
    await runner.start(replace(request, run_id=slightly_too_long))
    assert (await runner.get_state(slightly_too_long)).result is not None
    await runner.close()
