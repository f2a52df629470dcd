"""The invariants: what must never happen, checked before every commit.

The daemon asks about every event before it writes it.  This file shares no code with rules/, scheduler/ and
workflow/, so a mistake there is found here.  It does share the facts: rows, and what facts/ derives from them
(pools, counters, conflicting_work() in node_work.py); the recounts of the tests find a mistake there.  What
only the world outside can show (two playbooks at once, a step on a node in service) is judged by the oracle
of the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from machines.facts.node_work import WorkKind
from machines.facts.projection import Projection
from machines.invariants import vote_recount
from machines.invariants.facts import EarlierEvents, InvariantFacts
from machines.invariants.preparations import preparation_violation, prepare_stages_violation, work_violation
from machines.model import events
from machines.model.node import ConflictKind, NodeHealth, NodeKind, pool_value
from machines.model.plan import GateName, OnFailure
from machines.model.rollout import NodeOrder, Rollout, Target
from machines.model.step_record import StepAction, StepState
from machines.model.target_plan import isolators_for, lacks_isolator, plan_for_target
from machines.model.traffic import IDLE_MAX_AGE_S
from machines.model.windows import any_open
from machines.states import IN_FLIGHT_PHASES, IllegalTransition, Outcome, Phase, Trigger, next_phase

CONNECTION_BREAKS_S = 86_400.0
"""A cluster that goes away later than this after our work went away for another cause."""


def first_violation(facts: Projection, commit: Sequence[events.Event], now: float) -> str | None:
    """Return the first rule that a commit's events would break, None if they break none; changes no fact.

    Each event is judged after those before it, because one commit may free a slot and take it.
    """
    earlier, applied = EarlierEvents(), 0
    for number, event in enumerate(commit, 1):
        broken = violation(facts, event, now, earlier)
        if broken is not None:
            return broken
        earlier.add(event)
        # The new targets may move in the same commit.
        if isinstance(event, events.RolloutOpened | events.TargetsJoined):
            facts = facts.fork()
            for each in commit[applied:number]:
                facts.apply(each)
            applied = number
    return None


def apply_judged(facts: Projection, commit: Sequence[events.Event], now: float) -> str | None:
    """Apply events until one of them would break an invariant; return why it would, None for none."""
    earlier = EarlierEvents()
    for event in commit:
        broken = violation(facts, event, now, earlier)
        if broken is not None:
            return broken
        earlier.add(event)
        facts.apply(event)
    return None


def violation(
    facts: InvariantFacts, event: events.Event, now: float, earlier: EarlierEvents | None = None
) -> str | None:
    """Return the rule that this event would break, None if it breaks none.

    `earlier` are events of the same commit that are not yet among the facts.
    """
    earlier = EarlierEvents() if earlier is None else earlier
    match event:
        case events.PhaseMoved():
            return _transition_violation(facts, event, now, earlier)
        case events.GateOpened():
            return vote_recount.gate_violation(facts, event, now)
        case events.StepRecorded():
            return _step_violation(facts, event)
        case events.PreparationRecorded():
            return preparation_violation(facts, event.preparation, now, earlier)
        case events.NodesRemoved():
            removed = (target for name in event.names for target in facts.targets_on(name))
            busy = next((target for target in removed if target.phase in IN_FLIGHT_PHASES), None)
            return None if busy is None else f"{busy.node} cannot be removed: it is {busy.phase}"
        case events.RolloutEnded():
            if facts.all_done(event.rollout):
                return None
            unfinished = [t.node for t in facts.targets(event.rollout) if t.phase is not Phase.DONE]
            return f"{event.rollout} cannot end: {unfinished[0]} is not done"
        case events.RolloutDeleted():
            # The store loads no rollout that was closed before the daemon started.
            targets = facts.targets(event.rollout) if event.rollout in facts.rollouts else ()
            not_returned = [
                t.node
                for t in targets
                if t.phase in IN_FLIGHT_PHASES or (t.isolated and t.node in facts.nodes)
            ]
            subject = f"{event.rollout} cannot be deleted"
            if not_returned:
                return f"{subject}: {not_returned[0]} was not returned to service"
            preparing = [t.node for t in targets if event.rollout in facts.preparing_rollouts(t.node)]
            return f"{subject}: its stage runs on {preparing[0]}" if preparing else None
        case _:
            return None


# -- transitions -------------------------------------------------------------------


def _requeue_violation(facts: InvariantFacts, event: events.PhaseMoved, target: Target) -> str | None:
    """Return why a done node must not be changed again: only a plan that keeps its change may do that."""
    rollout, name = facts.rollouts[event.rollout], f"{event.node} of {event.rollout}"
    if not rollout.plan.keep or rollout.closed:
        return f"{name} must not start again: its plan does not keep the change, or the rollout is closed"
    return None if target.drift else f"{name} must not start again: no drift is recorded"


def _rejoin_violation(facts: InvariantFacts, event: events.PhaseMoved, target: Target) -> str | None:
    """Return why a node must not be pending again: it is not a node that left and is back."""
    rejoins = target.outcome is Outcome.LEFT and event.node in facts.nodes
    if rejoins and not facts.rollouts[event.rollout].closed:
        return None
    return f"{event.node} of {event.rollout} must not rejoin: it has not left, or the rollout is closed"


def _transition_violation(
    facts: InvariantFacts, event: events.PhaseMoved, now: float, earlier: EarlierEvents
) -> str | None:
    name = f"{event.node} of {event.rollout}"
    target = facts.target(event.rollout, event.node)
    try:
        reached = next_phase(event.trigger, event.source, event.outcome)
    except IllegalTransition as wrong:
        return f"{name}: {wrong}"
    if reached is not event.target or target.phase is not event.source:
        return f"{name} is {target.phase}, and {event.trigger} leads from {event.source} to {reached}"
    if event.trigger is Trigger.ADMITTED:
        return _admission_violation(facts, event, target, now, earlier)
    if event.trigger is Trigger.DRIFTED:
        return _requeue_violation(facts, event, target)
    if event.trigger is Trigger.REJOINED:
        return _rejoin_violation(facts, event, target)
    if event.trigger is Trigger.ROLLBACK_ORDERED:
        problem = _rollback_violation(facts, target, now, earlier)
        return f"{name} cannot be rolled back: {problem}" if problem else None
    still_isolated = target.isolated if event.isolated is None else event.isolated
    if event.trigger in (Trigger.VERIFIED, Trigger.ISOLATION_ABORTED) and still_isolated:
        return f"{name} is still isolated and cannot be {event.trigger}"
    # An outcome that says more than was done would let later gates count on a change that is not there.
    if event.trigger is Trigger.VERIFIED and (event.outcome is Outcome.ROLLED_BACK) != target.rolling_back:
        return f"{name} cannot end as {event.outcome}, which was not done to it"
    if event.trigger is Trigger.ISOLATION_ABORTED and (event.target is Phase.DONE) != target.rolling_back:
        return f"{name} cannot be {event.target} again, which it was not before its isolation"
    return None


def _rollback_violation(
    facts: InvariantFacts, target: Target, now: float, earlier: EarlierEvents
) -> str | None:
    problem = work_violation(facts, WorkKind.ATTEMPT, target.node, now, target.rollout)
    if problem is not None:
        return problem
    if _is_quarantined(facts, target.node):
        return "it is quarantined"
    if target.phase is Phase.FAILED:
        return None  # it has its slots, and a person may order it at any time
    rollout = facts.rollouts[target.rollout]
    if not rollout.plan.rollback:
        return "its plan has no rollback"
    if target.phase is Phase.DONE and target.outcome is not Outcome.CHANGED:
        return f"it is done as {target.outcome}, not changed"
    is_planned = rollout.plan.on_failure is not OnFailure.PAUSE and not rollout.closed
    is_planned = is_planned and bool(vote_recount.open_failures(facts, rollout))
    if target.order is not NodeOrder.ROLLBACK and not is_planned:
        return "no person ordered it, and no open failure of the plan does"
    if facts.limits.observe_only:
        return "observe_only is set"
    return _pool_violation(facts, rollout, target, now, earlier)


def _admission_violation(
    facts: InvariantFacts, event: events.PhaseMoved, target: Target, now: float, earlier: EarlierEvents
) -> str | None:
    rollout = facts.rollouts[event.rollout]
    subject = f"{event.node} of {event.rollout} cannot start"
    if rollout.cancelled is not None or rollout.ended_at is not None:
        return f"{subject}: the rollout is over"
    if facts.limits.observe_only:
        return f"{subject}: observe_only is set"
    if rollout.paused is not None:
        return f"{subject}: the rollout is paused"
    if event.attempt != target.attempt + 1:
        return f"{subject}: attempt {event.attempt} does not follow {target.attempt}"
    if event.node not in facts.nodes:
        return f"{subject}: the inventory does not have it"
    if _is_quarantined(facts, event.node):
        return f"{subject}: it is quarantined"
    # Teams and pools come from these sources, so by an old answer the wrong people may have been asked.
    for name in facts.nodes[event.node].sources:
        if name in facts.sources and facts.sources[name].is_stale(now):
            return f"{subject}: its inventory source {name} is stale"
    if lacks_isolator(rollout.plan, facts.nodes[event.node]):
        return f"{subject}: no isolator of the plan applies to it"
    problem = (
        _votes_violation(rollout, target)
        or _wave_violation(facts, rollout, target, now)
        or _time_violation(facts, rollout, target, now)
        or prepare_stages_violation(facts, rollout, target, now)
        or _node_violation(facts, target, now, earlier)
        or _strategy_violation(facts, rollout, target, now, earlier)
        or _traffic_violation(facts, rollout, target, now)
        or _pool_violation(facts, rollout, target, now, earlier)
    )
    return f"{subject}: {problem}" if problem else None


def _votes_violation(rollout: Rollout, target: Target) -> str | None:
    is_pilot = rollout.plan.pilot is not None and target.node == rollout.plan.pilot.node
    entry = GateName.PILOT if is_pilot else GateName.START
    if not any(each.gate is entry for each in rollout.opened):
        return f"the {entry} gate is not open"
    for vote in rollout.votes:
        is_valid = vote.withdrawn_at is None and vote.digest == vote_recount.digest_at(rollout, vote.gate)
        if is_valid and not vote.yes:
            return f"{vote.actor.name} said no at {vote.gate}"
    return None


def _time_violation(facts: InvariantFacts, rollout: Rollout, target: Target, now: float) -> str | None:
    if not any_open(rollout.plan.windows, now):
        return "the plan's windows are closed"
    team = facts.nodes[target.node].team
    if team is not None and not any_open(facts.limits.team_windows.get(team, ()), now):
        return f"the windows of team {team} are closed"
    if (own := facts.team_rules.get(team or "")) is not None and not any_open(own.windows, now):
        return f"team {team}'s own windows are closed"
    pools = _pools(facts, rollout, target.node)
    for freeze in facts.freezes:
        frozen = freeze.until is None or now < freeze.until
        scopes = {"all", f"team/{team}", f"node/{target.node}", *(f"{key}/{value}" for key, value in pools)}
        if frozen and freeze.scope in scopes:
            return f"{freeze.scope} is frozen"
    if target.since <= now < target.not_before:  # one that begins later: the clock was set back
        return "its backoff after an aborted isolation is not over"
    return None


def _node_violation(facts: InvariantFacts, target: Target, now: float, earlier: EarlierEvents) -> str | None:
    problem = work_violation(facts, WorkKind.ATTEMPT, target.node, now, target.rollout)
    if problem is not None:
        return problem
    if target.node in earlier.begun:
        return "it starts in another rollout at the same time"
    observation = facts.observation(target.node)
    if observation is not None and observation.cordoned_by_other:
        return "it has a cordon that is not ours"
    if (problem := _outage_violation(facts, target)) is not None:
        return problem
    is_isolated = any(each.isolated for each in facts.targets_on(target.node))
    if not is_isolated and not _is_up(facts, target.node, now) and not _is_new_cluster(facts, target, now):
        return "no fresh observation says that it is up"
    return None


def _strategy_violation(
    facts: InvariantFacts, rollout: Rollout, target: Target, now: float, earlier: EarlierEvents
) -> str | None:
    """Return that the target's values are not voted for, or that too many targets are unready."""
    if facts.changed_values.get((rollout.id, target.node)):
        return "its values are not those of the vote"
    most = rollout.plan.max_unready
    if most is None:
        return None
    others = (each for each in facts.targets(rollout.id) if each.node != target.node)
    unready = [each.node for each in others if each.node in earlier.begun or _is_unready(facts, each, now)]
    if len(unready) < most:
        return None
    return f"{len(unready)} targets are unready ({', '.join(unready[:3])}) and maxUnready is {most}"


def _is_unready(facts: InvariantFacts, target: Target, now: float) -> bool:
    if target.phase in IN_FLIGHT_PHASES or target.phase is Phase.FAILED:
        return True
    if not target.attempt or target.node not in facts.nodes:
        return False
    seen = facts.observation(target.node)
    is_down = seen is not None and seen.sight is not NodeHealth.UP
    return is_down and not _is_unrelated_outage(facts, target.node, now)


def _is_new_cluster(facts: InvariantFacts, target: Target, now: float) -> bool:
    """Return whether a bootstrap may begin on a node that is down: a cluster, and freshly seen."""
    if (
        facts.nodes[target.node].kind is not NodeKind.CLUSTER
        or not facts.rollouts[target.rollout].plan.bootstrap
    ):
        return False
    observation = facts.observation(target.node)
    is_fresh = observation is not None and now - observation.at <= facts.limits.observe_within_s
    return is_fresh and observation is not None and observation.sight is NodeHealth.DOWN


def _outage_violation(facts: InvariantFacts, target: Target) -> str | None:
    """Return why a node must not begin while another rollout works on it, unless both share a train."""
    for other in _others_in_flight(facts, target):
        state = f"{other.rollout} is {other.phase}"
        if other.phase is not Phase.VERIFYING or not facts.outage_progress(other).has_passed:
            return f"{state} and has not passed its checks"
        if target.isolated:
            continue  # it begins again in the outage in which it failed
        train = facts.train_of(target.rollout)
        order = () if train is None else train.rollouts
        if other.rollout not in order or order.index(other.rollout) > order.index(target.rollout):
            return f"{state} and not before it in a train"
        if set(order) - set(train.approvals if train else ()):
            return "its train is not approved"
    return None


def _others_in_flight(facts: InvariantFacts, target: Target) -> list[Target]:
    others = (each for each in facts.targets_on(target.node) if each.rollout != target.rollout)
    return [each for each in others if each.phase in IN_FLIGHT_PHASES]


def _traffic_violation(facts: InvariantFacts, rollout: Rollout, target: Target, now: float) -> str | None:
    if not plan_for_target(rollout.plan, target, facts.nodes[target.node]).traffic:
        return None
    result = facts.traffic_of(target.rollout, target.node)
    if result is None or not 0.0 <= now - result.at < IDLE_MAX_AGE_S:
        return "its client traffic was not probed just now"
    if result.busy is not False:
        return f"a traffic probe reports: {result.text}"
    # Between results, as the rule counts it: the time since the last probe proves nothing.
    if result.at - result.since < rollout.plan.idle_for_s:
        return f"it was idle for {result.at - result.since:.0f} s, not {rollout.plan.idle_for_s:.0f} s"
    return None


def _pool_violation(
    facts: InvariantFacts, rollout: Rollout, target: Target, now: float, earlier: EarlierEvents
) -> str | None:
    for key, value in _pools(facts, rollout, target.node):
        pool = facts.pool(f"{key}/{value}")
        rule = facts.limits.pools.get(key)
        budget = 1 if rule is None else rule.budget_for(value).resolve(len(pool.members))
        # The node itself is left out: a failed one that starts again is down already and has its slot.
        is_counted = target.node in pool.down or target.node in pool.unknown
        count = len(pool.down) + len(pool.unknown) - is_counted + earlier.begun_in(facts, key, value)
        if count < budget:
            continue
        # Before a refusal each node is judged at `now`: observations may have come or expired since.
        others = (n for n in sorted(pool.members) if n != target.node)
        down = [n for n in others if n in earlier.begun or is_down(facts, n, now)]
        if len(down) >= budget:
            named, nodes = ", ".join(down[:3]), "node" if len(down) == 1 else "nodes"
            return f"pool {key}/{value} has {len(down)} {nodes} down ({named}) and a budget of {budget}"
    return None


def _pools(facts: InvariantFacts, rollout: Rollout, node: str) -> list[tuple[str, str]]:
    labels = facts.nodes[node].labels
    keys = dict.fromkeys((*facts.limits.pools, *rollout.plan.pool_keys))
    return [(key, pool_value(labels, key)) for key in keys]


def is_down(facts: InvariantFacts, node: str, now: float) -> bool:
    """Return whether a node is down for any cause, from the raw facts."""
    for target in facts.targets_on(node):
        if target.phase in IN_FLIGHT_PHASES or target.phase is Phase.FAILED or target.isolated:
            return True
    if any(hold.until is None or now < hold.until for hold in facts.holds_on(node)):
        return True
    return not _is_up(facts, node, now) and not _is_unrelated_outage(facts, node, now)


def _is_unrelated_outage(facts: InvariantFacts, node: str, now: float) -> bool:
    """Return whether the outage of a cluster is not our doing: clusters do not serve for each other."""
    known, observation = facts.nodes[node], facts.observation(node)
    if known.kind is not NodeKind.CLUSTER:
        return False
    away_since = [each.since for each in known.conflicts if each.kind is ConflictKind.OUT_OF_SERVICE]
    is_fresh = observation is not None and now - observation.at <= facts.limits.observe_within_s
    if is_fresh and observation is not None and observation.cordoned_by_other and not away_since:
        return False
    worked_at = max(
        [facts.worked_on.get(node, 0.0), *(each.since for each in facts.targets_on(node) if each.attempt)]
    )
    return not worked_at or any(since > worked_at + CONNECTION_BREAKS_S for since in away_since)


def _is_up(facts: InvariantFacts, node: str, now: float) -> bool:
    observation = facts.observation(node)
    # Of exactly this age it is too old for the facts: the invariant must not be the stricter of the two.
    if observation is None or now - observation.at > facts.limits.observe_within_s:
        return False
    return observation.sight is NodeHealth.UP and not observation.cordoned_by_other


def _is_quarantined(facts: InvariantFacts, node: str) -> bool:
    known = facts.nodes.get(node)
    return known is not None and any(not each.is_warning for each in known.conflicts)


# -- waves, failures, gates -----------------------------------------------------------


def _wave_violation(facts: InvariantFacts, rollout: Rollout, target: Target, now: float) -> str | None:
    if failures := vote_recount.open_failures(facts, rollout):
        return f"the failure of {failures[0].node} is not resolved"
    for spec in rollout.plan.waves:
        if spec.name == target.wave:
            return None
        phases = facts.counters(rollout.id).waves.get(spec.name, Counter())
        is_begun = phases[Phase.DONE] > 0
        # No failure is open here, so votes cover the failure of every failed node.
        for phase in IN_FLIGHT_PHASES:
            if phases[phase]:
                return f"a node of wave {spec.name} is {phase}"
        # It stops at the first one that holds the wave, and only few nodes can be quarantined.
        for _, _, node in facts.pending(rollout.id, spec.name):
            if not is_begun or not _is_quarantined(facts, node):
                return f"{node} of wave {spec.name} is {Phase.PENDING}"
        end = facts.wave_end(rollout.id, spec.name)
        if end is not None and spec.soak_s and now < end + spec.soak_s:
            return f"wave {spec.name} soaks"
        opened = {(each.gate, each.wave) for each in rollout.opened}
        if spec.gate is GateName.CONTINUE and (GateName.CONTINUE, spec.name) not in opened:
            return f"the continue gate after wave {spec.name} is not open"
    return f"its wave {target.wave} is not in the plan"


def _step_violation(facts: InvariantFacts, event: events.StepRecorded) -> str | None:
    """Judge a step that is about to begin: a disruptive step needs a phase in which the node is isolated."""
    record = event.record
    # A result is never refused: it has happened, and without its record it would happen again.
    if record.state is not StepState.INTENDED:
        return None
    target = facts.target(record.rollout, record.node)
    wrong = (record.action is StepAction.RUN and not _may_run(facts, target)) or (
        record.action is StepAction.APPLY and target.phase not in IN_FLIGHT_PHASES
    )
    if record.action is StepAction.REVERT and target.phase is Phase.VERIFYING:
        for other in _others_in_flight(facts, target):
            if not facts.outage_progress(other).has_passed:
                step = f"{record.node} of {record.rollout} cannot return"
                return f"{step}: {other.rollout} is {other.phase} and has not passed its checks"
    if wrong or (target.phase in IN_FLIGHT_PHASES and record.attempt != target.attempt):
        step = f"{record.action} {record.step} of attempt {record.attempt}"
        state = f"{target.phase} in attempt {target.attempt}"
        return f"{step} cannot begin on {record.node} of {record.rollout}: it is {state}"
    return None


def _may_run(facts: InvariantFacts, target: Target) -> bool:
    """Return whether a playbook may begin: while maintaining, or as a repair before the return to service."""
    if target.phase is Phase.VERIFYING and target.node in facts.nodes:
        plan = facts.rollouts[target.rollout].plan
        return target.isolated or not isolators_for(plan, facts.nodes[target.node])
    return target.phase is Phase.MAINTAINING
