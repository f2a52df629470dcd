"""Plans that keep their change: a drifted node is changed again, by the rules for any node."""

from __future__ import annotations

from dataclasses import replace
from zoneinfo import ZoneInfo

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, EndRollout, Requeue, RollBack
from machines.model.events import (
    DriftRecorded,
    FreezeStarted,
    NodeOrdered,
    NodesDiscovered,
    TeamRulesChanged,
)
from machines.model.limits import Limits, TeamRules
from machines.model.plan import MaintainStage
from machines.model.rollout import NodeOrder
from machines.model.windows import Freeze, Window
from machines.scheduler.decide import decide
from machines.scheduler.progress import RolloutState, rollout_progress
from machines.states import Trigger
from machines.workflow import phase_transitions
from tests.machines.builders import ALICE, T0, finish, index_of, nodes_of, reason_of, submit, transition

NODES = nodes_of({"a": ("n1", "n2")})


def finished(*, keep: bool, every_s: float | None = 3600.0) -> Projection:
    """Return an index with a rollout whose nodes are done."""
    index = index_of(NODES)
    submit(index, keep=keep, drift_every_s=every_s, rollback=(MaintainStage("rollback", "undo.yml"),))
    for node in ("n1", "n2"):
        finish(index, node)
    return index


def test_rollout_with_drift_checks_stays_open_and_done() -> None:
    index = finished(keep=False)
    assert decide(index, T0).of(EndRollout) == ()
    assert rollout_progress(index, "R", T0).state is RolloutState.DONE
    assert decide(finished(keep=False, every_s=None), T0).of(EndRollout) == (EndRollout("R"),)


def test_drifted_node_is_requeued_if_plan_keeps_change() -> None:
    for keep, requeued in ((True, (Requeue("R", "n2"),)), (False, ())):
        index = finished(keep=keep)
        index.apply(DriftRecorded("R", "n2", T0, ("set the limit",)))
        assert decide(index, T0).of(Requeue) == requeued
        assert reason_of(index, "R", "n2", T0).code == "drifted"


def test_drifted_node_with_ordered_rollback_is_not_requeued() -> None:
    index = finished(keep=True)
    index.apply(DriftRecorded("R", "n2", T0, ("set the limit",)))
    index.apply(NodeOrdered("R", "n2", NodeOrder.ROLLBACK, ALICE, "because", T0))
    decision = decide(index, T0)
    assert ([each.node for each in decision.of(RollBack)], decision.of(Requeue)) == (["n2"], ())


def test_requeued_node_starts_by_the_same_rules() -> None:
    index = finished(keep=True)
    index.apply(DriftRecorded("R", "n2", T0, ("set the limit",)))
    transition(index, "n2", Trigger.DRIFTED)
    assert (index.target("R", "n2").drift, index.target("R", "n2").outcome) == (None, None)
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n2"]
    index.apply(FreezeStarted(Freeze("f1", "all", "month's end", "alice", T0)))
    assert decide(index, T0).of(Admit) == ()
    assert reason_of(index, "R", "n2", T0).code == "freeze"


def test_requeued_node_obeys_team_it_moved_to() -> None:
    index = finished(keep=True)
    index.apply(DriftRecorded("R", "n2", T0, ("set the limit",)))
    index.apply(NodesDiscovered((replace(index.nodes["n2"], labels={"team": "b"}),)))
    transition(index, "n2", Trigger.DRIFTED)
    closed = Window(frozenset(range(7)), 9 * 60, 10 * 60, ZoneInfo("UTC"))
    assert not closed.is_open(T0)
    index.apply(TeamRulesChanged(TeamRules("b", (closed,)), ALICE, "because", T0))
    assert index.target("R", "n2").team == "a"
    assert decide(index, T0).of(Admit) == ()
    assert reason_of(index, "R", "n2", T0).code == "outside-window"
    index.update_limits(Limits(pools={}))
    index.apply(FreezeStarted(Freeze("f1", "team/b", "month's end", "alice", T0)))
    assert reason_of(index, "R", "n2", T0).code == "freeze"


def test_requeue_without_keep_or_drift_is_a_violation() -> None:
    for keep, drifted in ((False, True), (True, False)):
        index = finished(keep=keep)
        if drifted:
            index.apply(DriftRecorded("R", "n1", T0, ("set the limit",)))
        moved = phase_transitions.transition(index.target("R", "n1"), Trigger.DRIFTED, T0)
        assert "must not start again" in (violation(index, moved, T0) or "")
