"""What must never happen, judged by straightforward code that shares nothing with schedule.py.

`violation` judges one event before it becomes fact; the daemon asks it before
every commit.  `violations` judges everything that differs between two
snapshots.  Both look at raw facts (labels, targets, holds, observations, votes)
and call no rule of pools.py, gates.py or schedule.py: a mistake there is found
here.  What only the outside world can show (two playbooks at once, a step on a
node in service) is judged from the effect log by the tests' oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machines import tellers
from machines.book import Snapshot
from machines.events import (
    Event,
    GateOpened,
    PhaseMoved,
    RolloutDeleted,
    RolloutEnded,
    StepAction,
    StepRecorded,
    StepState,
)
from machines.facts import Facts, ScannedFacts
from machines.limits import Limits
from machines.node import NO_LABEL, Observation, Sight
from machines.plan import GateName, Need
from machines.rollout import Hold, Rollout, Target
from machines.states import BUSY, IllegalTransition, Outcome, Phase, Trigger, edge
from machines.traffic import GOOD_FOR_S, Traffic
from machines.windows import any_open

# -- the two questions -----------------------------------------------------------


def violation(facts: Facts, event: Event, now: float, earlier: Sequence[Event] = ()) -> str | None:
    """Return what must never happen and would by this event, None when nothing would.

    `earlier` are events of the same commit that are not yet among the facts.
    """
    match event:
        case PhaseMoved():
            return _move_violation(facts, event, now, earlier)
        case GateOpened():
            return _gate_violation(facts, event, now)
        case StepRecorded():
            return _step_violation(facts, event)
        case RolloutEnded():
            left = [t.node for t in facts.targets(event.rollout) if t.phase is not Phase.DONE]
            return f"{event.rollout} cannot end: {left[0]} is not done" if left else None
        case RolloutDeleted():
            # One that closed in an earlier life of the daemon is no longer among the facts.
            targets = facts.targets(event.rollout) if event.rollout in facts.rollouts else ()
            kept = [t.node for t in targets if t.phase in BUSY or (t.isolated and t.node in facts.nodes)]
            return f"{event.rollout} cannot be deleted: {kept[0]} has not been returned" if kept else None
        case _:
            return None


def violations(
    before: Snapshot,
    after: Snapshot,
    *,
    limits: Limits,
    observations: Iterable[Observation],
    now: float,
    traffic: Iterable[Traffic] = (),
) -> list[str]:
    """Return what must never happen and did between two snapshots, one event or one commit apart."""
    facts = ScannedFacts.of(before, limits, observations, traffic)
    broken: list[str] = []
    moves: list[Event] = []
    known = {rollout.id: rollout for rollout in before.rollouts}
    for rollout in after.rollouts:
        old = known.get(rollout.id)
        for each in rollout.opened if old is None else rollout.opened[len(old.opened) :]:
            opened = GateOpened(rollout.id, each.gate, each.wave, each.at)
            broken += _said(_gate_violation(facts, opened, now))
    for target in after.targets:
        row = facts.rows.get((target.rollout, target.node))
        if row is not None and (row.phase, row.attempt) != (target.phase, target.attempt):
            move = _move_between(row, target)
            if move is None:
                way = f"from {row.phase} to {target.phase}: no such edge"
                broken.append(f"{target.node} of {target.rollout} went {way}")
                continue
            broken += _said(violation(facts, move, now, moves))
            moves.append(move)
    return broken


def _said(text: str | None) -> list[str]:
    return [] if text is None else [text]


def _move_between(row: Target, target: Target) -> PhaseMoved | None:
    """Return the move that made one row of the other, None when the table has none."""
    for trigger in Trigger:
        try:
            way = edge(trigger, row.phase, target.outcome)
        except IllegalTransition:
            continue
        if way.target is target.phase:
            return PhaseMoved(
                target.rollout,
                target.node,
                trigger,
                row.phase,
                target.phase,
                target.attempt,
                target.since,
                outcome=target.outcome,
                failure=target.failure,
                isolated=target.isolated,
            )
    return None


# -- moves -------------------------------------------------------------------------


def _move_violation(facts: Facts, event: PhaseMoved, now: float, earlier: Sequence[Event]) -> str | None:
    name = f"{event.node} of {event.rollout}"
    target = facts.target(event.rollout, event.node)
    try:
        way = edge(event.trigger, event.source, event.outcome)
    except IllegalTransition as wrong:
        return f"{name}: {wrong}"
    if way.target is not event.target or target.phase is not event.source:
        return f"{name} is {target.phase}, and {event.trigger} leads from {event.source} to {way.target}"
    if event.trigger is Trigger.ADMITTED:
        return _admission_violation(facts, event, target, now, earlier)
    if event.trigger is Trigger.ROLLBACK_ORDERED:
        for other in facts.targets_on(event.node):
            if other.rollout != event.rollout and (other.phase in BUSY or other.isolated):
                return f"{name} cannot be rolled back: {other.rollout} has it, {other.phase} there"
        if any(_lasts(hold, now) for hold in facts.holds_on(event.node)):
            return f"{name} cannot be rolled back: it is held"
    stays = target.isolated if event.isolated is None else event.isolated
    if event.trigger in (Trigger.VERIFIED, Trigger.PUT_BACK, Trigger.ROLLED_BACK) and stays:
        return f"{name} is still isolated and cannot be {event.trigger}"
    if event.trigger is Trigger.VERIFIED and (event.outcome is Outcome.ROLLED_BACK) != target.rolling_back:
        return f"{name} would end as {event.outcome}, which is not what was done to it"
    return None


def _admission_violation(
    facts: Facts, event: PhaseMoved, target: Target, now: float, earlier: Sequence[Event]
) -> str | None:
    rollout = facts.rollouts[event.rollout]
    who = f"{event.node} of {event.rollout} cannot start"
    if rollout.cancelled is not None or rollout.ended_at is not None:
        return f"{who}: the rollout is over"
    if facts.limits.observe_only:
        return f"{who}: observe_only is set"
    if rollout.paused is not None:
        return f"{who}: the rollout is paused"
    if event.attempt != target.attempt + 1:
        return f"{who}: attempt {event.attempt} does not follow {target.attempt}"
    if event.node not in facts.nodes:
        return f"{who}: the inventory does not have it"
    why = (
        _votes_violation(facts, rollout)
        or _failure_violation(facts, rollout)
        or _wave_violation(facts, rollout, target, now)
        or _time_violation(facts, rollout, target, now)
        or _node_violation(facts, target, now, earlier)
        or _traffic_violation(facts, rollout, target, now)
        or _pool_violation(facts, rollout, target, now, earlier)
    )
    return f"{who}: {why}" if why else None


def _votes_violation(facts: Facts, rollout: Rollout) -> str | None:
    if not any(each.gate is GateName.START for each in rollout.opened):
        return "the start gate is not open"
    for vote in rollout.votes:
        if not vote.yes and vote.withdrawn_at is None and vote.digest == rollout.digest.whole:
            return f"{vote.actor.name} said no at {vote.gate}"
    return None


def _time_violation(facts: Facts, rollout: Rollout, target: Target, now: float) -> str | None:
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
    if now < target.not_before:
        return "it was put back and its wait is not over"
    return None


def _node_violation(facts: Facts, target: Target, now: float, earlier: Sequence[Event]) -> str | None:
    for other in facts.targets_on(target.node):
        if other.rollout != target.rollout and (other.phase in BUSY or other.phase is Phase.FAILED):
            return f"it is {other.phase} in {other.rollout}"
    if target.node in _admitted(earlier):
        return "it starts in another rollout"
    if any(_lasts(hold, now) for hold in facts.holds_on(target.node)):
        return "it is held"
    seen = facts.observation(target.node)
    if seen is not None and seen.foreign:
        return "somebody else took it out of service"
    if not target.isolated and not _is_up(facts, target.node, now):
        return "it was not freshly seen up"
    return None


def _traffic_violation(facts: Facts, rollout: Rollout, target: Target, now: float) -> str | None:
    if not rollout.plan.traffic:
        return None
    told = facts.traffic_of(target.rollout, target.node)
    if told is None or not 0.0 <= now - told.at < GOOD_FOR_S:
        return "nobody has looked just now at whether client traffic runs there"
    return None if told.busy is False else f"a traffic probe says: {told.text}"


def _pool_violation(
    facts: Facts, rollout: Rollout, target: Target, now: float, earlier: Sequence[Event]
) -> str | None:
    starting = _admitted(earlier)
    for key, value in _pools(facts, rollout, target.node):
        members = list(facts.members(key, value))
        down = [n for n in members if n != target.node and (n in starting or _is_down(facts, n, now))]
        rule = facts.limits.pools.get(key)
        budget = 1 if rule is None else rule.budget(value).of(len(members))
        if len(down) >= budget:
            named, nodes = ", ".join(down[:3]), "node" if len(down) == 1 else "nodes"
            return f"pool {key}/{value} has {len(down)} {nodes} down ({named}) and a budget of {budget}"
    return None


def _pools(facts: Facts, rollout: Rollout, node: str) -> list[tuple[str, str]]:
    labels = facts.nodes[node].labels
    keys = dict.fromkeys((*facts.limits.pools, *rollout.plan.pool_keys))
    return [(key, labels.get(key, NO_LABEL)) for key in keys]


def _admitted(events: Sequence[Event]) -> set[str]:
    return {each.node for each in events if isinstance(each, PhaseMoved) and each.target in BUSY}


def _is_down(facts: Facts, node: str, now: float) -> bool:
    for target in facts.targets_on(node):
        if target.phase in BUSY or target.phase is Phase.FAILED or target.isolated:
            return True
    return any(_lasts(hold, now) for hold in facts.holds_on(node)) or not _is_up(facts, node, now)


def _is_up(facts: Facts, node: str, now: float) -> bool:
    seen = facts.observation(node)
    if seen is None or now - seen.at > facts.limits.observe_within_s:
        return False
    return seen.sight is Sight.UP and not seen.foreign


def _lasts(hold: Hold, now: float) -> bool:
    return hold.until is None or now < hold.until


# -- waves, failures, gates -----------------------------------------------------------


def _wave_violation(facts: Facts, rollout: Rollout, target: Target, now: float) -> str | None:
    open_failures = {failure.id for failure in tellers.open_failures(facts, rollout)}
    targets = list(facts.targets(rollout.id))
    for spec in rollout.plan.waves:
        if spec.name == target.wave:
            return None
        mine = [each for each in targets if each.wave == spec.name]
        for each in mine:
            covered = (
                each.phase is Phase.FAILED
                and each.failure is not None
                and each.failure.id not in open_failures
            )
            if each.phase is not Phase.DONE and not covered:
                return f"{each.node} of wave {spec.name} is {each.phase}"
        if mine and now < max(each.since for each in mine) + spec.soak_s:
            return f"wave {spec.name} soaks"
        opened = {(each.gate, each.wave) for each in rollout.opened}
        if spec.gate is not None and (GateName.CONTINUE, spec.name) not in opened:
            return f"the continue gate after wave {spec.name} is not open"
    return f"its wave {target.wave} is not in the plan"


def _failure_violation(facts: Facts, rollout: Rollout) -> str | None:
    failures = tellers.open_failures(facts, rollout)
    return f"the failure of {failures[0].node} is not settled" if failures else None


def _gate_violation(facts: Facts, event: GateOpened, now: float) -> str | None:
    rollout = facts.rollouts.get(event.rollout)
    if rollout is None:
        return f"there is no rollout {event.rollout}"
    if event.gate is GateName.PROCEED:
        return None
    ttl = rollout.plan.vote_ttl_s
    votes = [
        vote
        for vote in rollout.votes
        if vote.gate is event.gate
        and vote.wave == event.wave
        and vote.yes
        and vote.withdrawn_at is None
        and vote.digest == rollout.digest.whole
        and (ttl is None or now < vote.at + ttl)
    ]
    need = rollout.plan.gates.get(event.gate, Need(owner=1))
    lacking = tellers.lacking(rollout, need, votes, tellers.teams(facts, rollout))
    return f"gate {event.gate} of {rollout.id} cannot open: missing {lacking}" if lacking else None


def _step_violation(facts: Facts, event: StepRecorded) -> str | None:
    """Judge a step that is about to begin: what disrupts needs an isolated phase."""
    record = event.record
    if record.state is not StepState.INTENDED:
        return None
    target = facts.target(record.rollout, record.node)
    wrong = (record.action is StepAction.RUN and target.phase is not Phase.MAINTAINING) or (
        record.action is StepAction.DO and target.phase not in BUSY
    )
    if wrong or (target.phase in BUSY and record.attempt != target.attempt):
        step = f"{record.action} {record.step} of attempt {record.attempt}"
        stands = f"{target.phase} in attempt {target.attempt}"
        return f"{step} cannot begin on {record.node} of {record.rollout}: it is {stands}"
    return None
