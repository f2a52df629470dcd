"""Changes of other kinds than playbooks: planned, routed to their runner, recorded and undone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.rules.runners import queued_run_reason
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.engine import runners
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.runners import RoutedRunners
from rolloutd.ports import MAX_PREVIOUS_BYTES, Host, RunRequest, Unknown
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import SOURCE
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.engine.drivers.test_run_execution import run_driver
from tests.rolloutd.engine.test_daemon import until
from tests.rolloutd.slow_store import adapters_of, loop_iterations
from tests.support.note_change import NoteRunner, Notes, note_installed

NOTED = PLAN.replace(
    "maintain: {playbook: site.yml}", "maintain: {note: {text: '{{ node.name }} is new'}}"
).replace("  rollback: {playbook: undo.yml}\n", "")


@pytest.fixture(autouse=True)
def note_kind() -> Iterator[None]:
    with note_installed():
        yield


class Fleet:
    """A fleet whose plan writes notes, and what its daemon has as runners."""

    def __init__(self, inside: ControlEnvironment, directory: Path) -> None:
        self.inside = inside
        self.directory = directory
        self.notes = Notes()
        self.runners = self.open()

    def open(self, place: str = "notes") -> RoutedRunners:
        """Return the runners as a daemon has them that has just started."""
        local = FakeRunner(self.inside.run_host)
        return RoutedRunners(self.inside.state, {"local": local}, {"note": NoteRunner(self.notes, place)})

    def adapters(self) -> AdapterSet:
        return replace(adapters_of(self.inside, self.directory), runners=self.runners)

    async def runs(self, rollout: str, node: str = "p1") -> list[StepRecord]:
        steps = await self.inside.state.store.load_steps(rollout, node)
        return [each for each in steps if each.action is StepAction.RUN]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with control_environment(tmp_path) as inside:
        yield Fleet(inside, tmp_path)


def request(run_id: str) -> RunRequest:
    return RunRequest(run_id, Host("p1"), SOURCE, "", kind="note", params={"text": "new"})


async def test_handle_names_kind_and_place(fleet: Fleet) -> None:
    run_id = fleet.runners.run_id_for("r1", "p1", "note")
    assert run_id.startswith("note.")
    assert await fleet.runners.start(request(run_id)) == run_id
    again = fleet.open()
    assert (await again.get_state(run_id)).result is not None
    assert await again.start(request(run_id)) == run_id
    assert len(fleet.notes.applied) == 1
    assert not fleet.inside.run_host.runs, "no playbook runs"
    elsewhere = fleet.open("other notes")
    assert elsewhere.is_elsewhere(run_id)
    assert isinstance((await elsewhere.get_state(run_id)).result, Unknown)


async def test_kind_is_asked_once_rollout_needs_it(fleet: Fleet) -> None:
    fleet.notes.is_down = True
    problems = fleet.inside.state.index
    watching = asyncio.create_task(fleet.runners.watch())
    await loop_iterations(20)
    assert "note" not in fleet.runners.statuses
    rollout = await fleet.inside.start(text=NOTED)
    await loop_iterations(20)
    assert problems.runner_problems["note"].detail == "the notes are out of reach"
    fleet.inside.observe_all_up()
    reason = reason_of(problems, rollout, "p1", fleet.inside.clock.now())
    assert (reason.code, reason.params["runner"]) == ("runner-down", "note")
    fleet.notes.is_down = False
    fleet.inside.clock.advance(runners.PROBLEM_CHECK_S)
    await until(fleet.inside, lambda: "note" not in problems.runner_problems)
    watching.cancel()


async def test_preview_waits_for_no_unneeded_runner(fleet: Fleet) -> None:
    watching = asyncio.create_task(fleet.runners.watch())
    await loop_iterations(20)
    assert fleet.inside.state.index.runner_problems["note"].is_unneeded
    fleet.inside.observe_all_up()
    file = {"file": "plan.yml", "text": NOTED}
    shown = await fleet.inside.request("olga", "post", "/v1/plans/preview", file)
    assert [each["cannot_start"] for each in shown["targets"] if each["node"] == "p1"] == [None]
    assert fleet.inside.state.index.runner_problems["note"].is_unneeded, "only the preview leaves it out"
    watching.cancel()


async def test_part_out_of_reach_stops_only_its_nodes(fleet: Fleet) -> None:
    fleet.notes.silent = {"p1"}
    index, clock = fleet.inside.state.index, fleet.inside.clock
    watching = asyncio.create_task(fleet.runners.watch())
    rollout = await fleet.inside.start(text=NOTED)
    fleet.inside.observe_all_up()
    await loop_iterations(20)
    assert list(index.runner_problems) == ["note@p1"]
    reason = reason_of(index, rollout, "p1", clock.now())
    assert (reason.code, reason.params["runner"]) == ("runner-down", "note@p1")
    assert reason_of(index, rollout, "p2", clock.now()).code != "runner-down"
    starting = asyncio.create_task(fleet.runners.start(request(fleet.runners.run_id_for("r1", "p1", "note"))))
    await loop_iterations(20)
    shown = queued_run_reason(index, "p1", fleet.runners.statuses)
    assert shown is not None
    assert shown.params["runner"] == "note@p1"
    fleet.notes.silent.clear()
    clock.advance(runners.PROBLEM_CHECK_S)
    await until(fleet.inside, lambda: not index.runner_problems and starting.done())
    watching.cancel()


async def test_state_before_is_recorded_before_run(fleet: Fleet) -> None:
    rollout = await fleet.inside.start(text=NOTED)
    await fleet.inside.isolate(rollout, "p1")
    fleet.notes.text["p1"] = "old"
    fleet.notes.is_down = True
    isolator = FakeIsolator()
    isolator.isolated.add("p1")
    async with run_driver(fleet.inside, rollout, fleet.runners, {"command": isolator}):
        await loop_iterations(50)
        assert await fleet.runs(rollout) == [], "nothing is begun while the state cannot be read"
        fleet.notes.is_down = False
        fleet.inside.clock.advance(runners.RETRY_S[-1])
        await until(fleet.inside, lambda: fleet.notes.applied)
        await loop_iterations(50)
    (run,) = await fleet.runs(rollout)
    assert (run.state, json.loads(run.prior)) == (StepState.OK, {"text": "old"})
    (applied,) = fleet.notes.applied
    assert (applied.kind, applied.params, applied.previous) == ("note", {"text": "p1 is new"}, "")
    assert fleet.notes.text["p1"] == "p1 is new"


async def test_state_too_large_begins_nothing(fleet: Fleet) -> None:
    rollout = await fleet.inside.start(text=NOTED)
    await fleet.inside.isolate(rollout, "p1")
    fleet.notes.text["p1"] = "x" * MAX_PREVIOUS_BYTES
    isolator = FakeIsolator()
    isolator.isolated.add("p1")
    async with run_driver(fleet.inside, rollout, fleet.runners, {"command": isolator}):
        await until(
            fleet.inside, lambda: fleet.inside.state.index.target(rollout, "p1").phase is Phase.FAILED
        )
    (run,) = await fleet.runs(rollout)
    assert (run.code, run.handle, run.prior) == (FailureCode.NEVER_STARTED, "", None)
    assert "over 65536 bytes" in run.text
    assert not fleet.notes.applied


async def test_bad_change_is_undone_by_what_was_before(fleet: Fleet) -> None:
    text = NOTED.replace("{{ node.name }} is new", "bad").replace(
        "  gates:", "  on_failure: rollback-node\n  gates:"
    )
    fleet.notes.text["p1"] = "old"
    rollout = await fleet.inside.start(text=text)
    inside = fleet.inside
    isolator = FakeIsolator()
    isolator.isolated.add("p1")
    await inside.isolate(rollout, "p1")
    async with run_driver(inside, rollout, fleet.runners, {"command": isolator}):
        await until(inside, lambda: inside.state.index.target(rollout, "p1").phase is Phase.FAILED)
    assert fleet.notes.text["p1"] == "bad"
    assert fleet.notes.cleaned == ["p1"]
    assert not inside.run_host.fences, "no playbook left anything"
    await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/rollback", {"reason": "bad"})
    async with run_driver(inside, rollout, fleet.runners, {"command": isolator}):
        await until(inside, lambda: fleet.notes.text["p1"] == "old")
    assert [request.previous for request in fleet.notes.applied] == ["", '{"text": "old"}']


async def test_change_that_never_began_leaves_nothing_to_undo(fleet: Fleet) -> None:
    index = fleet.inside.state.index
    rollout = await fleet.inside.start(text=NOTED)
    assert [stage.undoes for stage in index.rollout(rollout).plan.rollback] == ["run.configure"]


@pytest.mark.parametrize(
    ("maintain", "message"),
    [
        ("{note: {text: a}, playbook: site.yml}", "an item has one kind"),
        ("{note: {text: a}, vars: {b: 1}}", "a change of the kind note takes no variables"),
        ("{note: {}}", "`text` is missing"),
        ("{final-note: {text: a}}", "no item applies to 4 of 4 nodes"),
        ("{timeout: 1m}", "the item names no kind"),
    ],
)
async def test_change_that_cannot_be_is_refused(fleet: Fleet, maintain: str, message: str) -> None:
    text = NOTED.replace("{note: {text: '{{ node.name }} is new'}}", maintain)
    with pytest.raises(ApiError) as refused:
        await fleet.inside.submit(text=text)
    assert message in str(refused.value)


async def test_change_that_cannot_be_undone_has_no_rollback(fleet: Fleet) -> None:
    text = NOTED.replace("maintain: {note", "on_failure: rollback-node\n  maintain: {final-note")
    with pytest.raises(ApiError, match="the plan has no rollback"):
        await fleet.inside.submit(text=text)
