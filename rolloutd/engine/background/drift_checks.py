"""Drift: what check mode would change again on the nodes that a rollout changed.

A report is recorded when it differs from the last one; what check mode cannot say changes no record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from machines.facts.index import Index
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.events import DriftRecorded
from machines.model.plan import Plan
from machines.model.rollout import DAEMON, Actor, Target
from machines.scheduler.progress import is_at_work
from machines.states import CARRIES_CHANGE
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs, for_each
from rolloutd.errors import Conflict, RolloutdError
from rolloutd.ports import PinnedSource

MAX_TASK_CHARS = 200
"""Characters of a task's name in the record: the audit keeps it for ever."""


AT_ONCE = 64
"""Nodes of one rollout that are checked or wait for a run: more runs than a machine has for checks."""

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
        return [target for target in index.targets(rollout) if self.can_drift(target)]

    def due_targets(self, index: Index, rollout: str, since: float) -> Iterator[Target]:
        """Yield those of them that have had the change since an instant (epoch seconds)."""
        return (
            target for target in index.targets(rollout) if target.since <= since and self.can_drift(target)
        )

    def can_drift(self, target: Target) -> bool:
        return target.outcome in CARRIES_CHANGE and target.node in self._state.index.nodes

    async def check(self, plan: Plan, target: Target, actor: Actor, cause: str) -> ComplianceReport:
        """Check one node, and record drift that is new or gone."""
        try:
            source = await self._source(target.rollout)
            report = await self._check_mode.check(target.node, source, plan, rollout=target.rollout)
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
        """Check the nodes that have had their change for the interval, once in each, also over a restart."""
        index, now = self._state.index, self._state.now()
        self._checked_at = {key: at for key, at in self._checked_at.items() if key in index.rollouts}
        for rollout in index.rollouts.values():
            every_s = rollout.plan.drift_every_s
            if every_s is None or rollout.closed:
                continue
            # A restart forgets the last check: the next one comes early, which changes nothing on the nodes.
            if now < self._checked_at.get(rollout.id, 0.0) + every_s:
                continue
            if any(True for _ in self._checker.due_targets(index, rollout.id, now - every_s)):
                self._jobs.start(tasks, self._check_rollout, rollout.id, name=f"drift {rollout.id}")

    async def _check_rollout(self, rollout_id: str) -> None:
        index, now = self._state.index, self._state.now()
        rollout = index.rollouts.get(rollout_id)
        if rollout is None or rollout.plan.drift_every_s is None:
            return
        self._checked_at[rollout_id] = now
        due_since, plan = now - rollout.plan.drift_every_s, rollout.plan
        names = [target.node for target in self._checker.due_targets(index, rollout_id, due_since)]

        async def check(node: str) -> None:
            # As it is when its turn comes, hours after the first one of a large fleet.
            target = self._state.index.get(Target, rollout_id, node)
            if target is not None and self._checker.can_drift(target):
                await self._checker.check(plan, target, DAEMON, "drift checked on schedule")

        await for_each(names, check, at_once=AT_ONCE)
