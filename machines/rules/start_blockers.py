"""The rules of starting, one function each: a reason, or None when the rule allows it.

Both an admission and an explanation ask them (pending_blocker.py says how the two differ).  The pool lock,
gates and waves have their own files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from machines.facts.availability import Unavailability, failure_remedy, observed_unavailability
from machines.facts.dry_runs import RESULT_RETENTION_S
from machines.facts.index import Index
from machines.facts.node_work import WorkKind, is_isolated
from machines.model import traffic, windows
from machines.model.actions import is_pausing
from machines.model.node import NodeKind, Observation
from machines.model.plan import GateName
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind, UnavailabilityCause
from machines.model.rollout import FailureCode, NodeOrder, Rollout, Target
from machines.model.rows import MismatchKind
from machines.model.target_plan import lacks_change, lacks_check, lacks_isolator
from machines.model.windows import Window
from machines.rules import gates, pools, preparing
from machines.rules.node_claims import availability_reason, quarantine_blocker, work_blocker
from machines.rules.rollbacks import rollbacks_reason
from machines.rules.runners import runner_blocker
from machines.rules.waves import WaveProgress
from machines.states import Phase

WindowGroups = list[tuple[str, Sequence[Window]]]
TRAIN_RECHECK_S: Final = 60.0
"""Interval after which a node asks again whether it waits for its train: time may close the other rollout."""

# -- the whole rollout ------------------------------------------------------------


def rollout_blocker(index: Index, rollout: Rollout, now: float) -> Reason | None:
    """Return why no node of the rollout may start, apart from time and waves."""
    # By what people can do about it: no vote helps a rollout that is over, doubtful or paused.
    if (cancelled := rollout.cancelled) is not None:
        params = {"by": cancelled.by.name, "reason": cancelled.reason}
        return Reason(ReasonCode.CANCELLED, rollout.id, params, cancelled.at)
    if rollout.ended_at is not None:
        return Reason(ReasonCode.ENDED, rollout.id, since=rollout.ended_at)
    if (doubt := doubt_blocker(index, rollout.id)) is not None:
        return doubt
    if (paused := rollout.paused) is not None:
        params = {"by": paused.by.name, "reason": paused.reason}
        remedy = Remedy(RemedyKind.RESUME, {"rollout": rollout.id})
        return Reason(ReasonCode.PAUSED, rollout.id, params, paused.at, remedy)
    return (
        _rejection_blocker(rollout)
        or _entry_gate_blocker(index, rollout, now)
        or _failure_blocker(index, rollout)
        or preparing.preparation_blocker(index, rollout)
    )


def observe_only_blocker(index: Index) -> Reason | None:
    """Return why nothing starts anywhere when the settings say so."""
    if not index.limits.observe_only:
        return None
    return Reason(ReasonCode.OBSERVE_ONLY, "rolloutd", remedy=Remedy(RemedyKind.CHANGE_SETTINGS))


def mismatch_blocker(index: Index, *scopes: str) -> Reason | None:
    """Return the first row in one of these scopes that the audit does not account for."""
    found = next((each for each in index.mismatches if each.scope in scopes), None)
    if found is None:
        return None
    params: Params = {"kind": found.kind.value, "columns": found.columns}
    is_found = found.kind is not MismatchKind.NOT_COMPARED
    remedy = Remedy(RemedyKind.SETTLE, {"subject": found.subject}) if is_found else None
    return Reason(ReasonCode.AUDIT_MISMATCH, found.subject, params, remedy=remedy)


def doubt_blocker(index: Index, rollout: str) -> Reason | None:
    """Return why nothing of a rollout is decided: a row that the audit lacks, or a refused decision."""
    if (mismatch := mismatch_blocker(index, "all", f"rollout/{rollout}")) is not None:
        return mismatch
    if not index.is_refused(rollout):
        return None
    refusal = index.refusals[rollout]
    remedy = Remedy(RemedyKind.WAIT_UNTIL, until=refusal.until)
    return Reason(ReasonCode.DECISION_REFUSED, rollout, {"problem": refusal.problem}, remedy=remedy)


def _rejection_blocker(rollout: Rollout) -> Reason | None:
    # At any gate, an open one too: a no is how a voter stops a rollout that is under way.
    for vote in rollout.votes:
        if not vote.yes and vote.withdrawn_at is None and vote.digest == rollout.digest_at(vote.gate):
            by, args = vote.actor.name, {"rollout": rollout.id, "gate": vote.gate.value, "wave": vote.wave}
            params = {"by": by, "gate": vote.gate.value, "wave": vote.wave, "reason": vote.reason}
            remedy = Remedy(RemedyKind.WITHDRAW, args, who=by)
            return Reason(ReasonCode.REJECTED, rollout.id, params, vote.at, remedy)
    return None


def _entry_gate_blocker(index: Index, rollout: Rollout, now: float) -> Reason | None:
    gate = rollout.plan.entry_gate
    if gates.is_open(index, rollout, gate, "", now):
        return None
    missing = gates.gate_view(index, rollout, gate, "", now).missing
    remedy = Remedy(RemedyKind.APPROVE, {"rollout": rollout.id, "gate": gate.value})
    code = ReasonCode.GATE_PILOT if gate is GateName.PILOT else ReasonCode.GATE_START
    return Reason(code, rollout.id, missing, rollout.submitted_at, remedy)


def _failure_blocker(index: Index, rollout: Rollout) -> Reason | None:
    failures = index.unresolved_failures(rollout.id)
    if not failures:
        return None
    if (rolling_back := rollbacks_reason(index, rollout)) is not None:
        return rolling_back
    first = failures[0]
    params: Params = {**first.params, "more": len(failures) - 1}
    target = index.target(rollout.id, first.node)
    own = failure_remedy(target, rollout) if target.phase is Phase.FAILED else None
    # The vote lets the others start, and leaves the node as it is.
    settles = own if own is not None and own.kind is RemedyKind.RETRY else None
    remedy = replace(_proceed_remedy(rollout), also=settles)
    is_disturbed = first.code is FailureCode.PREPARE_DISTURBED
    code = ReasonCode.DISTURBED if is_disturbed else ReasonCode.NODE_FAILED
    return Reason(code, first.node, params, first.at, remedy)


def _proceed_remedy(rollout: Rollout) -> Remedy:
    return Remedy(RemedyKind.APPROVE, {"rollout": rollout.id, "gate": GateName.PROCEED.value})


# -- one node ------------------------------------------------------------------------


def wave_blocker(progress: WaveProgress, target: Target) -> Reason | None:
    """Return why the node's wave may not start."""
    if progress.blocker is not None or progress.wave is None or progress.wave.name == target.wave:
        return progress.blocker
    wave = progress.wave.name
    return Reason(ReasonCode.EARLIER_WAVE, wave, remedy=Remedy(RemedyKind.WAIT_FOR_WAVE, {"wave": wave}))


def node_blocker(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why this node may not start, whatever its pools say."""
    return (
        _record_blocker(index, rollout, target, now)
        or _values_blocker(index, rollout, target)
        or gates.missing_team_vote(index, target)
        or target_freeze_blocker(index, target, now)
        or _unprepared_blocker(index, rollout, target, now)
        # The inventory's team: the target's follows with the next refresh, if the node was done meanwhile.
        or window_blocker(index, rollout, index.nodes[target.node].team, now)
        or _condition_blocker(index, target, now)
    )


def rollback_blocker(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why this node may not be rolled back now; votes, freezes and windows do not keep a change."""
    return (
        _record_blocker(index, rollout, target, now)
        or _condition_blocker(index, target, now)
        or _later_change_blocker(index, target)
    )


def _later_change_blocker(index: Index, target: Target) -> Reason | None:
    """Return the later change of the same train that people roll back on the node too: it is undone first."""
    ordered = (each for each in index.targets_on(target.node) if each.order is NodeOrder.ROLLBACK)
    later = (each for each in ordered if each.joined_outage and each.admitted_at > target.admitted_at)
    # One that has an isolation of its own aborted waits, and is no reason to wait for it.
    first = next((each for each in later if not each.aborted_isolations), None)
    if first is None:
        return None
    remedy = Remedy(RemedyKind.WAIT_FOR_ROLLOUT, {"node": target.node, "rollout": first.rollout})
    params: Params = {"rollout": first.rollout}
    return Reason(ReasonCode.TRAIN, target.node, params, target.ordered_at or None, remedy)


def _record_blocker(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return what is wrong with what is recorded of the node."""
    # First, because all rules after it read the labels of the node.
    if target.node not in index.nodes:
        return Reason(ReasonCode.NODE_GONE, target.node, remedy=Remedy(RemedyKind.CHANGE_INVENTORY))
    if (doubt := quarantine_blocker(index, target) or stale_blocker(index, target, now)) is not None:
        return doubt
    if is_pausing(target.since, target.not_before, now):
        params: Params = {"until": target.not_before, "detail": target.last_text}
        remedy = Remedy(RemedyKind.WAIT_UNTIL, until=target.not_before)
        return Reason(ReasonCode.BACKOFF, target.node, params, target.since, remedy)
    return mismatch_blocker(index, f"node/{target.node}", f"team/{target.team}") or _coverage_blocker(
        index, rollout, target
    )


def _unprepared_blocker(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why the node is not prepared: what keeps its next stage from it, or how far it is."""
    reason = preparing.unprepared_blocker(index, target)
    if reason is None or reason.code is not ReasonCode.PREPARING or reason.params["running"]:
        return reason
    occupied = work_blocker(index, WorkKind.STAGE, target.node, now, target.rollout)
    return occupied or _prepare_window_blocker(rollout, now) or reason


def _prepare_window_blocker(rollout: Rollout, now: float) -> Reason | None:
    group = rollout.plan.prepare_windows
    if windows.any_open(group, now):
        return None
    params: Params = {"windows": "prepare", "team": None}
    return _closed_reason(rollout.id, params, windows.next_opening(group, now))


def _closed_reason(subject: str, params: Params, opens_at: float | None) -> Reason:
    remedy = Remedy(RemedyKind.WAIT_UNTIL, until=opens_at)
    return Reason(ReasonCode.OUTSIDE_WINDOW, subject, {**params, "opens_at": opens_at}, remedy=remedy)


def _condition_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return what takes or keeps the node itself from the rollout."""
    return (
        work_blocker(index, WorkKind.ATTEMPT, target.node, now, target.rollout)
        or observation_blocker(index, target)
        or runner_blocker(index, target)
        or _isolation_blocker(index, target, now)
    )


def preparation_hindrance(index: Index, rollout: Rollout, target: Target, now: float) -> Reason | None:
    """Return why this node may not be prepared now: another user or rollout has it, or it is frozen."""
    return (
        quarantine_blocker(index, target)
        or stale_blocker(index, target, now)
        or mismatch_blocker(index, f"node/{target.node}", f"team/{target.team}")
        or _coverage_blocker(index, rollout, target)
        or _values_blocker(index, rollout, target)
        or gates.missing_team_vote(index, target)
        or target_freeze_blocker(index, target, now)
        or work_blocker(index, WorkKind.STAGE, target.node, now, target.rollout)
    )


def stale_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return which source of the node has not reported its nodes for too long."""
    for name in index.nodes[target.node].sources:
        source = index.sources.get(name)
        if source is None or not source.is_stale(now):
            continue
        answered = source.refreshed_at
        params: Params = {"refreshed_at": answered, "stale_after_s": source.stale_after_s}
        since = None if answered is None else answered + source.stale_after_s
        remedy = Remedy(RemedyKind.WAIT_FOR_INVENTORY)
        if source.is_held:
            remedy = Remedy(RemedyKind.ACCEPT_INVENTORY, {"source": name})
        return Reason(ReasonCode.INVENTORY_STALE, name, params, since, remedy)
    return None


def _coverage_blocker(index: Index, rollout: Rollout, target: Target) -> Reason | None:
    """Return that the plan does not say how to isolate, change or judge this node, as submit refuses it."""
    node, remedy = index.nodes[target.node], Remedy(RemedyKind.CHANGE_INVENTORY)
    if lacks_isolator(rollout.plan, node):
        return Reason(ReasonCode.NO_ISOLATOR, target.node, since=target.since, remedy=remedy)
    if lacks_check(rollout.plan, node):
        return Reason(ReasonCode.NO_CHECK, target.node, since=target.since, remedy=remedy)
    if lacks_change(rollout.plan, node):
        return Reason(ReasonCode.NO_CHANGE, target.node, since=target.since, remedy=remedy)
    return None


def _values_blocker(index: Index, rollout: Rollout, target: Target) -> Reason | None:
    """Return that a value of the target is not the one that people voted for; a rollback needs none."""
    changed = index.changed_values.get((rollout.id, target.node))
    if not changed:
        return None
    name, before, now = changed[0]
    params: Params = {"name": name, "before": before, "now": now, "more": len(changed) - 1}
    again = Remedy(RemedyKind.SUBMIT_AGAIN, {"plan": rollout.plan.name})
    return Reason(ReasonCode.VALUES_CHANGED, target.node, params, remedy=again)


def target_freeze_blocker(index: Index, target: Target, now: float) -> Reason | None:
    if not index.freezes:
        return None
    ids = [f"node/{target.node}", *(pool.id for pool in index.pools_for(target.rollout, target.node))]
    # The team by the inventory, as at the windows: a target that was done may not have followed yet.
    return freeze_blocker(index, index.nodes[target.node].team, ids, now)


def freeze_blocker(index: Index, team: str | None, ids: Collection[str], now: float) -> Reason | None:
    """Return the freeze of all nodes of a team and of these pools, or of the node if its id is among them."""
    for freeze in index.freezes:
        if freeze.is_active(now) and freeze.covers(team, ids):
            params: Params = {"by": freeze.by, "until": freeze.until, "reason": freeze.reason}
            remedy = Remedy(RemedyKind.UNFREEZE, {"id": freeze.id}, who=freeze.by, until=freeze.until)
            return Reason(ReasonCode.FREEZE, freeze.scope, params, freeze.at, remedy)
    return None


def window_blocker(index: Index, rollout: Rollout, team: str | None, now: float) -> Reason | None:
    """Return why no work may start now: the plan's windows, tightened by the team's."""
    groups = window_groups(index, rollout, team)
    return closed_window(groups, rollout.id, team, now, index.expected_s(rollout.id))


def closed_window(
    groups: WindowGroups, subject: str, team: str | None, now: float, needed_s: float
) -> Reason | None:
    """Return which group of windows is closed, or closes before work of `needed_s` seconds ends."""
    for owner, group in groups:
        if not group:
            continue
        subject = subject if owner == "plan" or team is None else f"team/{team}"
        params: Params = {"windows": owner, "team": None if owner == "plan" else team}
        until = windows.open_until(group, now)
        if until is None:
            opens_at = windows.next_common_opening([each for _, each in groups], now)
            return _closed_reason(subject, params, opens_at)
        # By the time that a node takes: work that begins in a window should end in it.
        if now + needed_s > until:
            params = {**params, "needed_s": needed_s, "closes_at": until}
            return Reason(ReasonCode.WINDOW_TOO_SHORT, subject, params, remedy=Remedy(RemedyKind.WAIT_UNTIL))
    return None


def observation_blocker(index: Index, target: Target) -> Reason | None:
    """Return what was observed of the node that forbids its start; our own isolation does not."""
    observed = observed_unavailability(index, target.node)
    if observed is not None and _is_bootstrapped(index, target, observed):
        return None
    is_cordoned_by_other = (
        observed is not None and isinstance(observed.cause, Observation) and observed.cause.cordoned_by_other
    )
    # A node that we isolated is seen as down because of us.  A cordon by another tool is theirs in any case.
    if observed is None or (is_isolated(index, target.node) and not is_cordoned_by_other):
        return None
    match observed.code:
        case UnavailabilityCause.DOWN:
            return availability_reason(ReasonCode.NODE_DOWN, observed)
        case UnavailabilityCause.CORDONED_BY_OTHER:
            return availability_reason(ReasonCode.FOREIGN_CORDON, observed)
        case UnavailabilityCause.LOCKED_BY_OTHER:
            return availability_reason(ReasonCode.FOREIGN_LOCK, observed)
        case _:
            return availability_reason(ReasonCode.NODE_UNKNOWN, observed)


def _is_bootstrapped(index: Index, target: Target, observed: Unavailability) -> bool:
    """Return whether a cluster may start although it is down: its network comes from the change itself.

    One that is not initialised is quarantined.
    """
    is_cluster = index.nodes[target.node].kind is NodeKind.CLUSTER
    is_down = observed.code is UnavailabilityCause.DOWN
    rollout = index.rollouts.get(target.rollout)  # None: a machine asks that reboots itself
    return is_cluster and is_down and rollout is not None and rollout.plan.bootstrap


def _isolation_blocker(index: Index, target: Target, now: float) -> Reason | None:
    """Return what blocks the node's isolation until a person changes it; a slot for it would be wasted."""
    result = index.dry_run_results.permanent_blocker(target, now)
    # A node that is isolated already has nothing left that could be blocked.
    if result is None or is_isolated(index, target.node):
        return None
    remedy = Remedy(RemedyKind.WAIT_FOR_BLOCKER)
    return Reason(ReasonCode.CANNOT_ISOLATE, target.node, {"detail": result.why}, result.at, remedy)


def traffic_blocker(index: Index, target: Target) -> Reason | None:
    """Return the traffic last seen on the node."""
    result = index.traffic_of(target.rollout, target.node)
    if result is None or not index.plan_for(target).traffic:
        return None
    idle_for_s = index.rollout(target.rollout).plan.idle_for_s
    return traffic.result_blocker(result, idle_for_s, reprobe_at(index, target, result))


def reprobe_at(index: Index, target: Target, result: traffic.TrafficResult) -> float:
    """Return when to probe the node again (epoch seconds)."""
    pool_ids = (pool.id for pool in index.all_pools(target.node))
    groups = index.pending_groups
    return result.reprobe_at(
        is_contested=any(groups.has_competitors(pool, traffic.PROBE_AHEAD) for pool in pool_ids)
    )


def failed_reason(index: Index, target: Target) -> Reason:
    """Return what settles a failed node, and what its rollout needs to continue."""
    failure = target.failure
    params: Params = {} if failure is None else {**failure.params}
    rollout = index.rollout(target.rollout)
    remedy = failure_remedy(target, rollout)
    # A retried node starts, and the others do, once votes cover the failure.
    if remedy.kind is RemedyKind.RETRY and index.unresolved_failures(rollout.id):
        remedy = replace(remedy, also=_proceed_remedy(rollout))
    return Reason(ReasonCode.FAILED, target.node, params, target.since, remedy)


# -- what may lift a reason ----------------------------------------------------------

NEEDS_OBSERVATION = frozenset({ReasonCode.PEER_UNKNOWN, ReasonCode.NODE_UNKNOWN})


def reason_certainty(index: Index, target: Target, reason: Reason) -> int:
    """Rank a reason: 0 what is known, 1 a node last seen down, 2 a node that merely needs an observation.

    Nodes are not observed for a node that could not start anyway, so what is known goes first.  Of two
    observations that are too old, the next one more likely lifts the good one.
    """
    match reason.code:
        case ReasonCode.NODE_UNKNOWN:
            unavailable = observed_unavailability(index, target.node)
        case ReasonCode.PEER_UNKNOWN:
            unavailable = pools.unobserved_peer(index, target)
        case _:
            return 0
    return 1 if unavailable is not None and unavailable.last_seen_down else 2


def blocker_expires_at(index: Index, rollout: Rollout, team: str | None, reason: Reason, now: float) -> float:
    """Return when time alone may lift this reason of a team's node (epoch seconds); infinity if it cannot."""
    match reason.code:
        case ReasonCode.CANNOT_ISOLATE:
            return (reason.since or now) + RESULT_RETENTION_S
        case ReasonCode.TRAIN:
            until = None if reason.remedy is None else reason.remedy.until
            return min(now + TRAIN_RECHECK_S, math.inf if until is None else until)
        case ReasonCode.BACKOFF | ReasonCode.FREEZE | ReasonCode.OUTSIDE_WINDOW:
            until = None if reason.remedy is None else reason.remedy.until
            return math.inf if until is None else until
        case ReasonCode.INVENTORY_STALE:
            # An answer from the future, after the clock was set back, becomes valid with time.
            source = index.sources[reason.subject]
            valid_at = (source.refreshed_at or 0.0) - source.stale_after_s
            return valid_at if valid_at > now else math.inf
        case ReasonCode.WINDOW_TOO_SHORT:
            groups = window_groups(index, rollout, team)
            closings = (windows.open_until(each, now) for _, each in groups)
            return min((each for each in closings if each is not None), default=math.inf)
        # Only events lift the others, and each event marks the groups that it may concern.
        case _:
            return math.inf


def window_groups(index: Index, rollout: Rollout, team: str | None) -> WindowGroups:
    """Return the windows that apply by their owner: the plan, the team's settings, the team's own rules."""
    return [("plan", rollout.plan.windows), *team_window_groups(index, team)]


def team_window_groups(index: Index, team: str | None) -> WindowGroups:
    """Return a team's windows: those of the settings, and its own rules."""
    if team is None:
        return []
    # Each group must be open: a team can tighten the plan and the settings, and widen neither.
    own = index.team_rules.get(team)
    rules = [] if own is None else [("team-rules", own.windows)]
    return [("team", index.limits.team_windows.get(team, ())), *rules]
