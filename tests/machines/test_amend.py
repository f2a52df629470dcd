"""Joiners, leavers, and nodes that change team or pool."""

from __future__ import annotations

from machines.amend import amendments
from machines.events import GateOpened, NodesGone, NodesSeen, PhaseMoved, TargetChanged, TargetsJoined
from machines.gates import gate_view
from machines.limits import Limits
from machines.node import Node
from machines.plan import Enrol, GateName, Need
from machines.projection import Projection
from machines.rollout import Target
from machines.schedule import decide, why
from machines.states import Outcome, Phase
from tests.machines.worlds import (
    ALICE,
    BOB,
    CANARY_THEN_FLEET,
    CAROL,
    T0,
    admit,
    finish,
    index_of,
    nodes_of,
    seen_up,
    submit,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2"), "b": ("n3",)})


def appear(index: Projection, *nodes: Node, at: float = T0) -> list[Target]:
    """Let nodes appear; return who joined."""
    index.apply(NodesSeen(nodes))
    index.observed(seen_up(nodes, at), at)
    joined: list[Target] = []
    for event in amendments(index, at):
        index.apply(event)
        if isinstance(event, TargetsJoined):
            joined += event.targets
    return joined


def of_team(team: str, *names: str) -> list[Node]:
    return [Node(name, labels={"team": team}) for name in names]


def test_a_joiner_goes_last_and_voids_nothing() -> None:
    index = index_of(NODES)
    submit(index, waves=CANARY_THEN_FLEET)
    digest = index.rollout("R").digest
    (joined,) = appear(index, *of_team("a", "n0"))
    assert (joined.wave, joined.position, joined.joined, joined.needs_vote_of) == ("fleet", 3, True, None)
    assert index.rollout("R").digest == digest
    assert index.rollout("R").amendments == 1
    assert amendments(index, T0) == ()


def test_beyond_a_tenth_each_joiner_waits_for_its_own_team_alone() -> None:
    index = index_of(NODES)
    submit(index)
    joined = appear(index, *of_team("c", "n7", "n8"), at=T0 + 1.0)
    assert [target.needs_vote_of for target in joined] == [None, "c"]
    assert "n7" in [start.node for start in decide(index, T0 + 1.0).starts]
    finish(index, "n7", at=T0 + 2.0)
    index.observed(seen_up(("n7",), T0 + 3.0), T0 + 3.0)
    assert why(index, "R", "n8", T0 + 3.0).code == "needs-vote"
    vote(index, GateName.START, CAROL, teams=("c",), at=T0 + 4.0)
    assert "n8" in [start.node for start in decide(index, T0 + 4.0).starts]


def test_enrol_ask_and_never() -> None:
    for enrol, want in ((Enrol.ASK, ["a"]), (Enrol.NEVER, [])):
        index = index_of(NODES)
        submit(index, enrol=enrol)
        assert [target.needs_vote_of for target in appear(index, *of_team("a", "n9"))] == want


def test_a_joiner_of_a_team_that_has_not_voted_waits_for_it() -> None:
    index = index_of(NODES)
    submit(index, opened=False, gates={GateName.START: Need(owner=1, each_team=1)})
    vote(index, GateName.START, ALICE, teams=("infra", "a"))
    vote(index, GateName.START, BOB, teams=("b",))
    index.apply(GateOpened("R", GateName.START, "", T0))
    (joined,) = appear(index, *of_team("c", "n9"), at=T0 + 1.0)
    assert joined.needs_vote_of == "c"
    assert [start.node for start in decide(index, T0 + 1.0).starts] == ["n1", "n3"]


def test_a_joiner_of_a_team_that_nobody_speaks_for_says_so_and_who_lifts_that() -> None:
    index = index_of(NODES, Limits(teams=frozenset({"infra", "a", "b"})))
    submit(index, opened=False, gates={GateName.START: Need(owner=1, each_team=1)})
    vote(index, GateName.START, ALICE, teams=("infra", "a"))
    vote(index, GateName.START, BOB, teams=("b",))
    index.apply(GateOpened("R", GateName.START, "", T0))
    appear(index, *of_team("c", "n9"), at=T0 + 1.0)
    waits = why(index, "R", "n9", T0 + 1.0)
    assert waits.code == "needs-vote"
    assert "the settings have no team c, so nobody can vote for it" in waits.text
    assert waits.lifted_by == "an admin, who adds team c to the settings, or rolloutctl skip R n9"
    index.relimit(Limits(teams=frozenset({"infra", "a", "b", "c"})))
    assert "a member of team c" in why(index, "R", "n9", T0 + 2.0).lifted_by


def test_a_gate_that_asks_a_team_nobody_speaks_for_says_so() -> None:
    index = index_of(NODES, Limits(teams=frozenset({"infra", "a"})))
    submit(index, opened=False, gates={GateName.START: Need(owner=1, each_team=1)})
    missing = gate_view(index, index.rollout("R"), GateName.START, "", T0).missing
    assert missing.endswith("; the vote of team a is missing")
    assert "the vote of team b is missing (the settings have no team b, so nobody can vote for it" in missing


def test_who_leaves_is_done_and_frees_the_slot_also_when_at_work() -> None:
    index = index_of(NODES)
    submit(index)
    admit(index, "n1")
    index.apply(NodesGone(("n1",)))
    (left,) = amendments(index, T0)
    assert isinstance(left, PhaseMoved)
    assert (left.target, left.outcome) == (Phase.DONE, Outcome.LEFT)
    index.apply(left)
    assert [start.node for start in decide(index, T0).starts] == ["n3", "n2"]
    assert index.busy() == []


def test_a_node_that_changes_team_is_followed() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(NodesSeen((Node("n2", labels={"team": "b"}),)))
    (changed,) = amendments(index, T0)
    assert changed == TargetChanged("R", "n2", "b", ("team/b",), None, T0)
    index.apply(changed)
    admit(index, "n3")
    assert why(index, "R", "n2", T0).code == "pool-full"
