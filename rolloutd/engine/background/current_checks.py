"""Checks of pending nodes that may need nothing: such a node is done without isolation and without a slot.

With `skip_compliant` the plan's stages run in check mode first, then the plan's checks run.  Only a node that
passes all of it is already current.  A crash before the result is recorded repeats the check.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.facts.node_work import WorkKind
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.decision import CheckIfCurrent
from machines.model.events import ChangeNeeded
from machines.model.rollout import Target
from machines.scheduler.checks import is_at_work
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.redaction import redact_for_team
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Ok

MAX_NAMED_TASKS = 3
"""Tasks that the record of a needed change names; the rest is a number."""


async def check_if_current(
    state: State, adapters: AdapterSet, check_mode: CheckMode, request: CheckIfCurrent
) -> None:
    """Check whether a pending node needs the change, and record the answer."""
    rollout, node = request.rollout, request.node
    # Compared at the end: a rollout that worked on the node meanwhile makes the result worthless.
    before = tuple(state.index.targets_on(node))
    async with state.begin_work(WorkKind.CHECKS, node, rollout) as obstacle:
        if obstacle is not None:
            return  # the next decision asks again once that has ended
        problem = await _why_change_is_needed(NodeSession(state, adapters, rollout, node), check_mode)
    await _record(state, request, before, problem)


async def _why_change_is_needed(session: NodeSession, check_mode: CheckMode) -> str:
    """Return what the node needs or cannot say; empty if it needs nothing."""
    plan = session.state.index.plan_for(session.target)
    if plan.skip_compliant:
        try:
            source = await session.adapters.source(session.rollout)
        except RolloutdError as error:
            return str(error)
        report = await check_mode.check(session.node, source, plan, rollout=session.rollout)
        if report.compliance is not Compliance.COMPLIANT:
            return describe_report(report)
    for spec in plan.verify:
        result = await check_outside_attempt(session, spec)
        if not isinstance(result, Ok):
            return f"{spec.name}: {redact_for_team(result, spec.team).text}"
    return ""


async def _record(state: State, request: CheckIfCurrent, before: Sequence[Target], problem: str) -> None:
    async with state.exclusive_commit() as commit:
        index, now = state.index, state.now()
        rollout = index.rollouts.get(request.rollout)
        if rollout is None or rollout.closed:
            return  # the rollout was cancelled or deleted during the check
        target = index.target(request.rollout, request.node)
        if target.phase is not Phase.PENDING:
            return
        if tuple(index.targets_on(target.node)) != tuple(before) or is_at_work(index, target.node):
            return  # a rollout worked on the node meanwhile; the next decision asks again
        if problem:
            needed = ChangeNeeded(target.rollout, target.node, now, problem)
            await commit([needed], f"needs the change: {problem}")
            return
        why = "all checks pass without the change"
        if rollout.plan.skip_compliant:
            why = "check mode would change nothing, and all checks pass"
        current = transition(target, Trigger.FOUND_CURRENT, now, outcome=Outcome.ALREADY_CURRENT, text=why)
        await commit([current], "already current")


def describe_report(report: ComplianceReport) -> str:
    """Return in a few words what check mode would change, or why it cannot say."""
    if not report.changes:
        return f"check mode cannot say: {report.problem}"
    named = ", ".join(change.task for change in report.changes[:MAX_NAMED_TASKS])
    more = len(report.changes) - MAX_NAMED_TASKS
    return f"check mode would change: {named}" + (f" and {more} more" if more > 0 else "")
