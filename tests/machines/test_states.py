"""The table of transitions, and how they change targets."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from machines import states
from machines.facts.apply import UnexpectedRow
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.projection import Projection
from machines.invariants.facts import EarlierEvents
from machines.invariants.violations import violation
from machines.model.events import PhaseMoved
from machines.model.limits import Limits
from machines.model.rollout import Failure
from machines.states import (
    IN_FLIGHT_PHASES,
    MACHINE,
    IllegalTransition,
    Outcome,
    Phase,
    Trigger,
    edges,
    mermaid_diagram,
    next_phase,
)
from machines.workflow.phase_transitions import transition as make_transition
from tests.machines.builders import T0, admit, fail, index_of, nodes_of, submit, transition


@pytest.fixture
def without_edge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the edge from maintaining to verifying out of the machine, for one test."""
    next_phase.cache_clear()
    reduced = copy.deepcopy(MACHINE)
    reduced.remove_transition(Trigger.MAINTAINED.value, Phase.MAINTAINING.name, Phase.VERIFYING.name)
    monkeypatch.setattr(states, "MACHINE", reduced)
    yield
    next_phase.cache_clear()


@pytest.mark.usefixtures("without_edge")
def test_edge_out_of_the_machine_is_refused_everywhere() -> None:
    index = working()
    transition(index, "n1", Trigger.ISOLATED)
    event = PhaseMoved("R", "n1", Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, 1, T0)
    refusal = "a maintaining node cannot be maintained"
    assert violation(index, event, T0) == f"n1 of R: {refusal}"
    with pytest.raises(IllegalTransition, match=refusal):
        index.apply(event)
    with pytest.raises(IllegalTransition, match=refusal):
        make_transition(index.target("R", "n1"), Trigger.MAINTAINED, T0)
    assert "maintaining --> verifying" not in mermaid_diagram()


def test_table_has_exactly_the_designed_edges() -> None:
    busy = {(phase, end) for phase in IN_FLIGHT_PHASES for end in (Phase.FAILED, Phase.DONE)}
    p = Phase
    assert {(edge.source, edge.target) for edge in edges()} == busy | {
        (p.PENDING, p.ISOLATING),
        (p.PENDING, p.DONE),
        (p.PENDING, p.FAILED),
        (p.ISOLATING, p.PENDING),
        (p.ISOLATING, p.MAINTAINING),
        (p.MAINTAINING, p.VERIFYING),
        (p.VERIFYING, p.DONE),
        (p.FAILED, p.PENDING),
        (p.FAILED, p.ISOLATING),
        (p.FAILED, p.DONE),
        (p.DONE, p.FAILED),
        (p.DONE, p.PENDING),
        (p.DONE, p.ISOLATING),
    }


def test_an_outcome_belongs_to_its_edge() -> None:
    assert next_phase(Trigger.VERIFIED, Phase.VERIFYING, Outcome.CHANGED) is Phase.DONE
    for outcome in (None, Outcome.LEFT):
        with pytest.raises(IllegalTransition):
            next_phase(Trigger.VERIFIED, Phase.VERIFYING, outcome)
    with pytest.raises(IllegalTransition):
        next_phase(Trigger.ADMITTED, Phase.DONE)


def test_the_diagram_is_drawn_from_the_table() -> None:
    lines = mermaid_diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == len(edges()) + 2


def working() -> Projection:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index)
    admit(index, "n1")
    return index


@pytest.mark.parametrize(
    "event",
    [
        PhaseMoved("R", "n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 2, T0),
        PhaseMoved("R", "n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING, 2, T0),
        PhaseMoved("R", "n1", Trigger.ISOLATED, Phase.ISOLATING, Phase.VERIFYING, 1, T0),
        PhaseMoved("R", "n1", Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, 1, T0),
        PhaseMoved("R", "n1", Trigger.FAILED, Phase.ISOLATING, Phase.FAILED, 1, T0),
    ],
)
def test_transition_from_other_phase_changes_nothing(event: PhaseMoved) -> None:
    index = working()
    before = index.snapshot()
    with pytest.raises((IllegalTransition, UnexpectedRow)):
        index.apply(event)
    assert index.snapshot() == before


def test_a_move_updates_the_target_and_the_rollout() -> None:
    index = working()
    failure = fail(index, "n1")
    target = index.target("R", "n1")
    assert (target.phase, target.attempt, target.isolated, target.admitted_at) == (Phase.FAILED, 1, True, T0)
    assert [each.id for each in index.rollout("R").failures] == [failure]
    transition(index, "n1", Trigger.RETRIED, at=T0 + 1.0)
    target = index.target("R", "n1")
    assert (target.phase, target.failure, target.since, target.attempt) == (Phase.PENDING, None, T0 + 1.0, 1)


def test_admissions_of_one_commit_judged_together() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index)
    both = [
        PhaseMoved("R", name, Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, T0)
        for name in ("n1", "n2")
    ]
    assert [violation(index, event, T0) for event in both] == [None, None]
    second = violation(index, both[1], T0, earlier=EarlierEvents(both[:1]))
    assert second is not None
    assert "budget of 1" in second


def test_index_returns_its_snapshot() -> None:
    snapshot = working().snapshot()
    assert Projection.build(snapshot, Limits()).snapshot() == snapshot
    assert Projection.build(FactsSnapshot(), Limits()).snapshot() == FactsSnapshot()


def test_similar_failures_share_signature() -> None:
    def signature(node: str, message: str) -> str:
        return Failure("id", node, 1, "run.configure", message, T0).signature

    assert signature("n1", "task 3 failed on n1") == signature("n12", "task 44 failed on n12")
    assert signature("n1", "task 3 failed on n1") != signature("n1", "disk full")
    assert signature("a1", "apt failed on a1: rate") == signature(
        "b-2.example", "apt failed on b-2.example: rate"
    )
    assert signature("n1", "n1 failed; n1.") == signature("web", "web failed; web.")
