"""Dry runs: order, limits, and reasons of nodes that yield."""

from __future__ import annotations

from dataclasses import replace

from machines.facts.dry_runs import DRY_RUN_AHEAD, RESULT_MAX_AGE_S, DryRunResult
from machines.facts.projection import Projection
from machines.model.decision import Admit, DryRun
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.plan import StepDef
from machines.scheduler.decide import decide
from machines.states import Trigger
from rolloutd.texts.reason_text import describe
from tests.machines.builders import (
    CORDONS,
    T0,
    admit,
    finish,
    index_of,
    nodes_of,
    observed_up,
    reason_of,
    submit,
    transition,
)

CORDON = StepDef("isolate.0.kubernetes", "kubernetes", capabilities=CORDONS)
HELD = "payments/api-7d9 is held by budget payments/api: needs 3 healthy, has 3"


def fleet(nodes: int = 3, limits: Limits | None = None, **more: object) -> Projection:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(1, nodes + 1)]}), limits)
    submit(index, isolate=(CORDON,), **more)
    return index


def record_dry_run_result(index: Projection, at: float = T0, **can: bool | None) -> None:
    for node, able in can.items():
        index.record_dry_run(DryRunResult("R", node, able, at, HELD if able is False else ""))


def started(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).of(Admit)]


def requested_dry_runs(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).of(DryRun)]


def test_unknown_nodes_dry_run_before_admission() -> None:
    index = fleet(nodes=DRY_RUN_AHEAD + 3)
    decision = decide(index, T0)
    assert decision.of(DryRun) == tuple(DryRun("R", f"n{number}") for number in range(1, DRY_RUN_AHEAD + 1))
    assert decision.of(Admit) == ()
    assert decision.wake_at is not None


def test_who_can_go_now_goes_first() -> None:
    index = fleet()
    record_dry_run_result(index, n1=False, n2=True, n3=True)
    assert started(index) == ["n2"]
    reason = reason_of(index, "R", "n1", T0)
    assert "others go first: payments/api-7d9 is held by budget" in describe(reason)


def test_passed_over_node_gets_reason() -> None:
    index = fleet()
    record_dry_run_result(index, n1=False, n2=True, n3=True)
    admit(index, "n2")
    reason = reason_of(index, "R", "n1", T0 + 5)
    assert reason.code == "pool-full"
    assert HELD in describe(reason)


def test_the_first_that_can_go_keeps_its_place() -> None:
    index = fleet()
    record_dry_run_result(index, n1=True, n2=True, n3=True)
    assert started(index) == ["n1"]


def test_first_node_admitted_when_all_dry_runs_fail() -> None:
    index = fleet()
    record_dry_run_result(index, n1=False, n2=False, n3=False)
    assert started(index) == ["n1"]
    many = fleet(nodes=DRY_RUN_AHEAD + 2)
    record_dry_run_result(many, **{f"n{number}": False for number in range(1, DRY_RUN_AHEAD + 1)})
    assert started(many) == ["n1"]
    assert requested_dry_runs(many) == []


def test_where_nobody_can_say_nobody_is_held_up() -> None:
    index = fleet()
    record_dry_run_result(index, n1=None, n2=True, n3=True)
    assert started(index) == ["n1"]


def test_two_slots_are_filled_by_those_who_can_go() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    record_dry_run_result(index, n1=False, n2=True, n3=True)
    assert started(index) == ["n2", "n3"]


def test_a_slot_that_nobody_better_takes_is_not_left_empty() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    record_dry_run_result(index, n1=False, n2=False, n3=True)
    assert started(index) == ["n3", "n1"]


def test_a_rehearsal_grows_old() -> None:
    index = fleet()
    record_dry_run_result(index, n1=False, n2=True, n3=True)
    later = T0 + RESULT_MAX_AGE_S
    assert started(index, later) == []
    assert requested_dry_runs(index, later) == ["n1", "n2", "n3"]


def test_last_one_waiting_is_dry_run_too() -> None:
    index = fleet(nodes=1)
    assert requested_dry_runs(index) == ["n1"]
    record_dry_run_result(index, n1=False)
    assert started(index) == ["n1"]


def test_hopeless_node_waits_until_its_blocker_changes() -> None:
    index = fleet()
    hopeless = DryRunResult("R", "n1", False, T0, HELD, is_permanent=True)
    index.record_dry_run(hopeless)
    record_dry_run_result(index, n2=False, n3=True)
    assert started(index) == ["n3"]
    finish(index, "n3")
    later = T0 + RESULT_MAX_AGE_S
    index.record_observations(observed_up(index.nodes, later), later)
    record_dry_run_result(index, at=later, n2=False)
    assert started(index, later) == ["n2"]
    finish(index, "n2", at=later)
    assert (started(index, later), requested_dry_runs(index, later)) == ([], [])
    reason = reason_of(index, "R", "n1", later)
    assert reason.code == "cannot-isolate"
    assert describe(reason) == f"n1 cannot be isolated: {HELD}"

    index.forget_dry_run("R", "n1")
    assert requested_dry_runs(index, later) == ["n1"]
    record_dry_run_result(index, at=later, n1=True)
    assert started(index, later) == ["n1"]


def test_hopeless_nodes_alone_in_their_pools_take_no_slot() -> None:
    nodes = nodes_of({f"t{number}": (f"n{number}",) for number in range(1, 6)})
    index = index_of(nodes, Limits(max_parallel=2))
    submit(index, isolate=(CORDON,))
    assert requested_dry_runs(index) == ["n1", "n2", "n3", "n4", "n5"]
    for node in ("n1", "n2", "n3"):
        index.record_dry_run(DryRunResult("R", node, False, T0, HELD, is_permanent=True))
    record_dry_run_result(index, n4=True, n5=True)
    assert started(index) == ["n4", "n5"]


def test_five_hopeless_of_200_nodes_never_start() -> None:
    names = [f"n{number}" for number in range(200)]
    hopeless = set(names[:3] + names[97:99])
    nodes = nodes_of({f"t{number}": names[number::20] for number in range(20)})
    index = index_of(nodes, Limits(max_parallel=8))
    submit(index, isolate=(CORDON,))
    admitted: list[str] = []
    for _ in range(1000):
        decision = decide(index, T0)
        for each in decision.of(DryRun):
            found = DryRunResult("R", each.node, each.node not in hopeless, T0, HELD)
            index.record_dry_run(replace(found, is_permanent=each.node in hopeless))
        for each in decision.of(Admit):
            admitted.append(each.node)
            finish(index, each.node)
        if not (decision.of(DryRun) or decision.of(Admit)):
            break
    assert sorted(admitted) == sorted(set(names) - hopeless)


def test_dry_runs_are_bounded_by_free_capacity() -> None:
    nodes = nodes_of({f"t{number}": (f"n{number}",) for number in range(1, 40)})
    index = index_of(nodes, Limits(max_parallel=2))
    submit(index, isolate=(CORDON,))
    assert len(requested_dry_runs(index)) == 2 * DRY_RUN_AHEAD


def test_a_full_pool_costs_no_rehearsal() -> None:
    index = fleet()
    admit(index, "n3")
    assert requested_dry_runs(index) == []


def test_other_isolators_are_not_rehearsed() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index, isolate=(StepDef("isolate.0.command", "command"),))
    assert started(index) == ["n1"]


def test_aborted_node_backs_off_behind_others() -> None:
    index = fleet(nodes=2)
    record_dry_run_result(index, n1=False, n2=False)
    assert started(index) == ["n1"]
    admit(index, "n1")
    back = T0 + 10
    transition(
        index, "n1", Trigger.ISOLATION_ABORTED, at=back, not_before=back + 60, text=f"not isolated: {HELD}"
    )
    index.record_observations(observed_up(index.nodes, back), back)
    record_dry_run_result(index, at=back, n2=False)
    assert reason_of(index, "R", "n1", back).code == "backoff"
    assert started(index, back) == ["n2"]
    finish(index, "n2", at=back)
    later = back + 61
    index.record_observations(observed_up(index.nodes, later), later)
    record_dry_run_result(index, at=later, n1=False)
    assert started(index, later) == ["n1"]


def test_mates_of_other_racks_go_first_as_well() -> None:
    pools = {"team": PoolRule(), "rack": PoolRule(Budget(2))}
    nodes = nodes_of({"a": ("n1", "n2")}, rack={"n1": "r1", "n2": "r2"})
    index = index_of(nodes, Limits(pools=pools))
    submit(index, isolate=(CORDON,))
    assert requested_dry_runs(index) == ["n1", "n2"]
    record_dry_run_result(index, n1=False, n2=True)
    assert started(index) == ["n2"]


def test_change_of_node_makes_dry_run_void() -> None:
    index = fleet(nodes=1)
    record_dry_run_result(index, n1=True)
    assert started(index) == ["n1"]
    index.record_observations(observed_up(["n1"], T0 + 1.0), T0 + 1.0)
    assert started(index, T0 + 1.0) == ["n1"], "the same observation again"
    index.record_observations([replace(*observed_up(["n1"], T0 + 2.0), why="taints maintenance")], T0 + 2.0)
    assert started(index, T0 + 2.0) == []
    assert requested_dry_runs(index, T0 + 2.0) == ["n1"]
