"""Why a node counts as down: one judgement over the facts of one node.

Our own work, a failure, an isolation, a hold, an outage or a cordon by another tool takes a node out of
service.  A node without a fresh observation is unknown, because nothing shows that it is up.
machines/rules/pools.py decides what that means for a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from machines.facts.fleet_facts import FleetFacts
from machines.model.node import ConflictKind, NodeHealth, NodeKind, Observation
from machines.model.reasons import Param, Remedy, RemedyKind, UnavailabilityCause
from machines.model.rollout import Hold, NodeOrder, Rollout, Target
from machines.states import IN_FLIGHT_PHASES, Phase

CAUSE_PRECEDENCE: Final = {code: rank for rank, code in enumerate(UnavailabilityCause)}
"""Precedence of causes: our own work first, unknown last."""

TAKEN_BY_OTHERS: Final = frozenset(
    {UnavailabilityCause.CORDONED_BY_OTHER, UnavailabilityCause.LOCKED_BY_OTHER}
)
"""Causes that are another tool's or user's will."""

BLAMED_FOR_S: Final = 86_400.0
"""A cluster that goes away later after our work was not broken by it: that shows within a day."""


@dataclass(frozen=True, slots=True)
class Unavailability:
    """Why a node counts as down; `cause` is the fact that says so, None without an observation.

    `needs_observation`: the last observation is too old, precedes the end of our work, or is missing.
    `rollout`: that of the target, which decides what can be done about a failed node.
    """

    node: str
    code: UnavailabilityCause
    cause: Target | Hold | Observation | None = None
    needs_observation: bool = False
    rollout: Rollout | None = None

    @property
    def confirmed(self) -> bool:
        return self.code is not UnavailabilityCause.UNKNOWN

    @property
    def last_seen_down(self) -> bool:
        """Whether the last observation, however old, did not find the node up."""
        return isinstance(self.cause, Observation) and (
            self.cause.cordoned_by_other or self.cause.sight is not NodeHealth.UP
        )

    @property
    def since(self) -> float | None:
        """When the cause began (epoch seconds); None when unknown."""
        match self.cause:
            case Target(since=at) | Hold(at=at) | Observation(at=at):
                return at
            case None:
                return None

    @property
    def params(self) -> Mapping[str, Param]:
        """What a sentence about the node needs: always `node` and `cause`, the rest by cause."""
        common: dict[str, Param] = {"node": self.node, "cause": self.code.value, "since": self.since}
        match self.cause:
            case Target() as target:
                of_rollout: dict[str, Param] = {"rollout": target.rollout, "phase": target.phase.value}
                failure = {"message": None} if target.failure is None else target.failure.params
                return common | of_rollout | failure
            case Hold() as hold:
                return common | {"by": hold.actor.name, "until": hold.until, "reason": hold.reason}
            case Observation() as seen:
                health = seen.sight.value
                if seen.cordoned_by_other:
                    health = "locked-by-other" if seen.is_locked else "cordoned-by-other"
                return common | {"health": health, "detail": seen.why, "stale": self.needs_observation}
            case None:
                return common | {"health": None, "detail": "", "stale": True}

    @property
    def remedy(self) -> Remedy:
        """Who or what brings the node back."""
        match self.cause:
            case Target(phase=phase) as target if phase in IN_FLIGHT_PHASES:
                return Remedy(RemedyKind.WAIT_FOR_ROLLOUT, {"node": target.node, "rollout": target.rollout})
            case (Target(order=NodeOrder.RETURN) | Target(phase=Phase.FAILED)) as target:
                return failure_remedy(target, self.rollout)
            case Target(phase=Phase.PENDING) as target:
                return _skip_remedy(target, isolated=True)
            case Target() as target:
                return Remedy(RemedyKind.RETURN, {"node": target.node})
            case Hold(source="person") as hold:
                named = {} if hold.id == hold.actor.name else {"id": hold.id}
                return Remedy(RemedyKind.RELEASE, {"node": hold.node} | named, who=hold.actor.name)
            case Hold(source="left") as hold:
                return Remedy(RemedyKind.RETURN, {"node": hold.node})
            case Hold() as hold:
                args = {"source": hold.source, "id": hold.id}
                return Remedy(RemedyKind.RELEASE_BY_SOURCE, args, who=hold.source)
            case Observation(cordoned_by_other=True):
                return Remedy(RemedyKind.UNCORDON, {"node": self.node})
            case _:
                return Remedy(RemedyKind.WAIT_FOR_HEALTH, {"node": self.node})


def failure_remedy(target: Target, rollout: Rollout | None) -> Remedy:
    """Return how a failed node is settled; in a closed rollout it can only be skipped."""
    if target.order is NodeOrder.RETURN:
        who = None if target.order_by is None else target.order_by.name
        return Remedy(RemedyKind.WAIT_FOR_RETURN, {"node": target.node}, who=who)
    # Before the commands below, which are refused until the ordered rollback is over or withdrawn.
    if target.order is NodeOrder.ROLLBACK:
        return Remedy(RemedyKind.WAIT_FOR_ROLLOUT, {"node": target.node, "rollout": target.rollout})
    if rollout is not None and rollout.closed:
        return _skip_remedy(target, isolated=target.isolated)
    has_rollback = rollout is not None and bool(rollout.plan.rollback)
    return Remedy(
        RemedyKind.RETRY, {"rollout": target.rollout, "node": target.node, "has_rollback": has_rollback}
    )


def _skip_remedy(target: Target, *, isolated: bool) -> Remedy:
    args: dict[str, str | bool] = {"rollout": target.rollout, "node": target.node, "return": isolated}
    return Remedy(RemedyKind.SKIP, args)


# -- judging ------------------------------------------------------------------


def unavailability(facts: FleetFacts, node: str) -> Unavailability | None:
    """Return why the node is down at the facts' instant, None when it is known to be up."""
    # Our own work goes first: it explains what an observer sees, and rolloutd itself can end it.
    own: Unavailability | None = None
    for target in facts.targets_on(node):
        code = _target_code(target)
        if code and (own is None or CAUSE_PRECEDENCE[code] < CAUSE_PRECEDENCE[own.code]):
            own = target_unavailability(facts, target)
    return own or active_hold(facts, node) or _counted_outage(facts, node)


def _counted_outage(facts: FleetFacts, node: str) -> Unavailability | None:
    """Return the observed outage that takes slots of the node's pools.

    Clusters do not serve for each other, and some are always away or new.  So an outage of a cluster counts
    only once a rollout has worked on it, however that ended, because then it may be our doing.
    """
    found, known = observed_unavailability(facts, node), facts.nodes[node]
    if found is None or known.kind is not NodeKind.CLUSTER:
        return found
    away = next((each for each in known.conflicts if each.kind is ConflictKind.OUT_OF_SERVICE), None)
    if found.code in TAKEN_BY_OTHERS and away is None:
        return found
    worked_at = facts.released_at(node)
    is_unrelated = away is not None and away.since > worked_at + BLAMED_FOR_S
    return None if not worked_at or is_unrelated else found


def active_hold(facts: FleetFacts, node: str) -> Unavailability | None:
    """Return the node's first hold that has not expired."""
    for hold in facts.holds_on(node):
        if hold.until is None or facts.now < hold.until:
            return Unavailability(node, UnavailabilityCause.HELD, hold)
    return None


def target_unavailability(facts: FleetFacts, target: Target) -> Unavailability:
    """Return why a node is down that this target keeps down: in flight, failed or still isolated."""
    code = _target_code(target) or UnavailabilityCause.ISOLATED
    return Unavailability(target.node, code, target, rollout=facts.rollout(target.rollout))


def observed_unavailability(facts: FleetFacts, node: str) -> Unavailability | None:
    """Return what the last observation says against the node, None when it was freshly seen up."""
    observation = facts.reported_observation(node)
    if observation is None:
        return Unavailability(node, UnavailabilityCause.UNKNOWN, needs_observation=True)
    observed_at = facts.observed_at(observation) if observation.watch else observation.at
    # At the limit itself it is stale already: that is the instant for which a reevaluation is scheduled.
    is_stale = facts.now >= observed_at + facts.limits.observe_within_s
    # What was wrong before we released the node may have been our own doing.
    if is_stale or (not observation.is_up and observed_at < facts.released_at(node)):
        last_true = facts.observation(node)
        return Unavailability(node, UnavailabilityCause.UNKNOWN, last_true, needs_observation=True)
    if observation.is_up:
        return None
    code = UnavailabilityCause.DOWN if observation.sight is NodeHealth.DOWN else UnavailabilityCause.UNKNOWN
    if observation.cordoned_by_other:
        is_locked = observation.is_locked
        code = UnavailabilityCause.LOCKED_BY_OTHER if is_locked else UnavailabilityCause.CORDONED_BY_OTHER
    return Unavailability(node, code, observation)


def _target_code(target: Target) -> UnavailabilityCause | None:
    """Return how this target keeps its node down: a failed node keeps its slot until it is returned."""
    if target.phase in IN_FLIGHT_PHASES:
        return UnavailabilityCause.IN_FLIGHT
    # In service or not: what a failed node carries is unknown until a person has decided about it.
    if target.phase is Phase.FAILED:
        return UnavailabilityCause.FAILED
    return UnavailabilityCause.ISOLATED if target.isolated else None
