"""The comparison with canaries, and the handover: what changed, who decided, what waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from machines.model.events import GateOpened, StepRecorded
from machines.model.plan import GateName
from machines.model.step_record import StepAction
from machines.model.timefmt import format_rfc3339
from machines.states import Outcome, Trigger
from rolloutd.control.response_text import describe_change
from rolloutd.ports import Ok
from tests.contracts.fakes.runner import FakeRun
from tests.rolloutd.control_environment import ControlEnvironment, control_environment


async def finish_after(
    inside: ControlEnvironment, rollout: str, node: str, seconds: float, *tasks: str
) -> None:
    """Bring a node to done so many seconds after its start; its run changed these tasks."""
    await inside.isolate(rollout, node)
    inside.clock.advance(seconds)
    handle = f"run-{node}"
    run = FakeRun(request=None, deadline=0.0, result=Ok("done"))  # type: ignore[arg-type]
    for task in tasks:
        run.add_event("changed", task, 100.0)
    inside.run_host.runs[handle] = run
    record = inside.step(rollout, node, "run.configure", StepAction.RUN, handle=handle)
    await inside.commit(StepRecorded(record))
    await inside.transition(rollout, node, Trigger.MAINTAINED)
    undone = inside.step(rollout, node, "isolate.0.command", StepAction.REVERT)
    await inside.commit(StepRecorded(undone, isolated=False))
    await inside.transition(rollout, node, Trigger.VERIFIED, outcome=Outcome.CHANGED)


async def start_after_canaries(inside: ControlEnvironment) -> str:
    """Return a rollout whose canaries p1 and s1 took about 30 s and changed the same task."""
    rollout = await inside.start()
    for node in ("p1", "s1"):
        await finish_after(inside, rollout, node, 30, "install kernel")
    inside.clock.advance(601)
    inside.observe_all_up()
    for who in ("olga", "paul", "sara"):
        await inside.vote(who, rollout, "continue")
    await inside.commit(GateOpened(rollout, GateName.CONTINUE, "canary", inside.clock.now()))
    return rollout


async def test_outlier_is_named_with_its_time_and_tasks(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await start_after_canaries(inside)
        await finish_after(inside, rollout, "p2", 30, "install kernel")
        await finish_after(inside, rollout, "s2", 300, "restart docker")
        found = await inside.request("olga", "get", f"/v1/rollouts/{rollout}/comparison")
        slow, usual = found["nodes"]
        assert [each["node"] for each in found["canaries"]] == ["p1", "s1"]
        assert 30 <= found["low_s"] <= found["high_s"] < 40
        assert (slow["node"], slow["time"]) == ("s2", "slower")
        assert (slow["extra_tasks"], slow["missing_tasks"]) == (["restart docker"], ["install kernel"])
        assert (usual["node"], usual["time"], usual["extra_tasks"]) == ("p2", "usual", [])


async def test_node_in_flight_is_compared_by_its_time_so_far(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await start_after_canaries(inside)
        await inside.isolate(rollout, "p2")
        path = f"/v1/rollouts/{rollout}/comparison"
        # It is not faster only because it has just begun, and lacks no task yet.
        (young,) = (await inside.request("olga", "get", path))["nodes"]
        assert (young["time"], young["missing_tasks"]) == ("usual", [])
        inside.clock.advance(100)
        (late,) = (await inside.request("olga", "get", path))["nodes"]
        assert late["time"] == "slower"


async def hand_over(inside: ControlEnvironment, since: float) -> Any:
    text = format_rfc3339(since).replace("+00:00", "Z")
    return await inside.request("paul", "get", "/v1/handover", {"since": text})


async def test_handover_shows_changes_decisions_and_what_waits(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        looked = inside.clock.now() + 1
        inside.clock.advance(2)
        await inside.request("oscar", "post", f"/v1/rollouts/{rollout}/pause", {"reason": "lunch"})
        await inside.request("oscar", "post", f"/v1/rollouts/{rollout}/resume", {"reason": "back"})
        await inside.fail(rollout, "s1")
        found = await hand_over(inside, looked)
        (changed,) = found["rollouts"]
        assert (changed["rollout"], changed["opened"], changed["changed"]) == (rollout, False, 0)
        assert changed["failed"] == ["s1"]
        assert [each["gate"] for each in changed["gates"]] == ["proceed"]
        assert changed["reason"]["code"] == "node-failed"
        decided = [(each["entry"]["actor"]["name"], each["entry"]["event"]) for each in found["decisions"]]
        assert decided == [("oscar", "RolloutPaused"), ("oscar", "RolloutResumed")]
        everything = await hand_over(inside, 0.0)
        assert everything["rollouts"][0]["changed"] == 1
        assert [each["entry"]["event"] for each in everything["decisions"]][:2] == [
            "RolloutOpened",
            "VoteCast",
        ]


async def test_handover_has_rollouts_closed_since_then_only(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.submit()
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})
        at = inside.clock.now()
        (closed,) = (await hand_over(inside, at))["rollouts"]
        assert (closed["state"], closed["ended"], closed["gates"]) == ("cancelled", True, [])
        assert describe_change(closed) == "opened, cancelled by olga: wrong"
        assert (await hand_over(inside, at + 1))["rollouts"] == []
