"""Changes of other kinds than playbooks: which nodes and runners they need, and their rollback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.actions import RunPlaybook, Transition
from machines.model.decision import Admit, Observe, RollBack
from machines.model.events import NodesDiscovered, NodesRemoved, PhaseMoved, RolloutCancelled
from machines.model.limits import Budget, Limits, PoolRule, RunnerProblem
from machines.model.node import Conflict, ConflictKind, Node, NodeHealth, NodeKind, Observation
from machines.model.plan import PLAYBOOK_RUN, Capability, GateName, MaintainStage, OnFailure, StepDef
from machines.model.reasons import Remedy, RemedyKind
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.scheduler.decide import decide
from machines.states import Outcome, Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from rolloutd.texts.reason_text import describe
from tests.machines.builders import (
    ALICE,
    T0,
    admit,
    fail,
    finish,
    index_of,
    nodes_of,
    observed_up,
    plan_of,
    reason_of,
    submit,
    transition,
    vote,
)

NET = MaintainStage("net", kind="flux", params={"pin": "2"}, node_kinds=frozenset({NodeKind.CLUSTER}))
APP = replace(NET, name="app")
UNDO = (
    replace(APP, name="rollback.app", undoes="run.app"),
    replace(NET, name="rollback.net", undoes="run.net"),
)
PLAN = plan_of(stages=(NET, APP), rollback=UNDO, verify=())
ADMITTED_C1 = PhaseMoved("R", "c1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, 1, T0)
CLUSTERS = [Node("c1", NodeKind.CLUSTER, labels={"team": "infra"})]


def ran(step: str, state: StepState, prior: str | None, attempt: int = 1) -> StepRecord:
    return StepRecord("R", "c1", attempt, step, StepAction.RUN, 1, state, T0, T0, handle="h", prior=prior)


def undoing(*records: StepRecord) -> list[tuple[str, str]]:
    """Return the steps of a rollback in the second attempt, each with what it restores."""
    target = Target("R", "c1", "infra", (), "fleet", 0, since=T0, phase=Phase.MAINTAINING, attempt=2)
    done, steps = list(records), []
    for _ in UNDO:
        situation = Situation(PLAN, replace(target, rolling_back=True), done, T0, 0.0)
        action = next_action(situation)
        if isinstance(action, Transition):
            break
        assert isinstance(action, RunPlaybook)
        steps.append((action.stage.step, action.previous))
        done.append(ran(action.stage.step, StepState.OK, None, attempt=2))
    return steps


@pytest.mark.parametrize("state", [StepState.OK, StepState.FAILED, StepState.UNKNOWN, StepState.INTENDED])
def test_rollback_restores_latest_stage_first(state: StepState) -> None:
    records = ran("run.net", StepState.OK, "net 1"), ran("run.app", state, "app 1")
    assert undoing(*records) == [("run.rollback.app", "app 1"), ("run.rollback.net", "net 1")]


def test_stage_that_never_began_is_not_undone() -> None:
    refused = replace(ran("run.app", StepState.FAILED, "app 1"), code=FailureCode.NEVER_STARTED)
    assert undoing(ran("run.net", StepState.OK, "net 1"), refused) == [("run.rollback.net", "net 1")]
    assert undoing() == []


def test_repeated_change_is_undone_by_first_state() -> None:
    first, second = ran("run.net", StepState.OK, "net 1"), ran("run.net", StepState.OK, "net 2", attempt=2)
    assert undoing(first, second)[-1] == ("run.rollback.net", "net 1")


def test_change_waits_for_runner_of_its_kind_only() -> None:
    index = index_of(CLUSTERS)
    submit(index, stages=(NET,))
    index.record_runner_problems({"flux": RunnerProblem("no answer", T0), "local": RunnerProblem("full", T0)})
    reason = reason_of(index, "R", "c1", T0)
    assert (reason.code, reason.params["runner"]) == ("runner-down", "flux")
    index.record_runner_problems({"local": RunnerProblem("full", T0)})
    assert reason_of(index, "R", "c1", T0).code == "starting"


def hubs(workers: int | None = None) -> Projection:
    """Return an open rollout over four clusters, two of each hub."""
    sources = {"c1": "a/hub", "c2": "a/hub", "c3": "a/other", "c4": "a/other"}
    nodes = [Node(name, NodeKind.CLUSTER, (source,)) for name, source in sources.items()]
    limits = Limits(pools={}, workers={} if workers is None else {"a/hub": workers})
    index = index_of(nodes, limits=limits)
    index.record_observations(observed_up(nodes, T0), T0)
    submit(index, stages=(NET,), max_parallel=9)
    return index


def starts(index: Projection) -> list[str]:
    return [each.node for each in decide(index, T0).of(Admit)]


def test_silent_hub_stops_only_its_own_clusters() -> None:
    index = hubs()
    index.record_runner_problems({"flux@a/hub": RunnerProblem("no answer", T0)})
    assert starts(index) == ["c3", "c4"]
    reason = reason_of(index, "R", "c1", T0)
    assert (reason.code, reason.params["runner"]) == ("runner-down", "flux@a/hub")
    index.record_runner_problems({"flux@c4": RunnerProblem("no answer", T0)})
    assert starts(index) == ["c1", "c2", "c3"]


def test_workers_bound_changes_of_their_hub() -> None:
    index = hubs(workers=1)
    assert starts(index) == ["c1", "c3", "c4"]
    admit(index, "c1")
    index.record_backoffs(decide(index, T0).backoffs)
    reason = reason_of(index, "R", "c2", T0)
    assert (reason.code, reason.params["runner"], reason.params["parallel"]) == ("runner-full", "a/hub", 1)
    transition(index, "c1", Trigger.ISOLATION_ABORTED)
    assert starts(index) == ["c1", "c3", "c4"]


def test_change_waits_for_nodes_of_its_kind() -> None:
    index = index_of(nodes_of({"infra": ["n1"]}))
    submit(index, stages=(NET,))
    assert reason_of(index, "R", "n1", T0).code == "no-change"


def test_plan_needs_runners_of_all_its_runs() -> None:
    assert PLAN.run_kinds == {"flux"}
    check = StepDef("verify.0.playbook", "playbook", capabilities=frozenset({Capability.STARTS_RUN}))
    assert plan_of(stages=(NET,), verify=(check,)).run_kinds == {"flux", PLAYBOOK_RUN}
    repaired = StepDef("verify.0.http", "http", repair="fix.yml")
    assert plan_of(stages=(NET,), verify=(repaired,)).run_kinds == {"flux", PLAYBOOK_RUN}
    assert plan_of(stages=(NET,), rollback=(MaintainStage("rollback", "undo.yml"),)).run_kinds == {
        "flux",
        PLAYBOOK_RUN,
    }


def test_bootstrap_reaches_cluster_that_is_not_available() -> None:
    index = index_of(CLUSTERS, observed=False)
    index.record_observations([Observation("c1", NodeHealth.DOWN, T0, "WorkersAvailable: no nodes")], T0)
    submit(index, stages=(NET,))
    assert reason_of(index, "R", "c1", T0).code == "node-down"
    submit(index, "B", stages=(NET,), bootstrap=True, name="network")
    assert reason_of(index, "B", "c1", T0).code == "starting"
    assert [each.node for each in decide(index, T0).of(Admit)] == ["c1"]


def test_invariants_allow_bootstrap_of_clusters_only() -> None:
    nodes = [*CLUSTERS, Node("n1", labels={"team": "hosts"}), Node("c2", NodeKind.CLUSTER)]
    index = index_of(nodes, observed=False)
    health = {"c1": NodeHealth.DOWN, "n1": NodeHealth.DOWN, "c2": NodeHealth.UNKNOWN}
    index.record_observations([Observation(name, seen, T0) for name, seen in health.items()], T0)
    submit(index, bootstrap=True)

    def problem(node: str) -> str | None:
        return violation(index, replace(ADMITTED_C1, node=node), T0)

    assert problem("c1") is None
    assert all("says that it is up" in str(problem(node)) for node in ("n1", "c2"))


def test_bootstrap_changes_no_host_that_is_down() -> None:
    index = index_of(nodes_of({"infra": ["n1"]}), observed=False)
    index.record_observations([Observation("n1", NodeHealth.DOWN, T0, "no answer")], T0)
    submit(index, bootstrap=True)
    assert reason_of(index, "R", "n1", T0).code == "node-down"


def test_bootstrap_stays_in_budget_of_pool() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)]
    index = index_of(clusters, observed=False)
    index.record_observations([Observation(each.name, NodeHealth.DOWN, T0, "new") for each in clusters], T0)
    submit(index, stages=(NET,), bootstrap=True)
    assert [each.node for each in decide(index, T0).of(Admit)] == ["c0"]
    index.update_limits(Limits(pools={"team": PoolRule(Budget(2))}))
    assert [each.node for each in decide(index, T0).of(Admit)] == ["c0", "c1"]


def test_cluster_that_is_away_holds_no_peer() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)]
    index = index_of(clusters)
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0, "no answer")], T0)
    submit(index, stages=(NET,))
    assert reason_of(index, "R", "c0", T0).code == "node-down"
    assert reason_of(index, "R", "c1", T0).code == "starting"


def skip(index: Projection, node: str) -> None:
    index.record_observations([Observation(node, NodeHealth.UP, T0)], T0)
    fail(index, node)
    vote(index, GateName.PROCEED, shown=[each.id for each in index.rollout("R").failures])
    transition(index, node, Trigger.SKIPPED, Outcome.SKIPPED, isolated=False)


def retry(index: Projection, node: str) -> None:
    fail(index, node)
    vote(index, GateName.PROCEED, shown=[each.id for each in index.rollout("R").failures])
    transition(index, node, Trigger.RETRIED, isolated=False)


def roll_back(index: Projection, node: str) -> None:
    finish(index, node)
    transition(index, node, Trigger.ROLLBACK_ORDERED, rolling_back=True)
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, node, trigger, rolling_back=True)
    transition(index, node, Trigger.VERIFIED, Outcome.ROLLED_BACK)


def let_drift(index: Projection, node: str) -> None:
    finish(index, node)
    transition(index, node, Trigger.DRIFTED)


@pytest.mark.parametrize("work", [finish, skip, retry, roll_back, let_drift])
def test_cluster_that_a_rollout_worked_on_counts_as_down(work: Callable[[Projection, str], None]) -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)]
    index = index_of(clusters)
    submit(index, stages=(NET,))
    work(index, "c0")
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0, "no answer")], T0)
    assert reason_of(index, "R", "c1", T0).code == "peer-down"
    assert "has 1 node down (c0)" in str(violation(index, ADMITTED_C1, T0))


def test_broken_cluster_counts_after_its_rollout_is_forgotten() -> None:
    index = index_of([Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)])
    submit(index, stages=(NET,))
    finish(index, "c0")
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0, "no answer")], T0)
    index.apply(RolloutCancelled("R", ALICE, "it breaks clusters", T0))
    restarted = Projection.build(replace(index.snapshot(), rollouts=(), targets=()), Limits(), index._compile)
    index.forget_rollout("R")
    restarted.record_observations_of(index)
    for facts in (index, restarted):
        submit(facts, "R", stages=(NET,), name="fixed")
        assert reason_of(facts, "R", "c1", T0).code == "peer-down"
        assert "has 1 node down (c0)" in str(violation(facts, ADMITTED_C1, T0))


def test_broken_cluster_counts_when_it_comes_back() -> None:
    index = index_of([Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)])
    submit(index, stages=(NET,))
    finish(index, "c0")
    index.apply(RolloutCancelled("R", ALICE, "it breaks clusters", T0))
    node = index.nodes["c0"]
    index.apply(NodesRemoved(("c0",)))
    index.forget_rollout("R")
    index.apply(NodesDiscovered((node,)))
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0, "no answer")], T0)
    submit(index, stages=(NET,), name="fixed")
    assert reason_of(index, "R", "c1", T0).code == "peer-down"


@pytest.mark.parametrize(("after_s", "counts"), [(3600.0, True), (100_000.0, False)])
def test_cluster_that_goes_away_long_after_work_holds_no_peer(after_s: float, *, counts: bool) -> None:
    index = index_of([Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(3)])
    submit(index, stages=(NET,))
    finish(index, "c0")
    now = T0 + after_s
    away = Conflict(ConflictKind.OUT_OF_SERVICE, "status", {"hub": "offline"}, now)
    index.apply(NodesDiscovered((replace(index.nodes["c0"], conflicts=(away,)),)))
    index.record_observations([*observed_up(["c1", "c2"], now), Observation("c0", NodeHealth.DOWN, now)], now)
    assert reason_of(index, "R", "c1", now).code == ("peer-down" if counts else "starting")
    assert (violation(index, ADMITTED_C1, now) is not None) is counts


def test_paused_cluster_holds_no_peer() -> None:
    paused = Conflict(ConflictKind.OUT_OF_SERVICE, "status", {"hub": "paused"}, T0)
    first = Node("c0", NodeKind.CLUSTER, labels={"team": "infra"}, conflicts=(paused,))
    others = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in (1, 2)]
    index = index_of([first, *others])
    locked = Observation("c0", NodeHealth.UP, T0, "it is paused", cordoned_by_other=True, is_locked=True)
    index.record_observations([locked], T0)
    submit(index, stages=(NET,))
    assert reason_of(index, "R", "c0", T0).code == "quarantined"
    assert reason_of(index, "R", "c1", T0).code == "starting"
    index.apply(NodesDiscovered((replace(first, conflicts=()),)))
    assert reason_of(index, "R", "c1", T0).code == "peer-down", "Cluster API works on it"


def test_failed_and_unready_targets_count_in_strategy() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in range(5)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=2)

    def starts() -> list[str]:
        return [each.node for each in decide(index, T0).of(Admit)]

    assert starts() == ["c0", "c1"]
    failure = fail(index, "c0")
    vote(index, GateName.PROCEED, shown=(failure,))
    assert starts() == ["c1"], "a failed target counts when the rollout goes on"
    admit(index, "c1")
    reason = reason_of(index, "R", "c2", T0)
    assert (reason.code, reason.params["scope"], reason.params["in_flight"]) == ("max-parallel", "unready", 2)


def test_done_target_that_is_not_ready_counts_in_strategy() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in range(4)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1)
    finish(index, "c0")
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0, "WorkersAvailable")], T0)
    assert not decide(index, T0).of(Admit)
    ready = [Observation("c0", NodeHealth.UP, T0), Observation("c3", NodeHealth.DOWN, T0, "offline")]
    index.record_observations(ready, T0)
    assert [each.node for each in decide(index, T0).of(Admit)] == ["c1"], "a pending one stops nobody else"


@pytest.mark.parametrize("work", [finish, skip, retry, roll_back, let_drift])
@pytest.mark.parametrize("health", [NodeHealth.DOWN, NodeHealth.UNKNOWN])
def test_changed_target_that_is_not_ready_counts_in_strategy(
    work: Callable[[Projection, str], None], health: NodeHealth
) -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in range(2)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1)
    work(index, "c0")
    index.record_observations([Observation("c0", health, T0, "no answer")], T0)
    assert not decide(index, T0).of(Admit)
    assert "maxUnready is 1" in str(violation(index, ADMITTED_C1, T0))
    index.record_observations([Observation("c0", NodeHealth.UP, T0)], T0)
    assert violation(index, ADMITTED_C1, T0) is None
    assert decide(index, T0).of(Admit)


def test_unready_target_is_observed_again_until_it_is_ready() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in range(3)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1)
    finish(index, "c0")
    index.record_observations([Observation("c0", NodeHealth.DOWN, T0)], T0)
    later = T0 + 300.0
    index.advance(later)
    decision = decide(index, later)
    assert (decision.of(Admit), [each.node for each in decision.of(Observe)]) == ((), ["c0"])
    index.record_observations(observed_up(["c0", "c1"], later), later)
    assert [each.node for each in decide(index, later).of(Admit)] == ["c1"]
    index.record_observations(observed_up(["c1", "c2"], later + 300.0), later + 300.0)
    assert decide(index, later + 300.0).of(Admit), "one that was last seen ready is ready"


def test_pinned_target_that_is_down_is_not_unready() -> None:
    index = index_of(nodes_of({"t0": ["n0"], "t1": ["n1"]}))
    index.record_observations([Observation("n0", NodeHealth.DOWN, T0)], T0)
    submit(index, max_unready=1)
    transition(index, "n0", Trigger.SKIPPED, Outcome.SKIPPED)
    assert [each.node for each in decide(index, T0).of(Admit)] == ["n1"]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_isolated_target_tried_again_waits_only_for_others(*, bootstrap: bool) -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in (1, 2)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1, bootstrap=bootstrap)
    failure = fail(index, "c2")
    vote(index, GateName.PROCEED, shown=(failure,))
    transition(index, "c2", Trigger.RETRIED, isolated=not bootstrap)
    index.record_observations([Observation("c2", NodeHealth.DOWN, T0 + 1, "no answer")], T0 + 1)
    assert [each.node for each in decide(index, T0 + 1).of(Admit)] == ["c2"]
    reason = reason_of(index, "R", "c1", T0 + 1)
    assert (reason.code, reason.params["scope"], reason.params["in_flight"]) == ("max-parallel", "unready", 1)
    assert reason_of(index, "R", "c2", T0 + 1).code == "starting"
    assert "1 targets are unready (c2)" in str(violation(index, ADMITTED_C1, T0 + 1))


def test_unready_targets_name_each_other_and_what_ends_it() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in (1, 2, 3)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1, bootstrap=True)
    for name in ("c1", "c2"):
        vote(index, GateName.PROCEED, shown=(fail(index, name),))
        transition(index, name, Trigger.RETRIED)
    index.record_observations([Observation(name, NodeHealth.DOWN, T0 + 1) for name in ("c1", "c2")], T0 + 1)
    assert not decide(index, T0 + 1).of(Admit)
    for name, other in (("c1", "c2"), ("c2", "c1")):
        reason = reason_of(index, "R", name, T0 + 1)
        assert (reason.params["in_flight"], reason.params["nodes"]) == (1, (other,))
        assert describe(reason) == f"1 target of R unready ({other}); maxUnready is 1"
        assert reason.remedy == Remedy(RemedyKind.WAIT_FOR_HEALTH, {"node": other})
    index.record_observations([Observation("c2", NodeHealth.UP, T0 + 1)], T0 + 1)
    assert [each.node for each in decide(index, T0 + 1).of(Admit)] == ["c1"]
    admit(index, "c1")
    assert reason_of(index, "R", "c3", T0 + 1).remedy == Remedy(RemedyKind.WAIT_FOR_CAPACITY)


def test_failed_target_that_counts_as_unready_is_to_be_settled() -> None:
    clusters = [Node(f"c{number}", NodeKind.CLUSTER, labels={"team": f"t{number}"}) for number in (1, 2)]
    index = index_of(clusters)
    submit(index, stages=(NET,), max_unready=1)
    vote(index, GateName.PROCEED, shown=(fail(index, "c1"),))
    remedy = reason_of(index, "R", "c2", T0).remedy
    assert remedy is not None
    assert (remedy.kind, remedy.args["node"]) == (RemedyKind.RETRY, "c1")


def test_target_with_other_values_waits_but_is_rolled_back() -> None:
    index = index_of(CLUSTERS)
    submit(index, stages=(NET,), rollback=UNDO[1:], on_failure=OnFailure.ROLLBACK_NODE)
    index.record_changed_values({("R", "c1"): (("host", "a", "b"),)})
    assert reason_of(index, "R", "c1", T0).code == "values-changed"
    assert "not those of the vote" in str(violation(index, ADMITTED_C1, T0))
    fail(index, "c1")
    assert [each.node for each in decide(index, T0).of(RollBack)] == ["c1"]


def test_rollback_of_failed_target_needs_no_place_in_strategy() -> None:
    index = index_of([Node(f"c{number}", NodeKind.CLUSTER, labels={"team": "infra"}) for number in range(2)])
    submit(index, stages=(NET,), rollback=UNDO[1:], on_failure=OnFailure.ROLLBACK_NODE, max_unready=1)
    fail(index, "c0")
    assert [each.node for each in decide(index, T0).of(RollBack)] == ["c0"]
