"""Traffic: only idle nodes start; busy nodes yield and are probed rarely."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, CheckIfCurrent, DryRun, ProbeTraffic
from machines.model.events import PhaseMoved, RolloutCancelled
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.plan import DEFAULT_POLL_S, StepDef, WaveDef
from machines.model.traffic import (
    IDLE_MAX_AGE_S,
    PROBE_AHEAD,
    REPROBE_MAX_S,
    REPROBE_UNKNOWN_MAX_S,
    TrafficResult,
)
from machines.scheduler.decide import decide
from machines.scheduler.decided_events import events_of
from machines.scheduler.why import why
from machines.states import Trigger
from machines.workflow.phase_transitions import transition as moved
from rolloutd.texts.reason_text import describe, lifted_by
from tests.machines.builders import (
    ALICE,
    CORDONS,
    T0,
    admit,
    index_of,
    nodes_of,
    observed_up,
    reason_of,
    submit,
)

JOBS = StepDef("traffic.0.kubernetes", "kubernetes", {"pods": "kind=job"})
COMMAND = StepDef("isolate.0.command", "command")
TRAIN = "pod batch/train-7 (Job train) runs there"


def fleet(nodes: int = 3, limits: Limits | None = None, **more: object) -> Projection:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(1, nodes + 1)]}), limits)
    submit(index, **{"traffic": (JOBS,), "isolate": (COMMAND,), **more})
    return index


def record_probe(index: Projection, at: float = T0, **busy: bool | None) -> None:
    said = {True: f"is busy: {TRAIN}", None: "cannot be judged: nobody can say", False: "is idle"}
    for node, word in busy.items():
        index.record_traffic(TrafficResult("R", node, word, at, f"{node} {said[word]}"))


def started(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).of(Admit)]


def requested_probes(index: Projection, now: float = T0) -> list[str]:
    return [each.node for each in decide(index, now).of(ProbeTraffic)]


def test_unprobed_nodes_wait_and_few_probed() -> None:
    index = fleet(nodes=PROBE_AHEAD + 3)
    decision = decide(index, T0)
    assert decision.of(Admit) == ()
    assert decision.of(ProbeTraffic) == tuple(
        ProbeTraffic("R", f"n{number}") for number in range(1, PROBE_AHEAD + 1)
    )
    assert decision.wake_at is not None
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, describe(reason)) == (
        "traffic-unknown",
        "n1 is being probed for client traffic",
    )


def test_plan_without_probes_probes_nothing() -> None:
    index = fleet(traffic=())
    assert (started(index), requested_probes(index)) == (["n1"], [])


def test_idle_node_admitted_before_busy_node() -> None:
    index = fleet()
    record_probe(index, n1=True, n2=False, n3=False)
    assert started(index) == ["n2"]
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, describe(reason), reason.since) == ("traffic", f"n1 is busy: {TRAIN}", T0)
    assert lifted_by(reason).startswith("the end of that traffic; the next probe is at about 20")


def test_unprobed_node_keeps_queue_position() -> None:
    index = fleet()
    record_probe(index, n2=False, n3=False)
    assert started(index) == []
    record_probe(index, n1=False)
    assert started(index) == ["n1"]


def test_unknown_traffic_blocks_with_own_reason() -> None:
    index = fleet(nodes=1)
    record_probe(index, n1=None)
    assert started(index) == []
    reason = reason_of(index, "R", "n1", T0)
    assert (reason.code, describe(reason)) == ("traffic-unknown", "n1 cannot be judged: nobody can say")
    assert why(index, index.rollout("R"), T0) == reason
    assert decide(index, T0).reasons["R"] == reason


def test_idle_result_expires() -> None:
    index = fleet(nodes=1)
    record_probe(index, n1=False)
    later = T0 + IDLE_MAX_AGE_S
    assert started(index, later - 1) == ["n1"]
    assert (started(index, later), requested_probes(index, later)) == ([], ["n1"])


def test_busy_node_probe_interval_grows() -> None:
    index = fleet(nodes=1)
    record_probe(index, n1=True)
    decision = decide(index, T0)
    assert (decision.of(ProbeTraffic), decision.wake_at) == ((), T0 + DEFAULT_POLL_S)
    assert requested_probes(index, T0 + DEFAULT_POLL_S) == ["n1"]
    seen_at, waits = T0, []
    for _ in range(12):
        told = index.traffic_of("R", "n1")
        assert told is not None
        waits.append(told.reprobe_at(is_contested=True) - seen_at)
        seen_at = told.reprobe_at(is_contested=True)
        record_probe(index, at=seen_at, n1=True)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (DEFAULT_POLL_S, REPROBE_MAX_S)
    index.record_observations(observed_up(index.nodes, seen_at), seen_at)
    assert reason_of(index, "R", "n1", seen_at).since == T0


def test_unknown_traffic_probed_again_soon() -> None:
    index = fleet(nodes=1)
    for after_s in (0.0, 5000.0):
        record_probe(index, at=T0 + after_s, n1=None)
    told = index.traffic_of("R", "n1")
    assert told is not None
    assert told.reprobe_at(is_contested=True) == T0 + 5000.0 + REPROBE_UNKNOWN_MAX_S


def test_reprobing_busy_node_does_not_block_others() -> None:
    index = fleet()
    record_probe(index, n1=True)
    later = T0 + DEFAULT_POLL_S
    record_probe(index, at=later, n2=False)
    decision = decide(index, later)
    assert [each.node for each in decision.of(ProbeTraffic)] == ["n1"]
    assert [start.node for start in decision.of(Admit)] == ["n2"]


def test_full_pool_and_rollout_not_probed() -> None:
    index = fleet()
    record_probe(index, n3=False)
    admit(index, "n3")
    assert requested_probes(index) == []
    wide = Limits(pools={"team": PoolRule(Budget(50))})
    assert requested_probes(fleet(nodes=30, limits=wide, max_parallel=0)) == []


def test_probe_count_independent_of_pool_count() -> None:
    index = index_of(nodes_of({f"t{number}": [f"n{number}"] for number in range(100)}))
    submit(index, traffic=(JOBS,), waves=(WaveDef("canary", max_parallel=1), WaveDef("fleet")))
    assert len(requested_probes(index)) == PROBE_AHEAD


def test_probing_continues_until_idle_node_found() -> None:
    index, now = fleet(nodes=20), T0
    for _ in range(40):
        index.record_observations(observed_up(index.nodes, now), now)
        probed = requested_probes(index, now)
        assert len(probed) <= PROBE_AHEAD, "few candidates in one poll"
        for node in probed:
            record_probe(index, at=now, **{node: node != "n17"})
        assert requested_probes(index, now) == [], "no more before the next poll"
        if started(index, now):
            break
        now = decide(index, now).wake_at or now
    assert started(index, now) == ["n17"]


@pytest.mark.parametrize("idle_for_s", [0.0, 30.0])
def test_last_candidates_probed_each_poll(idle_for_s: float) -> None:
    index, now = fleet(nodes=PROBE_AHEAD, idle_for_s=idle_for_s, poll_s=5.0), T0
    for _ in range(200):
        assert len(requested_probes(index, now)) == PROBE_AHEAD
        record_probe(index, at=now, **{f"n{number}": True for number in range(1, PROBE_AHEAD + 1)})
        now += 5.0
        index.record_observations(observed_up(index.nodes, now), now)
    reason = reason_of(index, "R", "n1", now)
    assert reason.remedy is not None
    assert reason.remedy.until is None, "it is probed now"


def test_node_starts_after_idle_for_in_a_row() -> None:
    index = fleet(nodes=1, idle_for_s=30.0)
    seen = []
    for after_s, busy in ((0, False), (15, True), (30, False), (45, False), (60, False)):
        index.record_observations(observed_up(index.nodes, T0 + after_s), T0 + after_s)
        assert requested_probes(index, T0 + after_s) == ["n1"]
        record_probe(index, at=T0 + after_s, n1=busy)
        seen.append(started(index, T0 + after_s))
    assert seen == [[], [], [], [], ["n1"]]


def test_idle_for_is_a_reason_and_an_invariant() -> None:
    index = fleet(nodes=1, idle_for_s=30.0)
    record_probe(index, at=T0, n1=False)
    record_probe(index, at=T0 + 15, n1=False)
    reason = reason_of(index, "R", "n1", T0 + 15)
    assert (reason.code, describe(reason)) == ("traffic", "n1 has been idle for 15s of 30s")
    admitted = moved(index.target("R", "n1"), Trigger.ADMITTED, T0 + 15)
    assert "it was idle for 15 s, not 30 s" in (violation(index, admitted, T0 + 15) or "")
    record_probe(index, at=T0 + 30, n1=False)
    assert violation(index, admitted, T0 + 30) is None


def test_gap_between_idle_results_breaks_the_row() -> None:
    index = fleet(nodes=1, idle_for_s=30.0)
    record_probe(index, at=T0, n1=False)
    later = T0 + IDLE_MAX_AGE_S + 1
    index.record_observations(observed_up(index.nodes, later), later)
    record_probe(index, at=later, n1=False)
    assert started(index, later) == []


def test_candidate_idle_long_enough_goes_before_earlier_one() -> None:
    index = fleet(nodes=2, idle_for_s=30.0)
    for after_s, busy in ((0, True), (15, False), (30, False)):
        record_probe(index, at=T0 + after_s, n1=busy, n2=False)
    assert started(index, T0 + 30) == ["n2"]


def test_busy_nodes_not_probed_until_due() -> None:
    index = fleet(nodes=PROBE_AHEAD)
    record_probe(index, **{f"n{number}": True for number in range(1, PROBE_AHEAD + 1)})
    index.record_backoffs(decide(index, T0).backoffs)
    assert not index.pending_groups.ready("R", "fleet")
    assert decide(index, T0 + 1).wake_at == T0 + DEFAULT_POLL_S
    assert len(requested_probes(index, T0 + DEFAULT_POLL_S)) == PROBE_AHEAD


def test_maybe_current_checked_before_probe() -> None:
    facts = fleet(nodes=1).snapshot()
    perhaps = tuple(replace(target, maybe_current=True) for target in facts.targets)
    index = Projection.build(replace(facts, targets=perhaps), Limits())
    index.record_observations(observed_up(index.nodes, T0), T0)
    record_probe(index, n1=True)
    decision = decide(index, T0)
    assert (decision.of(CheckIfCurrent), decision.of(ProbeTraffic)) == ((CheckIfCurrent("R", "n1"),), ())


def test_maybe_current_but_isolated_starts_without_a_check() -> None:
    facts = fleet(nodes=1).snapshot()
    retried = tuple(replace(target, maybe_current=True, isolated=True) for target in facts.targets)
    index = Projection.build(replace(facts, targets=retried), Limits())
    index.record_observations(observed_up(index.nodes, T0), T0)
    record_probe(index, n1=False)
    decision = decide(index, T0)
    assert (decision.of(CheckIfCurrent), [each.node for each in decision.of(Admit)]) == ((), ["n1"])


def test_observe_mode_probes_and_starts_nothing() -> None:
    index = fleet(limits=Limits(observe_only=True))
    assert requested_probes(index) == ["n1", "n2", "n3"]
    record_probe(index, n1=True, n2=False, n3=False)
    assert started(index) == []
    assert reason_of(index, "R", "n1", T0).code == "traffic"
    assert reason_of(index, "R", "n2", T0).code == "observe-only"


def test_two_slots_are_filled_by_idle_nodes() -> None:
    index = fleet(limits=Limits(pools={"team": PoolRule(Budget(2))}))
    record_probe(index, n1=False, n2=True, n3=False)
    assert started(index) == ["n1", "n3"]


def test_only_idle_nodes_get_dry_run() -> None:
    index = fleet(isolate=(StepDef("isolate.0.kubernetes", "kubernetes", capabilities=CORDONS),))
    record_probe(index, n1=True, n2=False, n3=False)
    assert [each.node for each in decide(index, T0).of(DryRun)] == ["n2", "n3"]


def test_traffic_forgotten_with_rollout() -> None:
    index = fleet(nodes=1)
    record_probe(index, n1=True)
    index.apply(RolloutCancelled("R", ALICE, "tests", T0))
    record_probe(index, n1=True)
    assert index.traffic == ()


@pytest.mark.parametrize(
    ("busy", "age_s", "words"),
    [
        (False, 0.0, None),
        (True, 0.0, f"a traffic probe reports: n1 is busy: {TRAIN}"),
        (None, 0.0, "nobody can say"),
        (False, IDLE_MAX_AGE_S, "its client traffic was not probed"),
        (False, -1.0, "its client traffic was not probed"),
        (False, math.inf, "its client traffic was not probed"),
    ],
)
def test_invariants_reject_start_without_fresh_probe(
    busy: bool | None, age_s: float, words: str | None
) -> None:
    index = fleet(nodes=1)
    if not math.isinf(age_s):
        record_probe(index, at=T0 - age_s, n1=busy)
    index.advance(T0)
    found = violation(index, moved(index.target("R", "n1"), Trigger.ADMITTED, T0), T0)
    assert found is None if words is None else words in str(found)


def test_admission_says_how_long_traffic_kept_the_node() -> None:
    index = fleet(nodes=2)
    for at, busy in ((T0, True), (T0 + 20.0, None), (T0 + 30.0, False), (T0 + 40.0, False)):
        record_probe(index, at, n1=busy)
    record_probe(index, T0 + 40.0, n2=False)
    index.advance(T0 + 40.0)
    (group,) = events_of(index, decide(index, T0 + 40.0), T0 + 40.0, lambda causes: "")
    (event,) = group.events
    assert isinstance(event, PhaseMoved)
    assert (event.node, event.trigger, event.busy_s) == ("n1", Trigger.ADMITTED, 30.0)


def test_admission_without_probes_has_no_busy_time() -> None:
    index = fleet(nodes=1, traffic=())
    (group,) = events_of(index, decide(index, T0), T0, lambda causes: "")
    (event,) = group.events
    assert isinstance(event, PhaseMoved)
    assert (event.trigger, event.busy_s) == (Trigger.ADMITTED, None)


def test_distant_probes_do_not_count_as_busy_in_between() -> None:
    index = fleet(nodes=1)
    record_probe(index, T0, n1=True)
    record_probe(index, T0 + 9000.0, n1=False)
    result = index.traffic_of("R", "n1")
    assert result is not None
    assert result.busy_s == REPROBE_MAX_S
