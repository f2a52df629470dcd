"""Who joins the outage of a node, and who is waited for, by the scheduler's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.facts.dry_runs import DryRunResult
from machines.facts.projection import Projection
from machines.model.actions import Revert, Transition, Wait
from machines.model.decision import Admit, RollBack
from machines.model.events import FreezeStarted, HoldTaken, NodeOrdered, RolloutCancelled, RolloutPaused
from machines.model.limits import Limits, PoolRule
from machines.model.plan import Capability, MaintainStage, StepDef
from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold, NodeOrder, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import OutageProgress, Train, TrainRemoved, TrainStored
from machines.model.windows import Freeze, Window
from machines.rules.trains import next_joiner, outage_reason, turn_blocker
from machines.scheduler.decide import decide
from machines.states import Outcome, Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.outage import Outage, Peer
from machines.workflow.situation import Situation
from tests.machines.builders import (
    ALICE,
    T0,
    index_of,
    nodes_of,
    observed_up,
    plan_of,
    reason_of,
    submit,
    transition,
)

WAIT_S = 3600.0

NODE = "a1"

CORDON = StepDef("isolate.0.kubernetes", "kubernetes")

DAY_MINUTES = 24 * 60


def window(opens_in_s: float, length_s: float) -> Window:
    """Return a daily window that opens so long after T0."""
    minute = int((T0 + opens_in_s) % 86_400 // 60)
    end = int((minute + length_s // 60) % DAY_MINUTES)
    return Window(frozenset(range(7)), minute, end, ZoneInfo("UTC"))


def train_of_two(limits: Limits | None = None, **second: Any) -> Projection:
    """Return a train of two rollouts over one node, and one more of its pool."""
    index = index_of(nodes_of({"a": [NODE], "b": ["b1"]}, rack={NODE: "r1", "b1": "r1"}), limits)
    submit(index, "R1", isolate=(CORDON,))
    submit(index, "R2", isolate=(CORDON,), **second)
    index.apply(TrainStored(train(), ALICE, "week", T0))
    return index


def train() -> Train:
    return Train("t", ("R1", "R2"), WAIT_S, ALICE, T0, {"R1": "alice", "R2": "alice"})


def pass_checks(index: Projection, at: float = T0) -> None:
    """Let the first rollout change the node, which then waits isolated."""
    for trigger in (Trigger.ADMITTED, Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, NODE, trigger, rollout="R1", at=at, isolated=True)
    index.record_outage("R1", NODE, OutageProgress(1, has_passed=True, waits=True))


def admitted(index: Projection, at: float = T0) -> list[str]:
    """Return the rollouts that begin on the node now."""
    index.record_observations(observed_up((NODE, "b1"), at), at)
    return [each.rollout for each in decide(index, at).of(Admit) if each.node == NODE]


def joiner(index: Projection, at: float = T0) -> str:
    """Return the rollout that the node stays isolated for."""
    return next_joiner(index, index.target("R1", NODE), at)


def test_second_joins_node_that_passed_checks() -> None:
    index = train_of_two()
    pass_checks(index)
    assert (joiner(index), admitted(index)) == ("R2", ["R2"])


def test_second_joins_isolation_without_dry_run() -> None:
    index = index_of(nodes_of({"a": [NODE], "b": ["b1"]}))
    for rollout in ("R1", "R2"):
        submit(index, rollout, isolate=(replace(CORDON, capabilities=frozenset({Capability.DRY_RUN})),))
    index.apply(TrainStored(train(), ALICE, "week", T0))
    blocked = DryRunResult("R2", NODE, False, T0, "set to maint", is_permanent=True)
    index.record_dry_run(blocked)
    pass_checks(index)
    assert (joiner(index), admitted(index)) == ("R2", ["R2"])
    index.forget_dry_run("R2", NODE)
    assert admitted(index) == ["R2"]


def test_second_waits_for_first_that_may_start() -> None:
    index = train_of_two()
    blocker = turn_blocker(index, index.target("R2", NODE), T0)
    assert blocker is not None
    assert blocker.params == {"rollout": "R1", "train": "t"}
    assert admitted(index) == ["R1"]


def test_window_that_closed_meanwhile_lets_node_return() -> None:
    index = train_of_two(windows=(window(0, 1800),))
    pass_checks(index)
    assert joiner(index) == "R2"
    later = T0 + 2000
    assert (joiner(index, later), admitted(index, later)) == ("", [])


@pytest.mark.parametrize(("opens_in_s", "expected"), [(1800.0, "R2"), (7200.0, "")])
def test_node_waits_for_window_that_opens_soon(opens_in_s: float, expected: str) -> None:
    index = train_of_two(windows=(window(opens_in_s, 7200),))
    pass_checks(index)
    assert (joiner(index), admitted(index)) == (expected, [])


def test_node_waits_no_longer_than_train_says() -> None:
    index = train_of_two(windows=(window(5400, 7200),))
    pass_checks(index)
    # It opens within an hour of now, and not within an hour of the first checks.
    assert joiner(index, T0 + 2400) == ""


def test_second_waits_for_window_of_first() -> None:
    index = index_of(nodes_of({"a": [NODE], "b": ["b1"]}))
    submit(index, "R1", isolate=(CORDON,), windows=(window(1800, 7200),))
    submit(index, "R2", isolate=(CORDON,))
    index.apply(TrainStored(train(), ALICE, "week", T0))
    assert admitted(index) == []
    index.record_train_wait("R2", NODE, T0)
    assert admitted(index, T0 + 60) == []
    assert admitted(index, T0 + 1860) == ["R1"]


def test_far_window_of_first_is_not_waited_for() -> None:
    index = index_of(nodes_of({"a": [NODE], "b": ["b1"]}))
    submit(index, "R1", isolate=(CORDON,), windows=(window(7200, 7200),))
    submit(index, "R2", isolate=(CORDON,))
    index.apply(TrainStored(train(), ALICE, "week", T0))
    assert admitted(index) == ["R2"]


def stops() -> Mapping[str, Any]:
    """Return what keeps the second rollout from the node, by name."""
    hold = Hold(NODE, "person", "h", ALICE, "broken fan", T0)
    return {
        "hold": HoldTaken(hold),
        "freeze": FreezeStarted(Freeze("f", "all", "party", "alice", T0)),
        "pause": RolloutPaused("R2", ALICE, "wait", T0),
        "cancel": RolloutCancelled("R2", ALICE, "no", T0),
        "removal of the train": TrainRemoved("t", ALICE, "no", T0),
    }


@pytest.mark.parametrize("stop", stops())
def test_stop_in_middle_lets_second_begin_nothing(stop: str) -> None:
    index = train_of_two()
    pass_checks(index)
    index.apply(stops()[stop])
    assert (joiner(index), admitted(index)) == ("", [])


def test_second_does_not_join_node_at_work() -> None:
    index = train_of_two()
    pass_checks(index)
    index.record_outage("R1", NODE, OutageProgress(1, has_passed=False, waits=False))
    assert admitted(index) == []


def test_second_needs_slot_of_pool_that_only_it_has() -> None:
    limits = Limits(pools={"team": PoolRule()})
    index = train_of_two(limits, pool_keys=("rack",))
    transition(index, "b1", Trigger.ADMITTED, rollout="R1")
    pass_checks(index)
    assert (joiner(index), admitted(index)) == ("", [])


@pytest.mark.parametrize(("judged", "expected"), [({}, []), ({"R2.1": "broken"}, []), ({"R2.1": ""}, ["R3"])])
def test_third_joins_once_second_is_judged(judged: Mapping[str, str], expected: list[str]) -> None:
    index = train_of_two()
    submit(index, "R3", isolate=(CORDON,))
    names = ("R1", "R2", "R3")
    index.apply(TrainStored(Train("t", names, WAIT_S, ALICE, T0, dict.fromkeys(names, "a")), ALICE, "", T0))
    pass_checks(index)
    transition(index, NODE, Trigger.ADMITTED, rollout="R2", at=T0 + 1, joins_outage=True)
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, NODE, trigger, rollout="R2", at=T0 + 2, isolated=True)
    index.record_outage("R2", NODE, OutageProgress(1, has_passed=True, waits=True))
    index.record_outage("R1", NODE, OutageProgress(1, has_passed=True, waits=True, judged=judged))
    assert admitted(index, T0 + 3) == expected


def test_joining_takes_no_second_slot() -> None:
    limits = Limits(pools={"rack": PoolRule()}, max_parallel=1)
    index = train_of_two(limits)
    pass_checks(index)
    assert admitted(index) == ["R2"]


def test_later_change_is_rolled_back_first() -> None:
    index = train_of_two(rollback=(MaintainStage("rollback", "undo.yml"),))
    pass_checks(index)
    transition(index, NODE, Trigger.ADMITTED, rollout="R2", at=T0 + 1, joins_outage=True)
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, NODE, trigger, rollout="R2", at=T0 + 2)
    for rollout in ("R2", "R1"):
        transition(index, NODE, Trigger.VERIFIED, Outcome.CHANGED, rollout=rollout, at=T0 + 3, isolated=False)
    for rollout in ("R1", "R2"):
        index.apply(NodeOrdered(rollout, NODE, NodeOrder.ROLLBACK, ALICE, "as it was", T0 + 10))
    assert [each.rollout for each in decide(index, T0 + 11).of(RollBack)] == ["R2"]
    reason = reason_of(index, "R1", NODE, T0 + 11)
    assert (reason.code, reason.params) == (ReasonCode.TRAIN, {"rollout": "R2"})
    transition(index, NODE, Trigger.ROLLBACK_ORDERED, rollout="R2", at=T0 + 11, rolling_back=True)
    assert decide(index, T0 + 12).of(RollBack) == ()


@pytest.mark.parametrize(("is_returning", "expected"), [(False, Wait), (True, Revert)])
def test_return_that_began_waits_for_nobody(is_returning: bool, expected: type[object]) -> None:
    plan = plan_of(isolate=(CORDON,), verify=())
    moves = [(StepAction.APPLY, StepState.OK)] + [(StepAction.REVERT, StepState.INTENDED)] * is_returning
    records = [StepRecord("R1", NODE, 1, CORDON.name, action, 1, state, T0, T0) for action, state in moves]
    target = Target(
        "R1", NODE, "a", (), "fleet", 0, phase=Phase.VERIFYING, attempt=1, isolated=True, since=T0
    )
    outage = Outage(joiner="R2")
    action = next_action(Situation(plan, target, records, T0 + 9.0, elapsed_s=9.0, outage=outage))
    assert isinstance(action, expected)


@pytest.mark.parametrize(
    ("judged", "expected"),
    [({}, Wait), ({"R1.2": ""}, Revert), ({"R1.2": "R2: it broke"}, Transition)],
)
def test_rollback_hears_rollouts_that_left_its_outage(
    judged: Mapping[str, str], expected: type[object]
) -> None:
    """R2 left the outage; R1 could not return the node, and was rolled back in it."""
    plan = plan_of(isolate=(CORDON,), verify=())
    others = Target("R2", NODE, "a", (), "fleet", 0, phase=Phase.VERIFYING, attempt=1, since=T0)
    own = replace(others, rollout="R1", attempt=2, isolated=True, admitted_at=T0 + 1.0)
    records = [
        StepRecord("R1", NODE, 2, CORDON.name, StepAction.APPLY, 1, StepState.OK, T0 + 2.0, T0 + 2.0),
    ]
    progress = OutageProgress(1, has_passed=True, has_served=True, waits=True, judged=judged)
    outage = Outage((Peer(others, progress, is_later=False),))
    action = next_action(Situation(plan, own, records, T0 + 9.0, elapsed_s=9.0, outage=outage))
    assert isinstance(action, expected)


def test_waiting_node_names_rollout_it_waits_for() -> None:
    index = train_of_two()
    pass_checks(index)
    reason = outage_reason(index, index.target("R1", NODE), T0)
    assert reason is not None
    assert reason.params == {"rollout": "R2", "train": "t", "shares": True}
