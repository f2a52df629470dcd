"""Why a rollout or a node does not move, and what ends that: the one answer of `why`.

A pending node waits by the rules (rules/pending_blocker.py) or for its turn in the next decision.  What a
node at work waits for is in the daemon's memory only (`Live`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from machines.facts.availability import observed_unavailability
from machines.facts.index import Index
from machines.model import traffic
from machines.model.decision import Admit, CompareStaged, Decision, ProbeTraffic
from machines.model.limits import RunnerQueue
from machines.model.node import NodeHealth, Observation, natural_sort_key
from machines.model.reasons import Param, Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Rollout, Target
from machines.rules import start_blockers, trains, waves
from machines.rules.node_claims import quarantine_blocker
from machines.rules.pending_blocker import pending_blocker
from machines.rules.rollbacks import due_rollbacks
from machines.rules.runners import queued_run_reason
from machines.scheduler import rollback_admission
from machines.scheduler.decide import decide
from machines.states import IN_FLIGHT_PHASES, Phase
from machines.workflow.live_step import LiveStep

MAX_NAMED_EXCEPTIONS: Final = 20
"""Nodes that the sentence of a rollout with exceptions can name; all of them are in the list of nodes."""


@dataclass(frozen=True, slots=True)
class Live:
    """What the daemon's memory has of the nodes at work: their steps by rollout and node, and all runs."""

    steps: Mapping[tuple[str, str], LiveStep] = field(default_factory=dict)
    runners: Mapping[str, RunnerQueue] = field(default_factory=dict)


NOTHING_LIVE: Final = Live()
NOTHING_YET: Final = LiveStep()


def why(index: Index, subject: Rollout | Target, now: float, live: Live = NOTHING_LIVE) -> Reason | None:
    """Return why a rollout or a node does not move; None while it moves or is done.  Raises KeyError."""
    if isinstance(subject, Target):
        return why_nodes(index, subject.rollout, now, (subject.node,), live)[subject.node]
    return _rollout_reason(index.at(now), subject, now)


def why_nodes(
    index: Index,
    rollout_id: str,
    now: float,
    nodes: Iterable[str] | None = None,
    live: Live = NOTHING_LIVE,
) -> dict[str, Reason | None]:
    """Return the answers of some nodes of a rollout, of all by default; they share what is costly."""
    index = index.at(now)
    if nodes is None:
        targets = index.targets(rollout_id)
    else:
        targets = [index.target(rollout_id, node) for node in nodes]
    rollout = index.rollout(rollout_id)
    shared = start_blockers.rollout_blocker(index, rollout, now)
    progress = waves.wave_progress(index, rollout, now)
    decision: Decision | None = None
    due = {target.node for target in due_rollbacks(index, rollout).targets}
    found: dict[str, Reason | None] = {}
    for target in targets:
        if target.node in due:
            reason: Reason | None = rollback_admission.queue_reason(index, target, now)
        elif target.phase is Phase.PENDING:
            blocker = pending_blocker(index, rollout, target, shared, progress, now)
            if blocker is None:
                # Once for all nodes, and only if one of them is free to start: a decision is the costly part.
                decision = decision or decide(index, now)
                blocker = _queued_reason(index, target, decision, now)
            reason = index.dry_run_results.annotate(target, blocker)
        elif target.phase is Phase.FAILED:
            reason = start_blockers.failed_reason(index, target)
        elif target.drift is not None:
            params: Params = {"tasks": target.drift.tasks}
            reason = Reason(ReasonCode.DRIFTED, target.node, params, target.drift.since)
        elif target.phase in IN_FLIGHT_PHASES:
            reason = _at_work_reason(index, target, live, now)
        else:
            reason = None
        found[target.node] = _without_past_instant(reason, now)
    return found


def _without_past_instant(reason: Reason | None, now: float) -> Reason | None:
    if reason is None or reason.remedy is None or reason.remedy.until is None or reason.remedy.until > now:
        return reason
    # What was due at that instant is under way.
    return replace(reason, remedy=replace(reason.remedy, until=None))


# -- a rollout -------------------------------------------------------------------


def _rollout_reason(index: Index, rollout: Rollout, now: float) -> Reason | None:
    """Return why a whole rollout waits, or how it fell short; None while a node is in flight or may start."""
    if rollout.ended_at is not None and rollout.cancelled is None:
        return exceptions_reason(index, rollout)
    reason = start_blockers.rollout_blocker(index, rollout, now)
    if reason is not None:
        return reason
    progress = waves.wave_progress(index, rollout, now)
    if progress.blocker is not None:
        return progress.blocker
    if index.counters(rollout.id).in_flight:
        return None
    if progress.wave is None:
        return _unended_reason(index, rollout)
    places = index.pending(rollout.id, progress.wave.name)
    if not places:
        return None
    node = places[0][2]
    first = why_nodes(index, rollout.id, now, (node,))[node]
    return None if first is None or first.code is ReasonCode.STARTING else first


def _unended_reason(index: Index, rollout: Rollout) -> Reason | None:
    """Return why a rollout whose waves are over does not end."""
    # A covered failure leaves its node failed.
    nodes = dict.fromkeys(failure.node for failure in rollout.failures)
    for target in (index.target(rollout.id, node) for node in nodes):
        if target.phase is Phase.FAILED:
            return start_blockers.failed_reason(index, target)
    places = (place for spec in rollout.plan.waves for place in index.pending(rollout.id, spec.name))
    pending = (index.target(rollout.id, node) for _, _, node in places)
    quarantined = next((quarantine_blocker(index, target) for target in pending), None)
    # One that is checked for drift stays open, and is done all the same.
    return quarantined or (exceptions_reason(index, rollout) if index.all_done(rollout.id) else None)


def exceptions_reason(index: Index, rollout: Rollout) -> Reason | None:
    """Return how a rollout that is done fell short: the nodes that ended without the change."""
    counters = index.counters(rollout.id)
    if not counters.exceptions:
        return None
    named = sorted(counters.exceptions, key=natural_sort_key)[:MAX_NAMED_EXCEPTIONS]
    targets = [index.target(rollout.id, node) for node in named]
    nodes = tuple({"node": each.node, "outcome": each.outcome, "detail": each.last_text} for each in targets)
    params: Params = {"changed": counters.done, "skipped": counters.skipped, "nodes": nodes}
    return Reason(ReasonCode.DONE_WITH_EXCEPTIONS, rollout.id, params, rollout.ended_at)


# -- a node ------------------------------------------------------------------------


def _queued_reason(index: Index, target: Target, decision: Decision, now: float) -> Reason:
    """Return the reason of a node that no rule blocks: it starts, is probed, or waits for another node."""
    if target.is_checked_first:
        remedy = Remedy(RemedyKind.WAIT_FOR_COMPLIANCE)
        return Reason(ReasonCode.CHECKING_COMPLIANCE, target.node, since=target.since, remedy=remedy)
    if Admit(target.rollout, target.node) in decision.commands:
        return Reason(ReasonCode.STARTING, target.node, since=now)
    if ProbeTraffic(target.rollout, target.node) in decision.commands:
        return traffic.probe_pending_reason(target)
    if CompareStaged(target.rollout, target.node) in decision.commands:
        remedy = Remedy(RemedyKind.WAIT_FOR_WORK)
        return Reason(ReasonCode.STAGED_UNKNOWN, target.node, {"detail": ""}, target.since, remedy)
    own_pools = {pool.id for pool in index.pools_for(target.rollout, target.node)}
    for start in decision.of(Admit):
        shares_pool = any(pool.id in own_pools for pool in index.pools_for(start.rollout, start.node))
        if shares_pool or start.node == target.node:
            remedy = Remedy(RemedyKind.WAIT_FOR_NODE, {"node": start.node})
            return Reason(ReasonCode.QUEUED, target.node, {"ahead": start.node}, target.since, remedy)
    return Reason(ReasonCode.QUEUED, target.node, {"ahead": None}, target.since)


def _at_work_reason(index: Index, target: Target, live: Live, now: float) -> Reason | None:
    """Return what a node in flight waits for: its isolators, its checks, an observation, or another run."""
    step = live.steps.get((target.rollout, target.node), NOTHING_YET)
    if step.awaited_sources:
        awaited, answer = {"sources": step.awaited_sources}, Remedy(RemedyKind.WAIT_FOR_INVENTORY)
        return Reason(ReasonCode.INVENTORY_AWAITED, target.node, awaited, step.since, answer)
    if (for_runner := queued_run_reason(index, target.node, live.runners)) is not None:
        return for_runner
    if (shared := trains.outage_reason(index, target, now)) is not None:
        return shared
    params: dict[str, Param]
    isolation = Remedy(RemedyKind.WAIT_FOR_ISOLATION, until=step.isolation_deadline)
    if step.awaited_slot is not None:
        return replace(step.awaited_slot, remedy=isolation)
    if step.api_problem:
        params = {"detail": step.api_problem}
        remedy = isolation if target.phase is Phase.ISOLATING else Remedy(RemedyKind.WAIT_FOR_API)
        return Reason(ReasonCode.AWAITING_API, target.node, params, step.api_problem_since, remedy)
    if (waits := step.repeated_try) is not None:
        params = {"detail": waits.text, "tries": waits.tries}
        code = ReasonCode.NOT_RETURNED_YET if waits.is_return else ReasonCode.NOT_ISOLATED_YET
        deadline = isolation if target.phase is Phase.ISOLATING and not waits.is_return else None
        return Reason(code, target.node, params, waits.since, deadline)
    if step.failing_check:
        checks = {"step": step.step, "detail": step.failing_check}
        remedy = Remedy(RemedyKind.WAIT_FOR_CHECK, until=step.failing_check_until)
        return Reason(ReasonCode.NOT_PASSED_YET, target.node, checks, step.since, remedy)
    seen = observed_unavailability(index, target.node)
    if seen is None or not isinstance(seen.cause, Observation) or seen.cause.sight is not NodeHealth.UNKNOWN:
        return None
    return Reason(ReasonCode.NODE_UNKNOWN, seen.node, seen.params, seen.since, seen.remedy)
