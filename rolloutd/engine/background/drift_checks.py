"""Drift: what check mode would change again on the nodes that a rollout changed.

A report is recorded when it differs from the last one; what check mode cannot say changes no record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from machines.facts.index import Index
from machines.model.compliance import Compliance, ComplianceReport
from machines.model.events import DriftRecorded
from machines.model.plan import Plan
from machines.model.rollout import Actor, Target
from machines.scheduler.progress import is_out_of_service
from machines.states import CARRIES_CHANGE
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.state import State
from rolloutd.errors import Conflict, RolloutdError

MAX_TASK_CHARS = 200
"""Characters of a task's name in the record: the audit keeps it for ever."""


class DriftChecker:
    """Checks nodes for drift, of live rollouts and of closed ones."""

    def __init__(self, state: State, tree: Callable[[str], Awaitable[Path]], check_mode: CheckMode) -> None:
        self._state = state
        self._tree = tree
        self._check_mode = check_mode

    def targets(self, index: Index, rollout: str) -> list[Target]:
        """Return the nodes of a rollout that can have drifted: they have the change and are in service."""
        return [
            target
            for target in index.targets(rollout)
            if target.outcome in CARRIES_CHANGE
            and target.node in self._state.index.nodes
            and not is_out_of_service(self._state.index, target.node)
        ]

    async def check(self, plan: Plan, target: Target, actor: Actor, cause: str) -> ComplianceReport:
        """Check one node, and record drift that is new or gone."""
        try:
            tree = await self._tree(target.rollout)
            report = await self._check_mode.check(target.node, tree, plan.stages, run_prefix=target.rollout)
            if report.compliance is not Compliance.UNKNOWN:
                await self._record(target, report, actor, cause)
        except RolloutdError as error:  # the source was removed, or the store cannot write
            return ComplianceReport(target.node, self._state.now(), problem=str(error))
        return report

    async def _record(self, target: Target, report: ComplianceReport, actor: Actor, cause: str) -> None:
        tasks = tuple(change.task[:MAX_TASK_CHARS] for change in report.changes)
        if tasks == (target.drift.tasks if target.drift is not None else ()):
            return
        async with self._state.exclusive_commit(actor) as commit:
            index = self._state.index
            if target.rollout in index.rollouts and index.target(target.rollout, target.node) != target:
                return  # the node moved during the check
            if is_out_of_service(index, target.node):
                return
            try:
                await commit([DriftRecorded(target.rollout, target.node, report.at, tasks)], cause)
            except Conflict:
                return  # the closed rollout was deleted, or another check recorded first
