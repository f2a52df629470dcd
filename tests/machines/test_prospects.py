"""Who could be isolated now goes first, a rehearsal holds nobody up, and who was passed over is told why."""

from __future__ import annotations

from machines.decision import Rehearse
from machines.limits import Budget, Limits, PoolRule
from machines.plan import StepSpec
from machines.projection import Projection
from machines.prospects import AHEAD, GOOD_FOR_S, Prospect
from machines.schedule import decide, why
from machines.states import Trigger
from tests.machines.worlds import T0, admit, finish, index_of, move, nodes_of, seen_up, submit

CORDON = StepSpec("isolate.0.kubernetes", "kubernetes")
HELD = "payments/api-7d9 is held by budget payments/api: needs 3 healthy, has 3"


def fleet(nodes: int = 3, limits: Limits | None = None, **more: object) -> Projection:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(1, nodes + 1)]}), limits)
    submit(index, isolate=(CORDON,), **more)
    return index


def foresee(index: Projection, at: float = T0, **can: bool | None) -> None:
    for node, able in can.items():
        index.foresaw(Prospect("R", node, able, at, HELD if able is False else ""))


def started(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).starts]


def rehearsed(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).rehearse]


def test_before_anything_is_known_a_few_are_rehearsed_and_nobody_starts() -> None:
    index = fleet(nodes=AHEAD + 3)
    decision = decide(index, T0)
    assert decision.rehearse == tuple(Rehearse("R", f"n{number}") for number in range(1, AHEAD + 1))
    assert decision.starts == ()
    assert decision.wake_at is not None


def test_who_can_go_now_goes_first() -> None:
    index = fleet()
    foresee(index, n1=False, n2=True, n3=True)
    assert started(index) == ["n2"]
    reason = why(index, "R", "n1", T0)
    assert "others go first: payments/api-7d9 is held by budget" in reason.text


def test_who_was_passed_over_is_told_so_while_the_pool_is_full() -> None:
    index = fleet()
    foresee(index, n1=False, n2=True, n3=True)
    admit(index, "n2")
    reason = why(index, "R", "n1", T0 + 5)
    assert reason.code == "pool-full"
    assert HELD in reason.text


def test_the_first_that_can_go_keeps_its_place() -> None:
    index = fleet()
    foresee(index, n1=True, n2=True, n3=True)
    assert started(index) == ["n1"]


def test_where_nobody_can_go_the_first_one_starts_all_the_same() -> None:
    index = fleet()
    foresee(index, n1=False, n2=False, n3=False)
    assert started(index) == ["n1"]
    many = fleet(nodes=AHEAD + 2)
    foresee(many, **{f"n{number}": False for number in range(1, AHEAD + 1)})
    assert started(many) == ["n1"]
    assert rehearsed(many) == []


def test_where_nobody_can_say_nobody_is_held_up() -> None:
    index = fleet()
    foresee(index, n1=None, n2=True, n3=True)
    assert started(index) == ["n1"]


def test_two_slots_are_filled_by_those_who_can_go() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    foresee(index, n1=False, n2=True, n3=True)
    assert started(index) == ["n2", "n3"]


def test_a_slot_that_nobody_better_takes_is_not_left_empty() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    foresee(index, n1=False, n2=False, n3=True)
    assert started(index) == ["n3", "n1"]


def test_a_rehearsal_grows_old() -> None:
    index = fleet()
    foresee(index, n1=False, n2=True, n3=True)
    later = T0 + GOOD_FOR_S
    assert started(index, later) == []
    assert rehearsed(index, later) == ["n1", "n2", "n3"]


def test_the_last_one_waiting_is_not_rehearsed() -> None:
    index = fleet(nodes=1)
    assert started(index) == ["n1"]


def test_a_full_pool_costs_no_rehearsal() -> None:
    index = fleet()
    admit(index, "n3")
    assert rehearsed(index) == []


def test_other_isolators_are_not_rehearsed() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index, isolate=(StepSpec("isolate.0.command", "command"),))
    assert started(index) == ["n1"]


def test_after_a_put_back_another_goes_first_and_it_is_tried_again_later() -> None:
    index = fleet(nodes=2)
    foresee(index, n1=False, n2=False)
    assert started(index) == ["n1"]
    admit(index, "n1")
    back = T0 + 10
    move(index, "n1", Trigger.PUT_BACK, at=back, not_before=back + 60, text=f"not isolated: {HELD}")
    index.observed(seen_up(index.nodes, back), back)
    foresee(index, at=back, n2=False)
    assert why(index, "R", "n1", back).code == "backoff"
    assert started(index, back) == ["n2"]
    finish(index, "n2", at=back)
    later = back + 61
    index.observed(seen_up(index.nodes, later), later)
    assert started(index, later) == ["n1"]


def test_mates_of_other_racks_go_first_as_well() -> None:
    pools = {"team": PoolRule(), "rack": PoolRule(Budget(2))}
    nodes = nodes_of({"a": ("n1", "n2")}, rack={"n1": "r1", "n2": "r2"})
    index = index_of(nodes, Limits(pools=pools))
    submit(index, isolate=(CORDON,))
    assert rehearsed(index) == ["n1", "n2"]
    foresee(index, n1=False, n2=True)
    assert started(index) == ["n2"]
