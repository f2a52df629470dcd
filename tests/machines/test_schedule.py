"""What starts when, and what is said of the rest."""

from __future__ import annotations

from dataclasses import replace
from zoneinfo import ZoneInfo

from machines.decision import Look
from machines.events import (
    Frozen,
    GateOpened,
    LookedCurrent,
    RolloutCancelled,
    RolloutDeleted,
    RolloutPaused,
    RolloutResumed,
    Unfrozen,
)
from machines.limits import Budget, Limits, PoolRule
from machines.node import Node
from machines.plan import GateName, Need, WaveSpec
from machines.projection import Projection
from machines.schedule import decide, rollout_reason, why
from machines.states import Outcome, Trigger
from machines.waves import assign
from machines.windows import Freeze, Window
from tests.machines.worlds import (
    ALICE,
    CANARY,
    CANARY_THEN_FLEET,
    T0,
    admit,
    fail,
    finish,
    index_of,
    move,
    nodes_of,
    opening,
    plan_of,
    seen_up,
    submit,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")})
EVERY_DAY = frozenset(range(7))
UTC = ZoneInfo("UTC")
# T0 is a Friday, 08:00 UTC.
MORNING = Window(EVERY_DAY, 7 * 60, 9 * 60, UTC)
EVENING = Window(EVERY_DAY, 20 * 60, 22 * 60, UTC)


def starts(index: Projection, now: float = T0) -> list[tuple[str, str]]:
    return [(start.rollout, start.node) for start in decide(index, now).starts]


def see(index: Projection, now: float) -> None:
    index.observed(seen_up(index.nodes, now), now)


# -- order


def test_teams_take_turns_and_n2_comes_before_n10() -> None:
    nodes = [Node(name, labels={"team": team}) for name, team in (("n10", "a"), ("n2", "a"), ("n1", "b"))]
    placed = assign([*nodes, Node("x")], plan_of(), {})
    assert [(node.name, wave, position) for node, wave, position in placed] == [
        ("n2", "fleet", 0),
        ("n1", "fleet", 1),
        ("x", "fleet", 2),
        ("n10", "fleet", 3),
    ]


def test_canaries_are_the_plans_and_the_teams_else_each_teams_first() -> None:
    def canaries(waves: tuple[WaveSpec, ...], named: dict[str, tuple[str, ...]]) -> list[str]:
        return [node.name for node, wave, _ in assign(NODES, plan_of(waves=waves), named) if wave == "canary"]

    from machines.selector import parse

    chosen = (replace(CANARY, select=parse("team=b")), *CANARY_THEN_FLEET[1:])
    assert canaries(CANARY_THEN_FLEET, {}) == ["n1", "n3"]
    assert canaries(CANARY_THEN_FLEET, {"a": ("n2",)}) == ["n2", "n3"]
    assert canaries(chosen, {"a": ("n2",)}) == ["n2", "n3", "n4"]
    assert canaries(chosen, {}) == ["n3", "n4"]


def test_the_first_submitted_goes_first_and_a_node_is_never_in_two() -> None:
    index = index_of(NODES)
    submit(index, "A")
    submit(index, "B")
    assert starts(index) == [("A", "n1"), ("A", "n3")]
    admit(index, "n1", rollout="A")
    assert why(index, "B", "n1", T0).code == "other-rollout"
    finish(index, "n3", rollout="A")
    see(index, T0)
    assert starts(index) == [("A", "n4")]


def test_a_later_plan_does_not_wait_for_one_that_nobody_approved() -> None:
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
    assert why(index, "R", "n3", T0).code == "max-parallel"
    for changed in ({"max_parallel": 1}, {"waves": (WaveSpec("fleet", max_parallel=1),)}):
        index = index_of(NODES)
        submit(index, **changed)
        assert starts(index) == [("R", "n1")]


def test_a_rollout_of_nodes_without_limits_starts_all_at_once() -> None:
    index = index_of(NODES, Limits(pools={"team": PoolRule(Budget(9))}))
    submit(index)
    assert len(starts(index)) == 4


# -- time


def test_a_node_starts_only_in_a_window_that_it_fits() -> None:
    index = index_of(NODES)
    submit(index, windows=(MORNING,), expected_s=900.0)
    assert len(starts(index)) == 2
    late = T0 + 50 * 60.0
    see(index, late)
    assert why(index, "R", "n1", late).code == "window-too-short"
    assert decide(index, late).wake_at == T0 + 3600.0
    closed = T0 + 3600.0
    reason = why(index, "R", "n1", closed)
    assert reason.code == "outside-window"
    assert decide(index, closed).wake_at == T0 + 23 * 3600.0
    assert decide(index, closed).reasons["R"] == reason


def test_a_teams_windows_tighten_the_plans() -> None:
    index = index_of(NODES, Limits(team_windows={"a": (EVENING,)}))
    submit(index, windows=(MORNING, EVENING))
    assert starts(index) == [("R", "n3")]
    assert "team a's windows are closed" in why(index, "R", "n1", T0).text


def test_how_long_a_node_takes_is_learned_from_this_rollout() -> None:
    index = index_of(NODES)
    submit(index, windows=(MORNING,), expected_s=50 * 60.0)
    now = T0 + 20 * 60.0
    see(index, now)
    assert why(index, "R", "n1", now).code == "window-too-short"
    admit(index, "n3", at=T0)
    move(index, "n3", Trigger.ISOLATED, at=T0)
    move(index, "n3", Trigger.MAINTAINED, at=T0)
    move(index, "n3", Trigger.VERIFIED, Outcome.CHANGED, at=T0 + 60.0)
    assert index.expected_s("R") == 60.0
    assert starts(index, now) == [("R", "n1"), ("R", "n4")]


def test_a_freeze_stops_starts_and_nothing_else() -> None:
    index = index_of(NODES)
    submit(index)
    admit(index, "n3")
    index.apply(Frozen(Freeze("f1", "all", "black friday", "alice", T0, T0 + 50.0)))
    decision = decide(index, T0)
    assert (decision.starts, decision.put_backs, decision.wake_at) == ((), (), T0 + 50.0)
    assert "black friday" in why(index, "R", "n1", T0).text
    assert starts(index, T0 + 50.0) == [("R", "n1")]
    index.apply(Unfrozen("f1", ALICE, T0))
    for scope, free in (("team/a", []), ("team/b", [("R", "n1")])):
        index.apply(Frozen(Freeze("f2", scope, "tests", "alice", T0)))
        assert starts(index, T0 + 51.0) == free
        index.apply(Unfrozen("f2", ALICE, T0))


def test_a_node_that_was_put_back_is_tried_again_later_and_others_go_first() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3",)}))
    submit(index)
    admit(index, "n1")
    admit(index, "n3")
    move(index, "n1", Trigger.PUT_BACK, not_before=T0 + 30.0, text="busy: 3 connections")
    move(index, "n3", Trigger.PUT_BACK, not_before=T0 + 40.0)
    assert starts(index) == [("R", "n2")]
    assert "busy: 3 connections" in why(index, "R", "n1", T0).text
    assert decide(index, T0).wake_at == T0 + 40.0
    assert starts(index, T0 + 40.0) == [("R", "n1"), ("R", "n3")]


# -- people


def test_pause_and_resume() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(RolloutPaused("R", ALICE, "lunch", T0))
    assert decide(index, T0).starts == ()
    assert decide(index, T0).reasons["R"].text == "paused by alice: lunch"
    index.apply(RolloutResumed("R", ALICE, "back", T0))
    assert len(starts(index)) == 2


def test_a_cancelled_rollout_starts_nothing_and_frees_nothing() -> None:
    index = index_of(NODES)
    submit(index, "A")
    admit(index, "n1", rollout="A")
    index.apply(RolloutCancelled("A", ALICE, "wrong plan", T0))
    assert decide(index, T0).starts == ()
    submit(index, "B")
    assert starts(index) == [("B", "n3")]
    assert why(index, "A", "n2", T0).code == "cancelled"


def test_a_deleted_rollout_leaves_nothing_behind() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(RolloutCancelled("R", ALICE, "wrong plan", T0))
    index.apply(RolloutDeleted("R", ALICE, T0))
    assert dict(index.rollouts) == {}
    assert index.snapshot().targets == ()
    assert decide(index, T0).reasons == {}


# -- the rest


def test_nodes_that_may_be_current_are_looked_at_first() -> None:
    index = index_of(NODES)
    event = opening("R", plan_of(), index, T0)
    index.apply(replace(event, targets=tuple(replace(t, maybe_current=True) for t in event.targets)))
    index.apply(GateOpened("R", GateName.START, "", T0))
    assert decide(index, T0).looks == (Look("R", "n1"), Look("R", "n3"))
    index.apply(LookedCurrent("R", "n1", T0, "differs"))
    move(index, "n3", Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
    decision = decide(index, T0)
    assert [each.node for each in decision.starts] == ["n1"]
    assert decision.looks == (Look("R", "n4"),)


def test_observe_only_explains_and_does_nothing() -> None:
    index = index_of(NODES, Limits(observe_only=True))
    submit(index)
    decision = decide(index, T0)
    assert (decision.starts, decision.looks, decision.put_backs) == ((), (), ())
    assert why(index, "R", "n1", T0).code == "observe-only"
    admit(index, "n1")
    assert why(index, "R", "n2", T0).code == "pool-full"


def test_a_rollout_ends_when_all_its_nodes_are_done() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index)
    assert decide(index, T0).ends == ()
    finish(index, "n1")
    assert decide(index, T0).ends == ("R",)


def test_an_empty_canary_wave_still_asks_its_gate() -> None:
    index = index_of(NODES)
    from machines.selector import parse

    gates = {GateName.START: Need(), GateName.CONTINUE: Need(owner=1)}
    submit(index, waves=(replace(CANARY, select=parse("canary=true")), *CANARY_THEN_FLEET[1:]), gates=gates)
    assert why(index, "R", "n1", T0).code == "gate-continue"
    vote(index, GateName.CONTINUE, wave="canary")
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0))
    assert len(starts(index)) == 2


def test_deciding_changes_nothing() -> None:
    index = index_of(NODES)
    submit(index)
    before = index.snapshot()
    assert decide(index, T0) == decide(index, T0)
    assert index.snapshot() == before


def test_why_says_whose_turn_it_is() -> None:
    index = index_of(NODES)
    submit(index)
    assert why(index, "R", "n1", T0).code == "starting"
    reason = why(index, "R", "n2", T0)
    assert (reason.code, reason.text) == ("turn", "n2 waits for its turn: n1 goes first")
    admit(index, "n1")
    assert why(index, "R", "n1", T0).code == "isolating"
    fail(index, "n1", "no route to host")
    assert why(index, "R", "n1", T0).text == "n1 failed in run.configure: no route to host"
    reason = rollout_reason(index, "R", T0)
    assert reason is not None
    assert reason.code == "node-failed"
