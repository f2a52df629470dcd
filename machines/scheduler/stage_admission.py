"""Preparation: which stage of which node runs next, and which builds.

A stage needs no slot and no window of the plan.  How it is executed is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from machines.facts.index import Index
from machines.facts.node_work import WorkKind, conflicting_work
from machines.facts.preparations import BUILD_NODE, RolloutPreparations
from machines.model import windows
from machines.model.actions import is_pausing
from machines.model.decision import Prepare
from machines.model.preparation import (
    CLEANUP,
    DEFAULT_PREPARE_PARALLEL,
    TRIED_AGAIN,
    PreparationState,
    PrepareKind,
    PrepareStage,
)
from machines.model.reasons import ReasonCode
from machines.model.rollout import Rollout
from machines.rules import preparing, start_blockers
from machines.scheduler.decision_builder import DecisionBuilder
from machines.states import Phase


def collect_preparations(index: Index, rollout: Rollout, now: float, builder: DecisionBuilder) -> None:
    """Collect the stages to run now: those that run already, then new ones.

    Once too many nodes failed, only those are tried again.  A cancelled rollout is cleaned up.
    """
    known = index.preparations(rollout.id)
    if known is None:
        return
    for node, name in sorted(known.active):  # after a restart nothing follows them
        builder.add(Prepare(rollout.id, node, name, known.rows[node, name].attempt))
    if builder.dry_reason is not None or index.disk_shortage is not None:
        return
    if rollout.cancelled is not None:
        if is_to_be_cleaned(index, rollout):
            _collect_cleanups(index, rollout, known, now, builder)
        return
    blocker = start_blockers.rollout_blocker(index, rollout, now)
    if blocker is not None and blocker.code is not ReasonCode.PREPARE_FAILED:
        return
    if not windows.any_open(rollout.plan.prepare_windows, now):
        opens_at = windows.next_opening(rollout.plan.prepare_windows, now)
        if opens_at is not None:
            builder.wake_by(opens_at)
        return
    walk = _StageCollector(index, rollout, known, now, builder, only_failed=blocker is not None)
    for stage in rollout.prepare_stages:
        if stage.kind is not PrepareKind.BUILD:
            walk.collect_nodes(stage)
        elif stage.name not in rollout.built:
            walk.collect_build(stage)
            return  # the other stages need what it makes


def may_begin(index: Index, rollout: str, node: str, stage: str, now: float) -> bool:
    """Return whether a stage that was decided may still begin.

    Another rollout may have taken the node, or another node may have begun the stage: two decisions can
    choose two nodes before the first one is recorded.
    """
    known, found = index.preparations(rollout), index.rollouts.get(rollout)
    if known is None or found is None:
        return False
    host = found.node_of_stage(node, stage)
    # Two decisions can ask for one node before the first stage is recorded: the second one ends here.
    # A build waits for its own rollout's target too.
    own = "" if node == BUILD_NODE else rollout
    if host and conflicting_work(index, WorkKind.STAGE, host, now, own) is not None:
        return False
    if stage == CLEANUP:
        return is_to_be_cleaned(index, found)
    blocker = start_blockers.rollout_blocker(index, found, now)
    if blocker is not None and blocker.code is not ReasonCode.PREPARE_FAILED:
        return False
    if node == BUILD_NODE:
        return True
    target = index.target(rollout, node)
    wanted = next((each for each in found.prepare_stages if each.name == stage), None)
    return (
        wanted is not None
        and known.next_stage(node) == stage
        and _free_places(known, wanted) > 0
        and preparing.may_prepare(found, target)
        and start_blockers.preparation_hindrance(index, found, target, now) is None
    )


def _is_alone(known: RolloutPreparations, stage: PrepareStage) -> bool:
    """Return whether the stage may run on one node only, until it is done there undisturbed."""
    return stage.kind is PrepareKind.INSTALL and not known.is_proven(stage)


def _free_places(known: RolloutPreparations, stage: PrepareStage) -> int:
    """Return how many further nodes may begin the stage now."""
    # An install can break a node, so the first node has to come through it undisturbed.
    limit = 1 if _is_alone(known, stage) else stage.max_parallel
    # A stage also runs on a node that left the rollout meanwhile.
    return limit - sum(name == stage.name for _, name in known.active)


def is_to_be_cleaned(index: Index, rollout: Rollout) -> bool:
    """Return whether a cancelled rollout is cleaned up.

    A later one of its plan, also one that has ended, may have skipped stages because of what it brought.
    """
    later = (
        each
        for each in index.rollouts.values()
        if each.supersedes == rollout.id
        or (
            each.plan.name == rollout.plan.name
            and (not each.closed or (each.id != rollout.id and each.submitted_at >= rollout.submitted_at))
        )
    )
    return rollout.cancelled is not None and next(later, None) is None


def _collect_cleanups(
    index: Index, rollout: Rollout, known: RolloutPreparations, now: float, builder: DecisionBuilder
) -> None:
    """Collect the nodes without the change that still have what this rollout brought."""
    walk = _StageCollector(index, rollout, known, now, builder)
    busy = {node for node, _ in known.active}
    free = DEFAULT_PREPARE_PARALLEL - sum(name == CLEANUP for _, name in known.active)
    for node in dict.fromkeys(node for node, _ in known.rows):
        if free <= 0:
            return
        target = None if node in busy or node == BUILD_NODE else index.target(rollout.id, node)
        if target is None or target.phase is not Phase.PENDING or node not in index.nodes:
            continue
        is_free = conflicting_work(index, WorkKind.STAGE, node, now, rollout.id) is None
        if known.needs_cleanup(node) and is_free:
            free -= walk.collect(CLEANUP, node)


@dataclass(frozen=True, slots=True)
class _StageCollector:
    index: Index
    rollout: Rollout
    known: RolloutPreparations
    now: float
    builder: DecisionBuilder
    only_failed: bool = False

    def collect_build(self, stage: PrepareStage) -> None:
        """Collect a build, unless something else works on its host."""
        host = stage.host
        if not host or conflicting_work(self.index, WorkKind.STAGE, host, self.now) is None:
            self.collect(stage.name, BUILD_NODE)

    def collect_nodes(self, stage: PrepareStage) -> None:
        """Collect the nodes whose next stage this is, below its limit.

        An install goes first to one node alone, also while that node waits for its next try.  Nodes that may
        not be prepared now are passed over.
        """
        is_alone = _is_alone(self.known, stage)
        free = _free_places(self.known, stage)
        places = self.known.stages[stage.name]
        waiting = () if self.only_failed else (node for _, _, node in places.waiting)
        for node in chain(sorted(places.failed), waiting):
            if free <= 0:
                return
            target = self.index.target(self.rollout.id, node)
            if not preparing.may_prepare(self.rollout, target):
                continue
            if start_blockers.preparation_hindrance(self.index, self.rollout, target, self.now) is None:
                free -= self.collect(stage.name, node) or is_alone

    def collect(self, stage: str, node: str) -> bool:
        """Collect one stage of one node, unless its backoff is not over."""
        row = self.known.rows.get((node, stage))
        if row is not None and row.state is PreparationState.RUNNING:
            return False  # collected with those that run
        is_again = row is not None and row.state in TRIED_AGAIN
        if row is not None and is_again and is_pausing(row.at, row.not_before, self.now):
            self.builder.wake_by(row.not_before)
            return False
        self.builder.add(Prepare(self.rollout.id, node, stage, 1 if row is None else row.attempt + 1))
        return True
