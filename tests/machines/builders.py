"""Builders of small fleets, plans and votes for the core tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.index import Index
from machines.facts.projection import Projection
from machines.model.events import GateOpened, PhaseMoved, RolloutOpened, VoteCast
from machines.model.limits import Limits
from machines.model.node import Node, NodeHealth, Observation
from machines.model.plan import (
    Capability,
    Digest,
    GateName,
    MaintainStage,
    Plan,
    StepDef,
    VoteRequirement,
    WaveDef,
)
from machines.model.reasons import Reason
from machines.model.rollout import Actor, ActorKind, Failure, Target, Vote
from machines.model.selector import Selector
from machines.rules.waves import assign_waves
from machines.scheduler.why import why
from machines.states import Outcome, Phase, Trigger, next_phase

T0 = 1_800_000_000.0
"""The first instant of every test."""

ALICE = Actor(ActorKind.PERSON, "alice", 1001)
BOB = Actor(ActorKind.PERSON, "bob", 1002)
CAROL = Actor(ActorKind.PERSON, "carol", 1003)
CORDONS = frozenset({Capability.CORDON_ONLY, Capability.DRY_RUN})
OPEN_GATES = {
    GateName.START: VoteRequirement(),
    GateName.CONTINUE: VoteRequirement(),
    GateName.PROCEED: VoteRequirement(owner=1),
}
FLEET = (WaveDef("fleet"),)
CANARY = WaveDef("canary", max_parallel=1, soak_s=600.0, gate=GateName.CONTINUE)
CANARY_THEN_FLEET = (CANARY, *FLEET)


def plan_of(**changed: Any) -> Plan:
    """Return a plan without gates and waves but the fleet, changed as asked."""
    values: dict[str, Any] = {
        "name": "sysctl",
        "owner": "infra",
        "selector": Selector(),
        "waves": FLEET,
        "stages": (MaintainStage("configure", "sysctl.yml"),),
        "verify": (StepDef("verify.0.reachable", "reachable", capabilities=frozenset(Capability)),),
        "gates": OPEN_GATES,
        "expected_s": 60.0,
    }
    return Plan(**(values | changed))


def digest_of(name: str) -> Digest:
    return Digest(change=f"{name}-c", scope=f"{name}-s", policy=f"{name}-p", whole=name)


def nodes_of(teams: Mapping[str, Iterable[str]], **labels: Mapping[str, str]) -> tuple[Node, ...]:
    """Return nodes by team; further labels are given as `rack={"n1": "r1"}`."""
    return tuple(
        Node(
            name,
            labels={"team": team} | {key: values[name] for key, values in labels.items() if name in values},
        )
        for team, names in teams.items()
        for name in names
    )


def observed_up(nodes: Iterable[Node | str], at: float) -> list[Observation]:
    return [Observation(each if isinstance(each, str) else each.name, NodeHealth.UP, at) for each in nodes]


def rollout_opened(
    rollout: str, plan: Plan, index: Projection, at: float, by: Actor = ALICE
) -> RolloutOpened:
    """Return the submit of a plan for all nodes that it selects."""
    chosen = [node for node in index.nodes.values() if plan.selector.matches(node.labels)]
    targets = tuple(
        Target(rollout, node.name, node.team, index.pools_of(node), wave, position, since=at)
        for node, wave, position in assign_waves(chosen, plan, {})
    )
    return RolloutOpened(
        rollout, plan.name, {"plan": plan}, {}, digest_of(rollout), "selector", by, at, targets
    )


def index_of(
    nodes: Iterable[Node], limits: Limits | None = None, at: float = T0, observed: bool = True
) -> Projection:
    """Return an index of these nodes, all seen up just now."""
    known = tuple(nodes)
    index = Projection.build(FactsSnapshot(nodes=known), limits or Limits(), lambda content: content["plan"])
    index.record_observations(observed_up(known, at) if observed else [], at)
    return index


def submit(
    index: Projection, rollout: str = "R", at: float = T0, opened: bool = True, **changed: Any
) -> Plan:
    """Submit a plan; `opened` opens its start gate."""
    plan = plan_of(**changed)
    index.apply(rollout_opened(rollout, plan, index, at))
    if opened:
        index.apply(GateOpened(rollout, GateName.START, "", at))
    return plan


def reason_of(index: Index, rollout: str, node: str, now: float) -> Reason:
    """Return why a node that waits does so."""
    reason = why(index, index.target(rollout, node), now)
    assert reason is not None, f"{node} does not wait"
    return reason


def vote(
    index: Projection,
    gate: GateName,
    actor: Actor = ALICE,
    *,
    rollout: str = "R",
    teams: tuple[str, ...] = ("infra",),
    at: float = T0,
    yes: bool = True,
    **more: Any,
) -> Vote:
    """Cast a vote for the rollout's digest."""
    whole = index.rollout(rollout).digest.whole
    name = f"{rollout}-v{len(index.rollout(rollout).votes) + 1}"
    digest = more.pop("digest", whole)
    new_vote = Vote(name, gate, digest, actor, yes, "because", at, teams, **more)
    index.apply(VoteCast(rollout, new_vote))
    return new_vote


def admit(index: Projection, node: str, *, rollout: str = "R", at: float = T0) -> None:
    """Admit a node."""
    transition(index, node, Trigger.ADMITTED, rollout=rollout, at=at)


def transition(
    index: Projection,
    node: str,
    trigger: Trigger,
    outcome: Outcome | None = None,
    *,
    rollout: str = "R",
    at: float = T0,
    **more: Any,
) -> None:
    """Let a node take an edge of the table."""
    target = index.target(rollout, node)
    reached = next_phase(trigger, target.phase, outcome)
    starts_attempt = trigger in (Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED)
    index.apply(
        PhaseMoved(
            rollout,
            node,
            trigger,
            target.phase,
            reached,
            target.attempt + starts_attempt,
            at,
            outcome,
            **more,
        )
    )


def finish(index: Projection, node: str, *, rollout: str = "R", at: float = T0) -> None:
    """Take a pending node all the way to done."""
    for trigger in (Trigger.ADMITTED, Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, node, trigger, rollout=rollout, at=at)
    transition(index, node, Trigger.VERIFIED, Outcome.CHANGED, rollout=rollout, at=at)


def fail(
    index: Projection, node: str, message: str = "no route", *, rollout: str = "R", at: float = T0
) -> str:
    """Admit a node and let it fail, isolated; return the failure's id."""
    target = index.target(rollout, node)
    if target.phase is Phase.PENDING:
        transition(index, node, Trigger.ADMITTED, rollout=rollout, at=at)
        target = index.target(rollout, node)
    failure = Failure(f"{node}#{target.attempt}", node, target.attempt, "run.configure", message, at)
    transition(index, node, Trigger.FAILED, rollout=rollout, at=at, failure=failure, isolated=True)
    return failure.id
