"""Checks of pending nodes that may need nothing: such a node is done without isolation and without a slot.

With `skip_compliant` the plan's stages run in check mode first, then the plan's checks run.  Only a node that
passes all of it is already current.  A crash before the result is recorded repeats the check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from machines.facts.node_work import WorkKind
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.decision import CheckIfCurrent
from machines.model.events import ChangeNeeded
from machines.model.rollout import Target
from machines.scheduler.progress import is_at_work
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.engine.background.extra_checks import run_check
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.redaction import redact_for_team
from rolloutd.engine.state import State
from rolloutd.engine.tasks import BackgroundJobs
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Ok

MAX_NAMED_TASKS = 3
"""Tasks that the record of a needed change names; the rest is a number."""


class CurrentChecker:
    """The checks under way, at most one for each node of a rollout."""

    def __init__(self, state: State, adapters: AdapterSet, check_mode: CheckMode) -> None:
        self._state = state
        self._adapters = adapters
        self._check_mode = check_mode
        self._jobs: BackgroundJobs[tuple[str, str]] = BackgroundJobs(
            "current-check", state, lambda: state.wake_up()
        )

    def request_checks(self, tasks: asyncio.TaskGroup, wanted: Sequence[CheckIfCurrent]) -> None:
        """Start the checks that are not under way yet, of nodes that are ready for them."""
        for each in wanted:
            if not self._state.awaited_sources(each.node):
                key = (each.rollout, each.node)
                self._jobs.start(tasks, self._check, key, name=f"check {key[0]}/{key[1]}")

    async def _check(self, key: tuple[str, str]) -> None:
        if key[0] not in self._state.index.rollouts or key[1] not in self._state.index.nodes:
            return  # the rollout was deleted, or the node left, before the task began
        # Compared at the end: a rollout that worked on the node meanwhile makes the result worthless.
        before = tuple(self._state.index.targets_on(key[1]))
        try:
            async with self._state.begin_work(WorkKind.CHECKS, key[1], key[0]) as obstacle:
                if obstacle is not None:
                    return  # the next decision asks again once that has ended
                problem = await self._why_change_is_needed(NodeSession(self._state, self._adapters, *key))
            await self._record(key, before, problem)
        except StoreFailed as failure:
            self._state.last_write_error = str(failure)

    async def _why_change_is_needed(self, session: NodeSession) -> str:
        """Return what the node needs or cannot say; empty if it needs nothing."""
        plan = session.state.index.plan_for(session.target)
        if plan.skip_compliant:
            try:
                source = await self._adapters.source(session.rollout)
            except RolloutdError as error:
                return str(error)
            report = await self._check_mode.check(session.node, source, plan, rollout=session.rollout)
            if report.compliance is not Compliance.COMPLIANT:
                return describe_report(report)
        for spec in plan.verify:
            result = await run_check(session, spec)
            if not isinstance(result, Ok):
                return f"{spec.name}: {redact_for_team(result, spec.team).text}"
        return ""

    async def _record(self, key: tuple[str, str], before: Sequence[Target], problem: str) -> None:
        async with self._state.exclusive_commit() as commit:
            index, now = self._state.index, self._state.now()
            rollout = index.rollouts.get(key[0])
            if rollout is None or rollout.closed:
                return  # the rollout was cancelled or deleted during the check
            target = index.target(*key)
            if target.phase is not Phase.PENDING:
                return
            if tuple(index.targets_on(key[1])) != tuple(before) or is_at_work(index, key[1]):
                return  # a rollout worked on the node meanwhile; the next decision asks again
            if problem:
                needed = ChangeNeeded(target.rollout, target.node, now, problem)
                await commit([needed], f"needs the change: {problem}")
                return
            why = "all checks pass without the change"
            if rollout.plan.skip_compliant:
                why = "check mode would change nothing, and all checks pass"
            current = transition(
                target, Trigger.FOUND_CURRENT, now, outcome=Outcome.ALREADY_CURRENT, text=why
            )
            await commit([current], "already current")


def describe_report(report: ComplianceReport) -> str:
    """Return in a few words what check mode would change, or why it cannot say."""
    if not report.changes:
        return f"check mode cannot say: {report.problem}"
    named = ", ".join(change.task for change in report.changes[:MAX_NAMED_TASKS])
    more = len(report.changes) - MAX_NAMED_TASKS
    return f"check mode would change: {named}" + (f" and {more} more" if more > 0 else "")
