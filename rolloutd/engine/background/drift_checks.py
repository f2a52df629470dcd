"""Drift: what check mode would change again on the nodes that a rollout changed.

A report is recorded when it differs from the last one; what check mode cannot say changes no record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from machines.facts.index import Index
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.decision import CheckDrift
from machines.model.events import DriftRecorded
from machines.model.plan import Plan
from machines.model.rollout import DAEMON, Actor, Target
from machines.scheduler.checks import can_drift, is_at_work
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.state import State
from rolloutd.engine.tasks import for_each
from rolloutd.errors import Conflict, RolloutdError
from rolloutd.ports import PinnedSource

MAX_TASK_CHARS = 200
"""Characters of a task's name in the record: the audit keeps it for ever."""

AT_ONCE = 64
"""Nodes of one rollout that are checked or wait for a run: more runs than a machine has for checks."""


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
        return [target for target in index.targets(rollout) if can_drift(index, target)]

    async def check_nodes(self, command: CheckDrift) -> None:
        rollout = self._state.index.rollouts.get(command.rollout)
        if rollout is None:
            return
        plan = rollout.plan

        async def check(node: str) -> None:
            # As it is when its turn comes, hours after the first one of a large fleet.
            index = self._state.index
            target = index.get(Target, command.rollout, node)
            if target is not None and can_drift(index, target):
                await self.check(plan, target, DAEMON, "drift checked on schedule")

        await for_each(command.nodes, check, at_once=AT_ONCE)

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
