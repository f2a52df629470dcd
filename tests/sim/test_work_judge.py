"""The judge of work on a node: each pair of its table, whichever came first."""

from __future__ import annotations

from itertools import permutations

import pytest

from machines.facts.node_work import NodeWork, WorkKind
from machines.facts.projection import Projection
from machines.model.events import Event, HoldTaken, PhaseMoved, PreparationRecorded
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import Hold
from machines.states import Phase, Trigger
from tests.machines.builders import ALICE, T0, index_of, nodes_of
from tests.sim.work_judge import NEVER_TOGETHER, WorkJudge

COMMITTED: dict[str, Event] = {
    "attempt": PhaseMoved("R", "n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, T0),
    "stage": PreparationRecorded(Preparation("R", "n1", "s", 1, PreparationState.RUNNING, "", T0, T0)),
    "hold": HoldTaken(Hold("n1", "cli", "h1", ALICE, "repair", T0)),
}


def begin(judge: WorkJudge, facts: Projection, kind: str) -> None:
    if kind in COMMITTED:
        judge.on_commit([COMMITTED[kind]])
    else:
        facts.record_work(NodeWork(WorkKind(kind), "n1"))
        judge.look()


@pytest.mark.parametrize("pair", sorted(sorted(pair) for pair in NEVER_TOGETHER), ids=" and ".join)
def test_forbidden_work_at_once_is_reported(pair: list[str]) -> None:
    for kinds in permutations((pair[0], pair[-1])):
        violations: list[str] = []
        facts = index_of(nodes_of({"t": ["n1", "n2"]}))
        judge = WorkJudge(lambda: T0, violations.append)
        judge.current_facts = lambda facts=facts: facts  # type: ignore[misc]
        begin(judge, facts, kinds[0])
        assert violations == []
        begin(judge, facts, kinds[1])
        assert [set(text.removesuffix(" on n1 at once").split(" and ")) for text in violations] == [set(pair)]
