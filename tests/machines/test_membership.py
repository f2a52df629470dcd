"""Joiners, leavers, and nodes that change team or pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, EndRollout
from machines.model.events import (
    GateOpened,
    NodesDiscovered,
    NodesRemoved,
    PhaseMoved,
    RolloutCancelled,
    TargetChanged,
    TargetsJoined,
)
from machines.model.limits import Limits
from machines.model.node import Node
from machines.model.plan import EnrolPolicy, GateName, VoteRequirement, WaveDef
from machines.model.rollout import Failure, Target
from machines.rules.gates import gate_view, missing_team_vote
from machines.scheduler.decide import REJOIN_WAIT_S, decide
from machines.scheduler.membership import carry_over, membership_events
from machines.states import Outcome, Phase, Trigger
from machines.workflow import phase_transitions
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.reason_text import describe, describe_missing_votes, lifted_by
from tests.machines.builders import (
    ALICE,
    BOB,
    CANARY_THEN_FLEET,
    CAROL,
    T0,
    admit,
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

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3",)})


def discover_nodes(index: Projection, *nodes: Node, at: float = T0) -> list[Target]:
    """Let nodes appear; return who joined."""
    index.apply(NodesDiscovered(nodes))
    index.record_observations(observed_up(nodes, at), at)
    joined: list[Target] = []
    for event in membership_events(index, at, describe_causes):
        index.apply(event)
        if isinstance(event, TargetsJoined):
            joined += event.targets
    return joined


def nodes_of_team(team: str, *names: str) -> list[Node]:
    return [Node(name, labels={"team": team}) for name in names]


def test_joiner_goes_last_and_keeps_votes() -> None:
    index = index_of(NODES)
    submit(index, waves=CANARY_THEN_FLEET)
    digest = index.rollout("R").digest
    (joined,) = discover_nodes(index, *nodes_of_team("a", "n0"))
    assert (joined.wave, joined.position, joined.joined, joined.needs_vote_of) == ("fleet", 3, True, None)
    assert index.rollout("R").digest == digest
    assert index.rollout("R").amendments == 1
    assert membership_events(index, T0, describe_causes) == ()


def test_many_joiners_each_wait_for_own_team() -> None:
    index = index_of(NODES)
    submit(index)
    joined = discover_nodes(index, *nodes_of_team("c", "n7", "n8"), at=T0 + 1.0)
    assert [target.needs_vote_of for target in joined] == [None, "c"]
    assert "n7" in [start.node for start in decide(index, T0 + 1.0).of(Admit)]
    finish(index, "n7", at=T0 + 2.0)
    index.record_observations(observed_up(("n7",), T0 + 3.0), T0 + 3.0)
    assert reason_of(index, "R", "n8", T0 + 3.0).code == "needs-vote"
    vote(index, GateName.START, CAROL, teams=("c",), at=T0 + 4.0)
    assert "n8" in [start.node for start in decide(index, T0 + 4.0).of(Admit)]


def test_enrol_ask_and_never() -> None:
    for enrol, want in ((EnrolPolicy.ASK, ["a"]), (EnrolPolicy.NEVER, [])):
        index = index_of(NODES)
        submit(index, enrol=enrol)
        assert [target.needs_vote_of for target in discover_nodes(index, *nodes_of_team("a", "n9"))] == want


def test_joiner_waits_for_team_vote() -> None:
    index = index_of(NODES)
    submit(index, opened=False, gates={GateName.START: VoteRequirement(owner=1, each_team=1)})
    vote(index, GateName.START, ALICE, teams=("infra", "a"))
    vote(index, GateName.START, BOB, teams=("b",))
    index.apply(GateOpened("R", GateName.START, "", T0))
    (joined,) = discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    assert joined.needs_vote_of == "c"
    assert [start.node for start in decide(index, T0 + 1.0).of(Admit)] == ["n1", "n3"]


def test_joiner_of_open_continue_gate_names_its_wave() -> None:
    index = index_of(NODES)
    waves = (
        WaveDef("canary", gate=GateName.CONTINUE),
        WaveDef("second", gate=GateName.CONTINUE),
        WaveDef("fleet"),
    )
    need = {GateName.CONTINUE: VoteRequirement(owner=1, each_team=1)}
    submit(index, gates=need, waves=waves)
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0))
    (joined,) = discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    reason = missing_team_vote(index, joined)
    assert reason is not None
    assert reason.remedy is not None
    assert reason.remedy.args["wave"] == "canary"
    assert "--wave canary" in lifted_by(reason)


def test_joiner_names_team_without_members_and_resolution() -> None:
    index = index_of(NODES, Limits(teams=frozenset({"infra", "a", "b"})))
    submit(index, opened=False, gates={GateName.START: VoteRequirement(owner=1, each_team=1)})
    vote(index, GateName.START, ALICE, teams=("infra", "a"))
    vote(index, GateName.START, BOB, teams=("b",))
    index.apply(GateOpened("R", GateName.START, "", T0))
    discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    waits = reason_of(index, "R", "n9", T0 + 1.0)
    assert waits.code == "needs-vote"
    assert "the settings have no team c; an admin must add it" in describe(waits)
    assert (
        lifted_by(waits) == "an admin, who adds team c to the settings, or rolloutctl skip R n9 --reason ..."
    )
    index.update_limits(Limits(teams=frozenset({"infra", "a", "b", "c"})))
    assert "a member of team c" in lifted_by(reason_of(index, "R", "n9", T0 + 2.0))


def test_gate_names_team_without_members() -> None:
    index = index_of(NODES, Limits(teams=frozenset({"infra", "a"})))
    submit(index, opened=False, gates={GateName.START: VoteRequirement(owner=1, each_team=1)})
    missing = describe_missing_votes(gate_view(index, index.rollout("R"), GateName.START, "", T0).missing)
    assert missing.endswith("; the vote of team a is missing")
    assert "the vote of team b is missing (the settings have no team b; an admin must add it" in missing


def test_left_node_done_and_slot_freed() -> None:
    index = index_of(NODES)
    submit(index)
    admit(index, "n1")
    index.apply(NodesRemoved(("n1",)))
    (left,) = membership_events(index, T0, describe_causes)
    assert isinstance(left, PhaseMoved)
    assert (left.target, left.outcome) == (Phase.DONE, Outcome.LEFT)
    index.apply(left)
    assert [start.node for start in decide(index, T0).of(Admit)] == ["n3", "n2"]
    assert index.needing_driver() == []


def leave(index: Projection, node: str, at: float = T0) -> None:
    """Let the inventory lose a node."""
    index.apply(NodesRemoved((node,)))
    for event in membership_events(index, at, describe_causes):
        index.apply(event)
    assert index.target("R", node).outcome is Outcome.LEFT


@pytest.mark.parametrize("keep", [False, True])
def test_node_that_left_rejoins_in_its_wave(keep: bool) -> None:
    index = index_of(NODES)
    submit(index, waves=CANARY_THEN_FLEET, keep=keep)
    before = index.target("R", "n1")
    leave(index, "n1")
    assert membership_events(index, T0, describe_causes) == ()
    index.apply(NodesDiscovered(NODES[:1]))
    (moved,) = membership_events(index, T0 + 5.0, describe_causes)
    assert violation(index, moved, T0 + 5.0) is None
    index.apply(moved)
    rejoined = index.target("R", "n1")
    assert (rejoined.phase, rejoined.wave, rejoined.position) == (Phase.PENDING, before.wave, before.position)
    index.record_observations(observed_up(NODES, T0 + 5.0), T0 + 5.0)
    assert "n1" in [start.node for start in decide(index, T0 + 5.0).of(Admit)]


def test_rejoined_node_of_other_team_waits_for_vote() -> None:
    index = index_of(NODES)
    submit(index, gates={GateName.START: VoteRequirement(owner=1, each_team=1)})
    leave(index, "n1")
    index.apply(NodesDiscovered((replace(NODES[0], labels={"team": "c"}),)))
    for event in membership_events(index, T0, describe_causes):
        index.apply(event)
    assert (index.target("R", "n1").team, index.target("R", "n1").needs_vote_of) == ("c", "c")


def test_rejoined_joiner_keeps_awaited_vote() -> None:
    index = index_of(NODES)
    submit(index, enrol=EnrolPolicy.ASK)
    discover_nodes(index, *nodes_of_team("a", "n9"))
    leave(index, "n9")
    discover_nodes(index, *nodes_of_team("a", "n9"))
    assert (index.target("R", "n9").phase, index.target("R", "n9").needs_vote_of) == (Phase.PENDING, "a")


def test_node_that_did_not_leave_cannot_rejoin() -> None:
    index = index_of(NODES)
    submit(index)
    finish(index, "n1")
    moved = phase_transitions.transition(index.target("R", "n1"), Trigger.REJOINED, T0)
    assert "must not rejoin" in (violation(index, moved, T0) or "")


def test_rollout_waits_for_node_that_left_last() -> None:
    index = index_of(NODES[:1])
    submit(index)
    leave(index, "n1")
    waiting = decide(index, T0)
    assert (waiting.of(EndRollout), waiting.wake_at) == ((), T0 + REJOIN_WAIT_S)
    assert decide(index, T0 + REJOIN_WAIT_S).of(EndRollout) == (EndRollout("R"),)


def test_changed_team_updates_target() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(NodesDiscovered((Node("n2", labels={"team": "b"}),)))
    (changed,) = membership_events(index, T0, describe_causes)
    assert changed == TargetChanged("R", "n2", "b", ("team/b",), None, T0)
    index.apply(changed)
    admit(index, "n3")
    assert reason_of(index, "R", "n2", T0).code == "pool-full"


def test_retried_joiner_needs_no_second_vote() -> None:
    index = index_of(NODES)
    submit(index, enrol=EnrolPolicy.ASK)
    discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    vote(index, GateName.START, CAROL, teams=("c",), at=T0 + 2.0)
    admit(index, "n9", at=T0 + 3.0)
    transition(index, "n9", Trigger.ISOLATION_ABORTED, at=T0 + 4.0)
    assert reason_of(index, "R", "n9", T0 + 4.0).code == "starting"


def test_disturbed_joiner_needs_no_second_vote() -> None:
    index = index_of(NODES)
    submit(index, enrol=EnrolPolicy.ASK)
    discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    vote(index, GateName.START, CAROL, teams=("c",), at=T0 + 2.0)
    failure = Failure("n9#0", "n9", 0, "prepare.stage", "disk full", T0 + 3.0)
    transition(index, "n9", Trigger.DISTURBED, at=T0 + 3.0, failure=failure)
    vote(index, GateName.PROCEED, ALICE, shown=(failure.id,), at=T0 + 4.0)
    transition(index, "n9", Trigger.RETRIED, at=T0 + 5.0)
    assert reason_of(index, "R", "n9", T0 + 5.0).code == "starting"


def test_vote_that_does_not_count_admits_no_node_of_new_team() -> None:
    """The submitter's yes, where four eyes are asked, is no vote of the team that a failed node moves to."""
    index = index_of(NODES)
    need = VoteRequirement(owner=1, each_team=1, four_eyes=True)
    submit(index, opened=False, gates={GateName.START: need}, at=T0 - 1.0)
    submitter = index.rollout("R").submitted_by
    for actor, teams in ((BOB, ("infra", "a")), (CAROL, ("b",)), (submitter, ("c",))):
        vote(index, GateName.START, actor, teams=teams)
    index.apply(GateOpened("R", GateName.START, "", T0))
    admit(index, "n1")
    transition(index, "n1", Trigger.ISOLATION_ABORTED, at=T0 + 1.0)
    discover_nodes(index, *nodes_of_team("c", "n1"), at=T0 + 2.0)
    assert index.target("R", "n1").needs_vote_of == "c"
    waits = reason_of(index, "R", "n1", T0 + 2.0)
    assert (waits.code, waits.params["team"]) == ("needs-vote", "c")
    view = gate_view(index, index.rollout("R"), GateName.START, "", T0 + 2.0)
    assert (view.state, [team for team, _, _ in view.teams]) == ("open", ["a", "b"])
    vote(index, GateName.START, CAROL, teams=("c",), at=T0 + 3.0)
    assert reason_of(index, "R", "n1", T0 + 3.0).code == "starting"


def test_joiner_of_other_team_still_waits_for_vote() -> None:
    index = index_of(NODES)
    submit(index, enrol=EnrolPolicy.ASK)
    discover_nodes(index, *nodes_of_team("c", "n9"), at=T0 + 1.0)
    discover_nodes(index, *nodes_of_team("d", "n9"), at=T0 + 2.0)
    assert index.target("R", "n9").needs_vote_of == "d"


def test_carry_over_leaves_out_aborted_rollback() -> None:
    index = index_of(NODES)
    submit(index)
    finish(index, "n1", at=T0 + 1.0)
    opened = rollout_opened("R2", plan_of(), index, T0 + 2.0)
    index.apply(replace(opened, digest=index.rollout("R").digest, supersedes="R"))
    aborted, passed = (
        PhaseMoved("R", "n1", trigger, source, Phase.DONE, 2, T0 + 3.0, Outcome.CHANGED)
        for trigger, source in (
            (Trigger.ISOLATION_ABORTED, Phase.ISOLATING),
            (Trigger.VERIFIED, Phase.VERIFYING),
        )
    )
    assert [carry_over(index, aborted, describe_causes), len(carry_over(index, passed, describe_causes))] == [
        [],
        1,
    ]


def test_carry_over_reaches_successor_of_rollout_that_is_not_loaded() -> None:
    index = index_of(NODES)
    submit(index)
    finish(index, "n1", at=T0 + 1.0)
    opened = rollout_opened("R3", plan_of(), index, T0 + 2.0)
    index.apply(replace(opened, digest=index.rollout("R").digest, supersedes="R2"))
    passed = PhaseMoved(
        "R", "n1", Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, 2, T0 + 3.0, Outcome.CHANGED
    )
    assert carry_over(index, passed, describe_causes) == [], (
        "a rollout of the plan that was not cancelled is no predecessor"
    )
    index.apply(RolloutCancelled("R", ALICE, "superseded", T0 + 2.0))
    (found,) = carry_over(index, passed, describe_causes)
    assert (found.rollout, found.outcome) == ("R3", Outcome.ALREADY_CURRENT)
