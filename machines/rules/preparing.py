"""The rules of preparation: why a node is not prepared yet, and why nothing more is prepared."""

from __future__ import annotations

from machines.facts.index import Index
from machines.facts.votes import was_opened
from machines.model.limits import Budget
from machines.model.plan import PILOT_WAVE, GateName
from machines.model.preparation import COMPARISON_RETRY_S, Preparation, PreparationState, PrepareKind
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Rollout, Target


def unprepared_blocker(index: Index, target: Target) -> Reason | None:
    """Return why a node that is not prepared must not be isolated; None when it is prepared."""
    known = index.preparations(target.rollout)
    stage = None if known is None else known.next_stage(target.node)
    if known is None or stage is None:
        return None
    row = known.rows.get((target.node, stage))
    if row is not None and row.state is PreparationState.FAILED:
        return _failed_reason(target.node, row, failed=1)
    is_running = row is not None and row.state is PreparationState.RUNNING
    detail = "" if row is None else row.text
    params: Params = {"stage": stage, "left": known.unprepared, "running": is_running, "detail": detail}
    remedy = Remedy(RemedyKind.WAIT_FOR_PREPARATION)
    return Reason(ReasonCode.PREPARING, target.node, params, target.since, remedy)


def needs_comparison(index: Index, target: Target, now: float) -> bool:
    """Return whether the node's staged files must be compared before it may start."""
    known = index.preparations(target.rollout)
    if known is None or not known.compared_stages(index.nodes[target.node]):
        return False
    last = index.staged_comparison(target.rollout, target.node)
    return last is None or not last.is_fresh(now)


def comparison_blocker(index: Index, target: Target) -> Reason | None:
    """Return why the node's staged files could not be compared."""
    last = index.staged_comparison(target.rollout, target.node)
    if last is None or not last.problem:
        return None
    remedy = Remedy(RemedyKind.WAIT_UNTIL, until=last.at + COMPARISON_RETRY_S)
    return Reason(ReasonCode.STAGED_UNKNOWN, target.node, {"detail": last.problem}, last.at, remedy)


def preparation_blocker(index: Index, rollout: Rollout) -> Reason | None:
    """Return the stage that failed on more nodes than it may: then nothing else is prepared or isolated."""
    known = index.preparations(rollout.id)
    if known is None:
        return None
    for stage in rollout.prepare_stages:
        if stage.kind is PrepareKind.BUILD:
            row = known.build_row(stage)
            if row is not None and row.state is PreparationState.FAILED:
                return _failed_reason(rollout.id, row, failed=1)
            continue
        failed = known.stages[stage.name].failed
        if failed and is_over(stage.tolerate, failed, index, rollout):
            first = min((known.rows[node, stage.name] for node in failed), key=lambda row: (row.at, row.node))
            return _failed_reason(first.node, first, failed=len(failed))
    return None


def is_over(tolerate: Budget, failed: set[str], index: Index, rollout: Rollout) -> bool:
    """Return whether more nodes failed than may; of the pilot and the canaries none may."""
    # The nodes of the waves up to the first votes to continue find such errors, so one of them is enough.
    waves = rollout.plan.waves
    last = next((number for number, wave in enumerate(waves) if wave.gate is GateName.CONTINUE), -1)
    first_waves = {PILOT_WAVE, *(wave.name for wave in waves[: last + 1])}  # the pilot is first in any plan
    if any(index.target(rollout.id, node).wave in first_waves for node in failed):
        return True
    counters = index.counters(rollout.id)
    total = counters.phases.total() - counters.left
    allowed = tolerate.count or 0
    if tolerate.percent is not None:
        allowed = total * tolerate.percent // 100
    return len(failed) > allowed


def may_prepare(rollout: Rollout, target: Target) -> bool:
    """Return whether the votes allow to touch the node: before the start gate opens, only the pilot."""
    return target.wave == PILOT_WAVE or was_opened(rollout, GateName.START)


def _failed_reason(subject: str, row: Preparation, *, failed: int) -> Reason:
    params: Params = {
        "stage": row.stage,
        "message": row.text,
        "attempt": row.attempt,
        "more": failed - 1,
        "until": row.not_before,
    }
    args: dict[str, str | bool] = {"rollout": row.rollout, "node": row.node}
    remedy = Remedy(RemedyKind.RETRY_PREPARATION, args, until=row.not_before)
    return Reason(ReasonCode.PREPARE_FAILED, subject, params, row.at, remedy)
