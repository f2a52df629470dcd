"""A decision as events: their groups, their order and their texts."""

from machines.model.events import GateOpened, HoldReleased, HoldTaken, PhaseMoved
from machines.model.plan import GateName, VoteRequirement
from machines.model.rollout import Hold
from machines.scheduler.decide import decide
from machines.scheduler.decided_events import GroupKind, events_of
from machines.states import Trigger
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import ALICE, T0, index_of, nodes_of, submit


def test_ended_hold_and_admissions_committed_apart() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"]}))
    submit(index, "R")
    submit(index, "S", opened=False, gates={GateName.START: VoteRequirement()})
    index.apply(HoldTaken(Hold("n2", "cli", "h", ALICE, "tests", T0, T0 + 5.0)))
    index.advance(T0 + 5.0)
    groups = events_of(index, decide(index, T0 + 5.0), T0 + 5.0, describe_causes)
    assert [(group.kind, group.rollout) for group in groups] == [
        (GroupKind.EXPIRED, ""),
        (GroupKind.DECIDED, "S"),
        (GroupKind.DECIDED, "R"),
    ]
    [released] = groups[0].events
    assert isinstance(released, HoldReleased)
    assert released.reason == "its time is over"
    assert isinstance(groups[1].events[0], GateOpened)
    assert [e.trigger for e in groups[2].events if isinstance(e, PhaseMoved)] == [Trigger.ADMITTED] * 2


def test_decided_events_applied_leave_nothing_decided() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"], "b": ["n3"]}))
    submit(index)
    decision = decide(index, T0)
    for group in events_of(index, decision, T0, describe_causes):
        for event in group.events:
            index.apply(event)
    assert events_of(index, decide(index, T0), T0, describe_causes) == ()
