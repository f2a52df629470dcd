"""A node starts only while it is known to be idle; busy ones let others go first and are looked at seldom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from machines.decision import Look, Probe
from machines.events import RolloutCancelled
from machines.invariants import violation
from machines.limits import Budget, Limits, PoolRule
from machines.moves import move as moved
from machines.plan import StepSpec, WaveSpec
from machines.projection import Projection
from machines.schedule import decide, rollout_reason, why
from machines.states import Trigger
from machines.traffic import AGAIN_MOST_S, AGAIN_S, AHEAD, GOOD_FOR_S, UNKNOWN_MOST_S, Traffic
from tests.machines.worlds import ALICE, T0, admit, index_of, nodes_of, seen_up, submit

JOBS = StepSpec("traffic.0.kubernetes", "kubernetes", {"pods": "kind=job"})
COMMAND = StepSpec("isolate.0.command", "command")
TRAIN = "pod batch/train-7 (Job train) runs there"


def fleet(nodes: int = 3, limits: Limits | None = None, **more: object) -> Projection:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(1, nodes + 1)]}), limits)
    submit(index, **{"traffic": (JOBS,), "isolate": (COMMAND,), **more})
    return index


def tell(index: Projection, at: float = T0, **busy: bool | None) -> None:
    said = {True: f"is busy: {TRAIN}", None: "cannot be judged: nobody can say", False: "is idle"}
    for node, word in busy.items():
        index.probed(Traffic("R", node, word, at, f"{node} {said[word]}"))


def started(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).starts]


def probed(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).probes]


def test_nobody_starts_unseen_and_a_few_are_looked_at() -> None:
    index = fleet(nodes=AHEAD + 3)
    decision = decide(index, T0)
    assert decision.starts == ()
    assert decision.probes == tuple(Probe("R", f"n{number}") for number in range(1, AHEAD + 1))
    assert decision.wake_at is not None
    reason = why(index, "R", "n1", T0)
    assert (reason.code, reason.text) == (
        "traffic-unknown",
        "whether n1 is busy with client traffic is being looked at",
    )


def test_a_plan_without_probes_is_looked_at_by_none() -> None:
    index = fleet(traffic=())
    assert (started(index), probed(index)) == (["n1"], [])


def test_the_first_idle_node_starts_and_a_busy_one_lets_it_go_first() -> None:
    index = fleet()
    tell(index, n1=True, n2=False, n3=False)
    assert started(index) == ["n2"]
    reason = why(index, "R", "n1", T0)
    assert (reason.code, reason.text, reason.since) == ("traffic-busy", f"n1 is busy: {TRAIN}", T0)
    assert reason.lifted_by.startswith("the end of that traffic; it is looked at again about 20")


def test_who_was_never_seen_keeps_its_place_until_it_was_looked_at() -> None:
    index = fleet()
    tell(index, n2=False, n3=False)
    assert started(index) == []
    tell(index, n1=False)
    assert started(index) == ["n1"]


def test_unknown_is_busy_with_a_reason_of_its_own() -> None:
    index = fleet(nodes=1)
    tell(index, n1=None)
    assert started(index) == []
    reason = why(index, "R", "n1", T0)
    assert (reason.code, reason.text) == ("traffic-unknown", "n1 cannot be judged: nobody can say")
    assert rollout_reason(index, "R", T0) == reason
    assert decide(index, T0).reasons["R"] == reason


def test_that_a_node_was_idle_is_believed_for_a_moment_only() -> None:
    index = fleet(nodes=1)
    tell(index, n1=False)
    later = T0 + GOOD_FOR_S
    assert started(index, later - 1) == ["n1"]
    assert (started(index, later), probed(index, later)) == ([], ["n1"])


def test_a_busy_node_is_looked_at_again_less_and_less_often() -> None:
    index = fleet(nodes=1)
    tell(index, n1=True)
    decision = decide(index, T0)
    assert (decision.probes, decision.wake_at) == ((), T0 + AGAIN_S)
    assert probed(index, T0 + AGAIN_S) == ["n1"]
    seen_at, waits = T0, []
    for _ in range(12):
        told = index.traffic_of("R", "n1")
        assert told is not None
        waits.append(told.again_at - seen_at)
        seen_at = told.again_at
        tell(index, at=seen_at, n1=True)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (AGAIN_S, AGAIN_MOST_S)
    index.observed(seen_up(index.nodes, seen_at), seen_at)
    assert why(index, "R", "n1", seen_at).since == T0


def test_an_unknown_node_is_asked_about_again_soon_however_long_it_was_so() -> None:
    index = fleet(nodes=1)
    for after_s in (0.0, 5000.0):
        tell(index, at=T0 + after_s, n1=None)
    told = index.traffic_of("R", "n1")
    assert told is not None
    assert told.again_at == T0 + 5000.0 + UNKNOWN_MOST_S


def test_while_a_busy_node_is_looked_at_again_others_go_on() -> None:
    index = fleet()
    tell(index, n1=True)
    later = T0 + AGAIN_S
    tell(index, at=later, n2=False)
    decision = decide(index, later)
    assert [each.node for each in decision.probes] == ["n1"]
    assert [start.node for start in decision.starts] == ["n2"]


def test_a_full_pool_and_a_full_rollout_cost_no_look() -> None:
    index = fleet()
    tell(index, n3=False)
    admit(index, "n3")
    assert probed(index) == []
    wide = Limits(pools={"team": PoolRule(Budget(50))})
    assert probed(fleet(nodes=30, limits=wide, max_parallel=0)) == []


def test_looks_are_few_for_few_starts_however_many_pools_there_are() -> None:
    index = index_of(nodes_of({f"t{number}": [f"n{number}"] for number in range(100)}))
    submit(index, traffic=(JOBS,), waves=(WaveSpec("canary", max_parallel=1), WaveSpec("fleet")))
    assert len(probed(index)) == AHEAD


def test_where_many_are_busy_the_search_goes_on_until_one_is_idle() -> None:
    index = fleet(nodes=20)
    for _ in range(20):
        for node in probed(index):
            tell(index, **{node: node != "n17"})
    assert started(index) == ["n17"]


def test_all_busy_nodes_cost_a_decision_nothing_until_one_is_due() -> None:
    index = fleet(nodes=AHEAD)
    tell(index, **{f"n{number}": True for number in range(1, AHEAD + 1)})
    decide(index, T0)
    assert list(index.lanes.hot("R", "fleet")) == []
    assert decide(index, T0 + 1).wake_at == T0 + AGAIN_S
    assert len(probed(index, T0 + AGAIN_S)) == AHEAD


def test_a_node_that_may_need_nothing_is_asked_that_first() -> None:
    facts = fleet(nodes=1).snapshot()
    perhaps = tuple(replace(target, maybe_current=True) for target in facts.targets)
    index = Projection.build(replace(facts, targets=perhaps), Limits())
    index.observed(seen_up(index.nodes, T0), T0)
    tell(index, n1=True)
    decision = decide(index, T0)
    assert (decision.looks, decision.probes) == ((Look("R", "n1"),), ())


def test_in_observe_mode_it_is_looked_at_and_explained_and_nothing_starts() -> None:
    index = fleet(limits=Limits(observe_only=True))
    assert probed(index) == ["n1", "n2", "n3"]
    tell(index, n1=True, n2=False, n3=False)
    assert started(index) == []
    assert why(index, "R", "n1", T0).code == "traffic-busy"
    assert why(index, "R", "n2", T0).code == "observe-only"


def test_two_slots_are_filled_by_idle_nodes() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    tell(index, n1=False, n2=True, n3=False)
    assert started(index) == ["n1", "n3"]


def test_with_rehearsals_only_idle_nodes_are_rehearsed() -> None:
    index = fleet(isolate=(StepSpec("isolate.0.kubernetes", "kubernetes"),))
    tell(index, n1=True, n2=False, n3=False)
    assert [each.node for each in decide(index, T0).rehearse] == ["n2", "n3"]


def test_what_was_seen_is_forgotten_with_its_rollout() -> None:
    index = fleet(nodes=1)
    tell(index, n1=True)
    index.apply(RolloutCancelled("R", ALICE, "tests", T0))
    tell(index, n1=True)
    assert index.traffic == ()


@pytest.mark.parametrize(
    ("busy", "age_s", "words"),
    [
        (False, 0.0, None),
        (True, 0.0, f"a traffic probe says: n1 is busy: {TRAIN}"),
        (None, 0.0, "nobody can say"),
        (False, GOOD_FOR_S, "nobody has looked just now"),
        (False, -1.0, "nobody has looked just now"),
        (False, math.inf, "nobody has looked just now"),
    ],
)
def test_the_invariants_refuse_a_start_on_anything_but_a_fresh_word(
    busy: bool | None, age_s: float, words: str | None
) -> None:
    index = fleet(nodes=1)
    if not math.isinf(age_s):
        tell(index, at=T0 - age_s, n1=busy)
    index.advance(T0)
    found = violation(index, moved(index.target("R", "n1"), Trigger.ADMITTED, T0), T0)
    assert found is None if words is None else words in str(found)
