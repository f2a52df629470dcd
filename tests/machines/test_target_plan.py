"""The plan as it applies to one node, and nodes for which it has no word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, ProbeTraffic
from machines.model.events import NodesDiscovered
from machines.model.node import Node, NodeKind
from machines.model.plan import Capability, StepDef
from machines.model.rollout import Target
from machines.model.selector import parse_selector
from machines.model.target_plan import plan_for_target
from machines.model.traffic import TrafficResult
from machines.scheduler.decide import decide
from machines.states import Trigger
from machines.workflow.phase_transitions import transition
from tests.machines.builders import T0, index_of, observed_up, plan_of, reason_of, submit

WORKER = Node("w1", NodeKind.KUBERNETES, labels={"role": "worker"})
WEB = Node("web1", labels={"role": "web", "team": "shop"})
DB = Node("db1", labels={"role": "db", "team": "data"})
BOTH = Node("both1", NodeKind.KUBERNETES, labels={"role": "web"})
DRAIN = StepDef("isolate.0.kubernetes", "kubernetes", node_kinds=frozenset({NodeKind.KUBERNETES}))
BALANCER = StepDef("isolate.1.haproxy", "haproxy", where=parse_selector("role=web"))
IN_SERVICE = StepDef(
    "isolate.2.none",
    "none",
    where=parse_selector("role=db"),
    capabilities=frozenset({Capability.STAYS_IN_SERVICE}),
)
PODS = replace(DRAIN, name="traffic.0.kubernetes")
CONNECTIONS = StepDef("traffic.1.ssh", "ssh", where=parse_selector("kind=host"))
REACHABLE = StepDef("verify.0.reachable", "reachable")
SERVES = StepDef("verify.1.http", "http", where=parse_selector("role=web"))
OWN = StepDef("team.shop.0.ssh", "ssh", team="shop")
FALLBACK = StepDef("rollback.verify.0.reachable", "reachable")
PLAN = plan_of(
    isolate=(DRAIN, BALANCER, IN_SERVICE),
    traffic=(PODS, CONNECTIONS),
    verify=(REACHABLE, SERVES, OWN),
    rollback_verify=(replace(SERVES, name="rollback.verify.0.http"),),
    fallback_verify=(FALLBACK,),
)


def target_of(node: str, team: str | None = None, rolling_back: bool = False) -> Target:
    return Target("R", node, team, (), "fleet", 0, rolling_back=rolling_back)


def names(steps: tuple[StepDef, ...]) -> list[str]:
    return [step.kind for step in steps]


@pytest.mark.parametrize(
    ("node", "isolate", "traffic"),
    [
        (WORKER, ["kubernetes"], ["kubernetes"]),
        (WEB, ["haproxy"], ["ssh"]),
        (BOTH, ["kubernetes", "haproxy"], ["kubernetes"]),
        (DB, [], ["ssh"]),
    ],
    ids=lambda value: value.name if isinstance(value, Node) else None,
)
def test_items_apply_by_kind_and_where(node: Node, isolate: list[str], traffic: list[str]) -> None:
    compiled = plan_for_target(PLAN, target_of(node.name, team=node.team), node)
    assert (names(compiled.isolate), names(compiled.traffic)) == (isolate, traffic)


def test_checks_are_infra_then_own_team() -> None:
    target = target_of("web1", team="shop")
    assert plan_for_target(PLAN, target, WEB).verify == (REACHABLE, SERVES, OWN)
    assert plan_for_target(PLAN, target_of("db1", team="data"), DB).verify == (REACHABLE,)
    rolling_back = replace(target, rolling_back=True)
    assert names(plan_for_target(PLAN, rolling_back, WEB).verify) == ["http", "ssh"]


def test_rolled_back_node_without_check_gets_fallback() -> None:
    target = target_of("w1", rolling_back=True)
    assert plan_for_target(PLAN, target, WORKER).verify == (FALLBACK,)


def test_isolator_in_effect_stays_after_label_change() -> None:
    relabelled = replace(WEB, labels={"role": "db"})
    target = target_of("web1")
    assert plan_for_target(PLAN, target, relabelled).isolate == ()
    assert plan_for_target(PLAN, target, relabelled, in_effect={BALANCER.name}).isolate == (BALANCER,)


def test_label_named_kind_is_shadowed() -> None:
    labelled = replace(WORKER, labels={"kind": "host"})
    assert names(plan_for_target(PLAN, target_of("w1"), labelled).traffic) == ["kubernetes"]


def fleet(*nodes: Node) -> Projection:
    index = index_of(nodes)
    submit(index, isolate=PLAN.isolate, traffic=PLAN.traffic, verify=PLAN.verify)
    for node in nodes:
        index.record_traffic(TrafficResult("R", node.name, False, T0))
    return index


def test_joined_node_without_isolator_never_starts() -> None:
    index = fleet(WEB, replace(WEB, name="web2"))
    index.apply(NodesDiscovered((replace(WEB, labels={"role": "cache", "team": "shop"}),)))
    assert [each.node for each in decide(index, T0).of(Admit)] == ["web2"]
    assert reason_of(index, "R", "web1", T0).code == "no-isolator"
    admitted = transition(index.target("R", "web1"), Trigger.ADMITTED, T0)
    assert "no isolator of the plan applies" in (violation(index, admitted, T0) or "")


def test_node_without_check_never_starts() -> None:
    index = index_of((DB,))
    submit(index, verify=(SERVES,))
    assert decide(index, T0).of(Admit) == ()
    assert reason_of(index, "R", "db1", T0).code == "no-check"


def test_node_without_probe_starts_unprobed() -> None:
    index = index_of((WORKER, WEB))
    submit(index, traffic=(PODS,))
    index.record_observations(observed_up(["w1", "web1"], T0), T0)
    decision = decide(index, T0)
    assert [each.node for each in decision.of(Admit)] == ["web1"]
    assert [each.node for each in decision.of(ProbeTraffic)] == ["w1"]
