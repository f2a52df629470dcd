"""The table of phases, and the values that moves make."""

from __future__ import annotations

import pytest
from transitions import MachineError

from machines.book import Snapshot
from machines.events import PhaseMoved
from machines.invariants import violation
from machines.limits import Limits
from machines.projection import Projection
from machines.rollout import Failure
from machines.states import BUSY, MACHINE, TABLE, IllegalTransition, Outcome, Phase, Trigger, diagram, edge
from tests.machines.worlds import T0, admit, fail, index_of, move, nodes_of, submit


class Model:
    """What a `transitions` machine moves."""

    state: str


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("trigger", Trigger)
def test_the_library_and_the_table_agree(phase: Phase, trigger: Trigger) -> None:
    model = Model()
    MACHINE.add_model(model, initial=phase)
    try:
        MACHINE.events[trigger.value].trigger(model)
        reached: str | None = str(model.state)
    except MachineError:
        reached = None
    finally:
        MACHINE.remove_model(model)
    ways = [way.target for way in TABLE if (way.trigger, way.source) == (trigger, phase)]
    assert ways == ([] if reached is None else [reached])


def test_there_are_no_other_edges_than_the_designs() -> None:
    busy = {(phase, end) for phase in BUSY for end in (Phase.FAILED, Phase.DONE)}
    p = Phase
    assert {(way.source, way.target) for way in TABLE} == busy | {
        (p.PENDING, p.ISOLATING),
        (p.PENDING, p.DONE),
        (p.ISOLATING, p.PENDING),
        (p.ISOLATING, p.MAINTAINING),
        (p.MAINTAINING, p.VERIFYING),
        (p.VERIFYING, p.DONE),
        (p.FAILED, p.PENDING),
        (p.FAILED, p.ISOLATING),
        (p.FAILED, p.DONE),
        (p.DONE, p.FAILED),
        (p.DONE, p.PENDING),
    }


def test_an_outcome_belongs_to_its_edge() -> None:
    assert edge(Trigger.VERIFIED, Phase.VERIFYING, Outcome.CHANGED).target is Phase.DONE
    for outcome in (None, Outcome.LEFT):
        with pytest.raises(IllegalTransition):
            edge(Trigger.VERIFIED, Phase.VERIFYING, outcome)
    with pytest.raises(IllegalTransition):
        edge(Trigger.ADMITTED, Phase.DONE)


def test_the_diagram_is_drawn_from_the_table() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(lines) == len(TABLE) + 2


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
def test_a_move_from_elsewhere_is_refused_and_changes_nothing(event: PhaseMoved) -> None:
    index = working()
    before = index.snapshot()
    with pytest.raises(IllegalTransition):
        index.apply(event)
    assert index.snapshot() == before


def test_a_move_updates_the_target_and_the_rollout() -> None:
    index = working()
    failure = fail(index, "n1")
    target = index.target("R", "n1")
    assert (target.phase, target.attempt, target.isolated, target.admitted_at) == (Phase.FAILED, 1, True, T0)
    assert [each.id for each in index.rollout("R").failures] == [failure]
    move(index, "n1", Trigger.RETRIED, at=T0 + 1.0)
    target = index.target("R", "n1")
    assert (target.phase, target.failure, target.since, target.attempt) == (Phase.PENDING, None, T0 + 1.0, 1)


def test_admissions_of_one_commit_are_judged_together() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index)
    both = [
        PhaseMoved("R", name, Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, T0)
        for name in ("n1", "n2")
    ]
    assert [violation(index, event, T0) for event in both] == [None, None]
    second = violation(index, both[1], T0, earlier=both[:1])
    assert second is not None
    assert "budget of 1" in second


def test_an_index_gives_back_the_snapshot_it_was_built_from() -> None:
    snapshot = working().snapshot()
    assert Projection.build(snapshot, Limits()).snapshot() == snapshot
    assert Projection.build(Snapshot(), Limits()).snapshot() == Snapshot()


def test_failures_of_one_sort_share_their_signature() -> None:
    def signature(node: str, message: str) -> str:
        return Failure("id", node, 1, "run.configure", message, T0).signature

    assert signature("n1", "task 3 failed on n1") == signature("n12", "task 44 failed on n12")
    assert signature("n1", "task 3 failed on n1") != signature("n1", "disk full")
    assert signature("a1", "apt failed on a1: rate") == signature(
        "b-2.example", "apt failed on b-2.example: rate"
    )
    assert signature("n1", "n1 failed; n1.") == signature("web", "web failed; web.")
