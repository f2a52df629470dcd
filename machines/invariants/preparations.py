"""Invariants of preparation: what must never happen to a node that has no slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from machines.facts.node_work import NodeWork, WorkKind, conflicting_work
from machines.invariants.facts import EarlierEvents, InvariantFacts
from machines.model.node import Node
from machines.model.plan import PILOT_WAVE, GateName
from machines.model.preparation import (
    CLEANUP,
    COMPARISON_MAX_AGE_S,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
)
from machines.model.rollout import Rollout, Target
from machines.states import Phase


def prepare_stages_violation(
    facts: InvariantFacts, rollout: Rollout, target: Target, now: float
) -> str | None:
    """Return why a node must not be isolated: a stage is not done, or its files were not compared."""
    node = facts.nodes[target.node]
    has_files = False
    for stage in _needed_stages(rollout, node):
        row = facts.preparation(rollout.id, target.node, stage.name)
        if not _is_done(row) or row.content != stage.content_for(node):
            return f"its prepare stage {stage.name} is not done"
        has_files |= stage.kind is PrepareKind.COPY and not stage.playbook
    compared = facts.staged_comparison(rollout.id, target.node) if has_files else None
    is_whole = compared is not None and not compared.problem
    is_recent = compared is not None and 0.0 <= now - compared.at < COMPARISON_MAX_AGE_S
    if not has_files or (is_whole and is_recent):
        return None
    return "its staged files were not compared just now"


def _needed_stages(rollout: Rollout, node: Node) -> Iterator[PrepareStage]:
    """Yield the stages with something to do on the node; what an unfinished build makes may be for it."""
    for stage in rollout.prepare_stages:
        if stage.kind is not PrepareKind.BUILD and stage.applies_to(node):
            is_awaited = bool(stage.built_by) and stage.built_by not in rollout.built
            if stage.kind is not PrepareKind.COPY or is_awaited or stage.artifacts_for(node):
                yield stage


def _is_done(row: Preparation | None) -> TypeGuard[Preparation]:
    return row is not None and row.state in (PreparationState.DONE, PreparationState.SKIPPED)


def work_violation(
    facts: InvariantFacts, wanted: WorkKind, node: str, now: float, rollout: str
) -> str | None:
    """Return the work on the node that work of a rollout must wait for."""
    work = conflicting_work(facts, wanted, node, now, rollout)
    match work:
        case None:
            return None
        case NodeWork(cause=Target(phase=phase)):
            return f"it is {phase} in {work.rollout}"
        case NodeWork(kind=WorkKind.HOLD):
            return "it is held"
        case NodeWork(kind=WorkKind.STAGE):
            return f"{work.rollout} prepares it"
        case NodeWork(kind=kind):
            return f"its {kind} has not ended"


def preparation_violation(
    facts: InvariantFacts, row: Preparation, now: float, earlier: EarlierEvents
) -> str | None:
    """Judge a stage that is about to begin, or that disturbed its node."""
    rollout = facts.rollouts.get(row.rollout)
    node = "" if rollout is None else rollout.node_of_stage(row.node, row.stage)
    if rollout is None or not node:
        return None
    subject = f"stage {row.stage} of {node} in {row.rollout}"
    if row.state is PreparationState.DISTURBED:
        return None if row.node in earlier.failed else f"{subject} disturbed the node, and no failure says so"
    before = facts.preparation(row.rollout, row.node, row.stage)
    is_new = before is None or before.attempt != row.attempt
    if before is not None and row.attempt < before.attempt:
        return f"{subject}: attempt {row.attempt} does not follow {before.attempt}"
    if row.state is not PreparationState.RUNNING or not is_new:
        return None
    # A build waits for its own rollout's target too.
    problem = work_violation(facts, WorkKind.STAGE, node, now, rollout.id if row.node else "")
    if problem is None and row.node:
        problem = _beginning_violation(facts, rollout, row)
    return f"{subject} cannot begin: {problem}" if problem else None


def _beginning_violation(facts: InvariantFacts, rollout: Rollout, row: Preparation) -> str | None:
    target = facts.target(rollout.id, row.node)
    if target.phase is not Phase.PENDING:
        return f"the node is {target.phase}"
    if row.stage == CLEANUP:
        return None if rollout.cancelled is not None else "the rollout is not cancelled"
    if rollout.cancelled is not None or rollout.ended_at is not None:
        return "the rollout is over"
    entry = GateName.PILOT if target.wave == PILOT_WAVE else GateName.START
    if not any(each.gate is entry for each in rollout.opened):
        return f"the {entry} gate is not open"
    names = [stage.name for stage in rollout.prepare_stages]
    if row.stage not in names:
        return f"the plan has no stage {row.stage}"
    earlier = names[: names.index(row.stage)]
    node = facts.nodes.get(row.node)
    for stage in () if node is None else _needed_stages(rollout, node):
        if stage.name in earlier and not _is_done(facts.preparation(rollout.id, row.node, stage.name)):
            return f"stage {stage.name} is not done"
    return None
