"""Drift: what check mode would change again on the nodes that a rollout changed.

A report is recorded when it differs from the last one; what check mode cannot say changes no record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from machines.facts.index import Index
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.events import DriftRecorded
from machines.model.plan import Plan
from machines.model.rollout import DAEMON, Actor, Target
from machines.scheduler.progress import is_at_work
from machines.states import CARRIES_CHANGE
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import Conflict, RolloutdError
from rolloutd.ports import PinnedSource

MAX_TASK_CHARS = 200
"""Characters of a task's name in the record: the audit keeps it for ever."""


POLL_S = 60.0
"""Interval of looking for rollouts whose drift check is due."""


class DriftChecker:
    """Checks nodes for drift, of live rollouts and of closed ones."""

    def __init__(
        self, state: State, source: Callable[[str], Awaitable[PinnedSource]], check_mode: CheckMode
    ) -> None:
        self._state = state
        self._source = source
        self._check_mode = check_mode

    def targets(self, index: Index, rollout: str) -> list[Target]:
        """Return the nodes of a rollout that can have drifted: they have the change."""
        return [
            target
            for target in index.targets(rollout)
            if target.outcome in CARRIES_CHANGE and target.node in self._state.index.nodes
        ]

    async def check(self, plan: Plan, target: Target, actor: Actor, cause: str) -> ComplianceReport:
        """Check one node, and record drift that is new or gone."""
        try:
            source = await self._source(target.rollout)
            report = await self._check_mode.check(target.node, source, plan.stages, rollout=target.rollout)
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
            if is_at_work(index, target.node):
                return
            try:
                await commit([DriftRecorded(target.rollout, target.node, report.at, tasks)], cause)
            except Conflict:
                return  # the closed rollout was deleted, or another check recorded first


class DriftMonitor:
    """The scheduled drift checks of rollouts that stay open."""

    def __init__(self, state: State, checker: DriftChecker) -> None:
        self._state = state
        self._checker = checker
        self._checked_at: dict[str, float] = {}
        self._jobs: BackgroundJobs[str] = BackgroundJobs("drift", state)

    def start_due(self, tasks: asyncio.TaskGroup) -> None:
        """Check every rollout whose nodes are done and whose interval has passed, also over a restart."""
        index, now = self._state.index, self._state.now()
        self._checked_at = {key: at for key, at in self._checked_at.items() if key in index.rollouts}
        for rollout in index.rollouts.values():
            every_s = rollout.plan.drift_every_s
            if every_s is None or rollout.closed or not index.all_done(rollout.id):
                continue
            done_at = max((target.since for target in index.targets(rollout.id)), default=now)
            # A restart forgets the last check: the next one comes early, which changes nothing on the nodes.
            if now >= max(done_at, self._checked_at.get(rollout.id, 0.0)) + every_s:
                self._jobs.start(tasks, self._check_rollout, rollout.id, name=f"drift {rollout.id}")

    async def _check_rollout(self, rollout_id: str) -> None:
        index = self._state.index
        rollout = index.rollouts.get(rollout_id)
        if rollout is None:
            return
        self._checked_at[rollout_id] = self._state.now()
        checks = (
            self._checker.check(rollout.plan, target, DAEMON, "drift checked on schedule")
            for target in self._checker.targets(index, rollout_id)
        )
        await asyncio.gather(*checks)
