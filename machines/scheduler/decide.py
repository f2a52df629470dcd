"""The decision: what to do now, and why the rest waits.

`decide` walks the rollouts in the order of their submission, and each one's pending nodes in order
(admission.py).  It is a function of the facts and the time.  The daemon commits what it carries out, and
asking again gives what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from machines.facts.index import Index
from machines.facts.votes import was_opened
from machines.model.decision import (
    Decision,
    DocumentPilot,
    EndRollout,
    OpenGate,
    Release,
    Requeue,
    RollBack,
    SkipQuarantined,
)
from machines.model.node import natural_sort_key
from machines.model.plan import WaveDef
from machines.model.rollout import Rollout, Target
from machines.rules import gates, pools, start_blockers, waves
from machines.rules.node_claims import quarantine_blocker
from machines.rules.pending_blocker import pending_blocker
from machines.rules.releases import release_blocker
from machines.rules.rollbacks import due_rollbacks, rollbacks_reason
from machines.rules.waves import WaveProgress
from machines.scheduler import (
    admission,
    checks,
    expiry,
    isolation_aborts,
    rollback_admission,
    stage_admission,
)
from machines.scheduler.decision_builder import DecisionBuilder
from machines.states import Outcome, Phase

QUARANTINE_SKIP_S: Final = 24 * 3600.0
"""After this time a rollout no longer waits for a quarantined node: people have had a day to correct it."""

REJOIN_WAIT_S: Final = 600.0
"""A rollout does not end before this time after a node left: the next two refreshes may report it again."""


def decide(index: Index, now: float) -> Decision:
    """Return what to do at `now` (epoch seconds), and why the rest waits."""
    index = index.at(now)
    builder = DecisionBuilder(start_blockers.observe_only_blocker(index))
    expiry.collect_expired(index, now, builder)
    # Before all admissions, so that taking back a bad change does not wait behind making new ones.
    for rollout in index.rollouts.values():
        rollback_admission.admit_rollbacks(index, rollout, now, builder)
    rolling_back = {each.rollout for each in builder.commands if isinstance(each, RollBack)}
    for rollout in index.rollouts.values():
        # Stages that run are followed to their end, and a cancelled rollout removes what it brought.
        if rollout.closed:
            stage_admission.collect_preparations(index, rollout, now, builder)
            continue
        checks.collect_checks(index, rollout, now, builder)
        doubt = start_blockers.doubt_blocker(index, rollout.id)
        if doubt is not None:  # not even its end or a gate may rest on a doubtful row
            builder.reasons[rollout.id] = doubt
            if index.is_refused(rollout.id):
                builder.wake_by(index.refusals[rollout.id].until)
            continue
        expiry.collect_soak_restarts(index, rollout, now, builder)
        _collect_gate_openings(index, rollout, now, builder)
        if gates.needs_pilot_evidence(index, rollout):
            builder.add(DocumentPilot(rollout.id))
        _requeue_drifted(index, rollout, builder)
        stage_admission.collect_preparations(index, rollout, now, builder)
        if index.all_done(rollout.id) and rollbacks_reason(index, rollout) is None:
            _end_rollout(index, rollout, now, builder)
            continue
        # A wave with a node that begins its rollback is not done any more: the next decision admits by that.
        if rollout.id not in rolling_back:
            _admit_rollout(index, rollout, now, builder)
    # Over all rollouts at once, because they share the pools that an outage fills.
    if builder.dry_reason is None:
        isolation_aborts.collect(index, now, builder)
        _observe_peers(index, now, builder)
    for observation in index.left_cordoned():
        if release_blocker(index, observation, now) is None:
            builder.add(Release(observation.node))
    builder.wake_by(min((index.next_change(), *(each.until for each in builder.backoffs))))
    builder.reasons.update(pools.full_pool_reasons(index))
    return builder.build()


def _pending_targets(index: Index, rollout: Rollout, specs: Iterable[WaveDef]) -> list[Target]:
    names = (node for spec in specs for _, _, node in index.pending(rollout.id, spec.name))
    return [index.target(rollout.id, node) for node in names]


# -- starting --------------------------------------------------------------------


def _end_rollout(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """End a rollout whose nodes are all done after its last soak: a check may still fail a canary."""
    if rollout.plan.drift_every_s is not None:
        return  # it stays open: its nodes are checked for drift, and joiners get the change
    ends = [waves.soak_ends_at(index, rollout, spec) for spec in rollout.plan.waves if spec.soak_s]
    if index.counters(rollout.id).left:
        left = (each for each in index.targets(rollout.id) if each.outcome is Outcome.LEFT)
        ends += (each.since + REJOIN_WAIT_S for each in left if each.node not in index.nodes)
    until = max(ends, default=now)
    if now >= until:
        builder.add(EndRollout(rollout.id))
    else:
        builder.wake_by(until)


def _requeue_drifted(index: Index, rollout: Rollout, builder: DecisionBuilder) -> None:
    """Change drifted nodes again; they start by the same rules as any other."""
    if rollout.plan.keep and builder.dry_reason is None:
        # A node that awaits its rollback loses the change: a requeue would end the order and give it again.
        rollbacks = due_rollbacks(index, rollout)
        # Beyond the limit too: people decide about those, and a rollback of a pending node is refused.
        due = {target.node for target in (*rollbacks.targets, *rollbacks.beyond_limit)}
        for node in sorted(index.counters(rollout.id).drifted - due, key=natural_sort_key):
            builder.add(Requeue(rollout.id, node))


def _collect_gate_openings(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    for gate, wave in rollout.plan.gates_in_order:
        is_new = not was_opened(rollout, gate, wave)
        if is_new and gates.gate_view(index, rollout, gate, wave, now).state == "open":
            # Recorded: from then on votes do not expire, and each later node needs its own team's vote.
            builder.add(OpenGate(rollout.id, gate, wave))


def _admit_rollout(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """Start the rollout's nodes that may start; if none is in flight, record why the first one waits."""
    reason = start_blockers.rollout_blocker(index, rollout, now)
    if reason is not None:
        builder.reasons[rollout.id] = reason
        return
    progress = waves.wave_progress(index, rollout, now)
    if progress.soak_ends_at is not None:
        builder.wake_by(progress.soak_ends_at)
    if progress.blocker is not None and progress.wave is not None:
        builder.reasons[rollout.id] = builder.reasons[f"{rollout.id}/{progress.wave.name}"] = progress.blocker
        return
    if progress.wave is None or index.only_quarantined(rollout.id, progress.wave.name):
        _skip_quarantined(index, rollout, progress, now, builder)
    if progress.wave is None:
        return
    admitted_before = len(builder.capacity.nodes)
    closed = start_blockers.window_blocker(index, rollout, None, now)
    if closed is None:
        admission.admit_wave(index, rollout, progress.wave, now, builder)
    else:
        # Asked once for all nodes: teams can only tighten the plan's windows.
        builder.wake_by(start_blockers.blocker_expires_at(index, rollout, None, closed, now))
    # While nodes start or are in flight, the rollout moves and has no reason.
    if admitted_before == len(builder.capacity.nodes) and not index.counters(rollout.id).in_flight:
        places = index.pending(rollout.id, progress.wave.name)
        first = index.target(rollout.id, places[0][2]) if places else None
        reason = None if first is None else pending_blocker(index, rollout, first, None, progress, now)
        if reason is not None:
            builder.reasons[rollout.id] = reason


def _skip_quarantined(
    index: Index, rollout: Rollout, progress: WaveProgress, now: float, builder: DecisionBuilder
) -> None:
    """Skip the quarantined nodes that are all that the rollout, or its wave, has waited for a day long."""
    if index.counters(rollout.id).in_flight:
        return
    waves_left = rollout.plan.waves if progress.wave is None else (progress.wave,)
    for target in _pending_targets(index, rollout, waves_left):
        reason = quarantine_blocker(index, target)
        if reason is None or reason.since is None:
            continue
        builder.reasons.setdefault(rollout.id, reason)
        if target.isolated:
            continue  # people decide whether it returns to service
        if now >= reason.since + QUARANTINE_SKIP_S:
            builder.add(SkipQuarantined(rollout.id, target.node))
        else:
            builder.wake_by(reason.since + QUARANTINE_SKIP_S)


def _observe_peers(index: Index, now: float, builder: DecisionBuilder) -> None:
    """Observe the peers of isolating nodes, so that an outage among them is noticed in time."""
    for target in index.needing_driver():
        if target.phase is Phase.ISOLATING:
            admission.request_peer_observations(index, target, builder)
            builder.wake_by(now + index.limits.observe_within_s)
