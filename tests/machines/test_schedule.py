"""Scheduling: which nodes start when, and the reasons of the others."""

from __future__ import annotations

from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest

from machines.facts.projection import Projection
from machines.model.decision import AbortIsolation, Admit, CheckIfCurrent, EndRollout
from machines.model.events import (
    ChangeNeeded,
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    RolloutCancelled,
    RolloutDeleted,
    RolloutPaused,
    RolloutResumed,
)
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.node import Node
from machines.model.plan import GateName, VoteRequirement, WaveDef
from machines.model.windows import Freeze, Window
from machines.rules.waves import assign_waves
from machines.scheduler.decide import decide
from machines.scheduler.why import why
from machines.states import Outcome, Trigger
from rolloutd.texts.reason_text import describe
from tests.machines.builders import (
    ALICE,
    CANARY,
    CANARY_THEN_FLEET,
    T0,
    admit,
    fail,
    finish,
    index_of,
    nodes_of,
    observed_up,
    plan_of,
    reason_of,
    rollout_opened,
    submit,
    transition,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")})
EVERY_DAY = frozenset(range(7))
UTC = ZoneInfo("UTC")
# T0 is a Friday, 08:00 UTC.
MORNING = Window(EVERY_DAY, 7 * 60, 9 * 60, UTC)
EVENING = Window(EVERY_DAY, 20 * 60, 22 * 60, UTC)


def starts(index: Projection, now: float = T0) -> list[tuple[str, str]]:
    return [(start.rollout, start.node) for start in decide(index, now).of(Admit)]


def observe_up(index: Projection, now: float) -> None:
    index.record_observations(observed_up(index.nodes, now), now)


# -- order


def test_teams_take_turns_and_n2_comes_before_n10() -> None:
    nodes = [Node(name, labels={"team": team}) for name, team in (("n10", "a"), ("n2", "a"), ("n1", "b"))]
    placed = assign_waves([*nodes, Node("x")], plan_of(), {})
    assert [(node.name, wave, position) for node, wave, position in placed] == [
        ("n2", "fleet", 0),
        ("n1", "fleet", 1),
        ("x", "fleet", 2),
        ("n10", "fleet", 3),
    ]


def test_canaries_default_to_first_node_per_team() -> None:
    def canaries(waves: tuple[WaveDef, ...], named: dict[str, tuple[str, ...]]) -> list[str]:
        return [
            node.name
            for node, wave, _ in assign_waves(NODES, plan_of(waves=waves), named)
            if wave == "canary"
        ]

    from machines.model.selector import parse_selector

    chosen = (replace(CANARY, select=parse_selector("team=b")), *CANARY_THEN_FLEET[1:])
    assert canaries(CANARY_THEN_FLEET, {}) == ["n1", "n3"]
    assert canaries(CANARY_THEN_FLEET, {"a": ("n2",)}) == ["n2", "n3"]
    assert canaries(chosen, {"a": ("n2",)}) == ["n2", "n3", "n4"]
    assert canaries(chosen, {}) == ["n3", "n4"]


def test_earlier_rollout_first_and_node_never_twice() -> None:
    index = index_of(NODES)
    submit(index, "A")
    submit(index, "B")
    assert starts(index) == [("A", "n1"), ("A", "n3")]
    admit(index, "n1", rollout="A")
    assert reason_of(index, "B", "n1", T0).code == "other-rollout"
    finish(index, "n3", rollout="A")
    observe_up(index, T0)
    assert starts(index) == [("A", "n4")]


def test_unapproved_plan_does_not_block_later_plan() -> None:
    index = index_of(NODES)
    submit(index, "A", opened=False, gates={})
    submit(index, "B")
    assert starts(index) == [("B", "n1"), ("B", "n3")]


# -- limits


def test_max_parallel_of_fleet_rollout_and_wave() -> None:
    index = index_of(NODES, Limits(max_parallel=1))
    submit(index)
    assert starts(index) == [("R", "n1")]
    admit(index, "n1")
    assert reason_of(index, "R", "n3", T0).code == "max-parallel"
    for changed in ({"max_parallel": 1}, {"waves": (WaveDef("fleet", max_parallel=1),)}):
        index = index_of(NODES)
        submit(index, **changed)
        assert starts(index) == [("R", "n1")]


def test_rollout_without_limits_starts_all() -> None:
    index = index_of(NODES, Limits(pools={"team": PoolRule(Budget(9))}))
    submit(index)
    assert len(starts(index)) == 4


# -- time


def test_a_node_starts_only_in_a_window_that_it_fits() -> None:
    index = index_of(NODES)
    submit(index, windows=(MORNING,), expected_s=900.0)
    assert len(starts(index)) == 2
    late = T0 + 50 * 60.0
    observe_up(index, late)
    assert reason_of(index, "R", "n1", late).code == "window-too-short"
    assert decide(index, late).wake_at == T0 + 3600.0
    closed = T0 + 3600.0
    reason = reason_of(index, "R", "n1", closed)
    assert reason.code == "outside-window"
    assert decide(index, closed).wake_at == T0 + 23 * 3600.0
    assert decide(index, closed).reasons["R"] == reason


def test_a_teams_windows_tighten_the_plans() -> None:
    index = index_of(NODES, Limits(team_windows={"a": (EVENING,)}))
    submit(index, windows=(MORNING, EVENING))
    assert starts(index) == [("R", "n3")]
    assert "team a's windows are closed" in describe(reason_of(index, "R", "n1", T0))


@pytest.mark.parametrize("owner", ["plan", "team"])
def test_how_long_a_node_takes_is_learned_from_this_rollout(owner: str) -> None:
    index = index_of(NODES, Limits(team_windows=dict.fromkeys("ab", (MORNING,)) if owner == "team" else {}))
    submit(index, windows=(MORNING,) if owner == "plan" else (), expected_s=50 * 60.0)
    now = T0 + 20 * 60.0
    observe_up(index, now)
    decision = decide(index, now)
    index.record_backoffs(decision.backoffs)
    assert reason_of(index, "R", "n1", now).code == "window-too-short"
    admit(index, "n3", at=T0)
    transition(index, "n3", Trigger.ISOLATED, at=T0)
    transition(index, "n3", Trigger.MAINTAINED, at=T0)
    transition(index, "n3", Trigger.VERIFIED, Outcome.CHANGED, at=T0 + 60.0)
    assert index.expected_s("R") == 60.0
    assert starts(index, now) == [("R", "n1"), ("R", "n4")]


def test_a_freeze_stops_starts_and_nothing_else() -> None:
    index = index_of(NODES)
    submit(index)
    admit(index, "n3")
    index.apply(FreezeStarted(Freeze("f1", "all", "black friday", "alice", T0, T0 + 50.0)))
    decision = decide(index, T0)
    assert (decision.of(Admit), decision.of(AbortIsolation), decision.wake_at) == ((), (), T0 + 50.0)
    assert "black friday" in describe(reason_of(index, "R", "n1", T0))
    assert starts(index, T0 + 50.0) == [("R", "n1")]
    index.apply(FreezeLifted("f1", ALICE, T0))
    for scope, free in (("team/a", []), ("team/b", [("R", "n1")])):
        index.apply(FreezeStarted(Freeze("f2", scope, "tests", "alice", T0)))
        assert starts(index, T0 + 51.0) == free
        index.apply(FreezeLifted("f2", ALICE, T0))


def test_aborted_node_retried_after_others() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3",)}))
    submit(index)
    admit(index, "n1")
    admit(index, "n3")
    transition(index, "n1", Trigger.ISOLATION_ABORTED, not_before=T0 + 30.0, text="busy: 3 connections")
    transition(index, "n3", Trigger.ISOLATION_ABORTED, not_before=T0 + 40.0)
    assert starts(index) == [("R", "n2")]
    assert "busy: 3 connections" in describe(reason_of(index, "R", "n1", T0))
    assert decide(index, T0).wake_at == T0 + 40.0
    assert starts(index, T0 + 40.0) == [("R", "n1"), ("R", "n3")]


# -- people


def test_pause_and_resume() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(RolloutPaused("R", ALICE, "lunch", T0))
    assert decide(index, T0).of(Admit) == ()
    assert describe(decide(index, T0).reasons["R"]) == "paused by alice: lunch"
    index.apply(RolloutResumed("R", ALICE, "back", T0))
    assert len(starts(index)) == 2


def test_cancelled_rollout_starts_and_frees_nothing() -> None:
    index = index_of(NODES)
    submit(index, "A")
    admit(index, "n1", rollout="A")
    index.apply(RolloutCancelled("A", ALICE, "wrong plan", T0))
    assert decide(index, T0).of(Admit) == ()
    submit(index, "B")
    assert starts(index) == [("B", "n3")]
    assert reason_of(index, "A", "n2", T0).code == "cancelled"


def test_deleted_rollout_leaves_nothing() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(RolloutCancelled("R", ALICE, "wrong plan", T0))
    index.apply(RolloutDeleted("R", ALICE, T0))
    assert dict(index.rollouts) == {}
    assert index.snapshot().targets == ()
    assert decide(index, T0).reasons == {}


# -- the rest


def maybe_current_index() -> Projection:
    """Return an index with an approved rollout whose nodes may all be current."""
    index = index_of(NODES)
    event = rollout_opened("R", plan_of(), index, T0)
    index.apply(replace(event, targets=tuple(replace(t, maybe_current=True) for t in event.targets)))
    index.apply(GateOpened("R", GateName.START, "", T0))
    return index


def checked(index: Projection) -> list[str]:
    return [check.node for check in decide(index, T0).of(CheckIfCurrent)]


def test_maybe_current_nodes_checked_first() -> None:
    index = maybe_current_index()
    assert checked(index) == ["n1", "n3", "n2", "n4"]
    assert reason_of(index, "R", "n2", T0).code == "checking-compliance"
    index.apply(ChangeNeeded("R", "n1", T0, "differs"))
    transition(index, "n3", Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
    assert starts(index) == [("R", "n1")]
    assert checked(index) == ["n2", "n4"]


def test_current_checks_take_no_slot() -> None:
    index = maybe_current_index()
    index.apply(ChangeNeeded("R", "n1", T0, "differs"))
    admit(index, "n1")
    assert starts(index) == []
    assert checked(index) == ["n3", "n2", "n4"], "n2 is in the full pool of n1"
    index.apply(ChangeNeeded("R", "n2", T0, "differs"))
    assert reason_of(index, "R", "n2", T0).code == "pool-full"
    assert starts(index) == []


def test_current_checks_obey_freezes() -> None:
    index = maybe_current_index()
    index.apply(FreezeStarted(Freeze("F", "team/a", "alice", "a holiday", T0)))
    assert checked(index) == ["n3", "n4"]


def test_observe_only_explains_and_does_nothing() -> None:
    index = index_of(NODES, Limits(observe_only=True))
    submit(index)
    decision = decide(index, T0)
    assert (decision.of(Admit), decision.of(CheckIfCurrent), decision.of(AbortIsolation)) == ((), (), ())
    assert reason_of(index, "R", "n1", T0).code == "observe-only"
    admit(index, "n1")
    assert reason_of(index, "R", "n2", T0).code == "pool-full"


def test_a_rollout_ends_when_all_its_nodes_are_done() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index)
    assert decide(index, T0).of(EndRollout) == ()
    finish(index, "n1")
    assert decide(index, T0).of(EndRollout) == (EndRollout("R"),)


def test_an_empty_canary_wave_still_asks_its_gate() -> None:
    index = index_of(NODES)
    from machines.model.selector import parse_selector

    gates = {GateName.START: VoteRequirement(), GateName.CONTINUE: VoteRequirement(owner=1)}
    submit(
        index,
        waves=(replace(CANARY, select=parse_selector("canary=true")), *CANARY_THEN_FLEET[1:]),
        gates=gates,
    )
    assert reason_of(index, "R", "n1", T0).code == "gate-continue"
    vote(index, GateName.CONTINUE, wave="canary")
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0))
    assert len(starts(index)) == 2


def test_deciding_changes_nothing() -> None:
    index = index_of(NODES)
    submit(index)
    before = index.snapshot()
    assert decide(index, T0) == decide(index, T0)
    assert index.snapshot() == before


def test_explanation_names_next_node() -> None:
    index = index_of(NODES)
    submit(index)
    assert reason_of(index, "R", "n1", T0).code == "starting"
    reason = reason_of(index, "R", "n2", T0)
    assert (reason.code, describe(reason)) == ("queued", "n2 is queued: n1 goes first")
    admit(index, "n1")
    assert why(index, index.target("R", "n1"), T0) is None
    fail(index, "n1", "no route to host")
    assert describe(reason_of(index, "R", "n1", T0)) == "n1 failed in run.configure: no route to host"
    reason = why(index, index.rollout("R"), T0)
    assert reason is not None
    assert reason.code == "node-failed"
