"""The evidence of a pilot: what its attempts did, how long each step took, what changed, and the logs.

It is attached once the pilot is done.  Its digest covers the rollout's digest, so the votes at the start gate
are for the plan and for this evidence.  The output of a team's own checks is not in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from machines.model.decision import DocumentPilot
from machines.model.events import PilotEvidenceAttached
from machines.model.rollout import PilotEvidence, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.rules.gates import needs_pilot_evidence
from rolloutd.audit.audit_chain import canonical_json
from rolloutd.configuration.shown_variables import hide_values
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, RolloutdError
from rolloutd.ports import Runs

log = logging.getLogger(__name__)

MAX_STEPS = 200
"""Steps shown: the latest; a pilot that needed more attempts is not evidence of a good plan."""

MAX_CHANGES = 200
"""Changed tasks shown of all runs; the logs have the rest, and their hashes are in the evidence."""

MAX_DIFF_CHARS = 32_768
"""Characters of all diffs together: as much as people read before they vote."""


async def document_pilot(state: State, runner: Runs, command: DocumentPilot) -> None:
    rollout = state.index.rollouts.get(command.rollout)
    if rollout is None or rollout.plan.pilot_node is None:
        return
    target = state.index.target(rollout.id, rollout.plan.pilot_node)
    content = await collect_evidence(state, runner, target)
    digest = hashlib.sha256(f"{rollout.digest.whole}\n{canonical_json(content)}".encode()).hexdigest()
    async with state.exclusive_commit() as commit:
        current = state.index.rollouts.get(rollout.id)
        if current is None or current.closed or not needs_pilot_evidence(state.index, current):
            return
        if state.index.target(rollout.id, target.node) != target:
            return  # the pilot moved meanwhile; the next decision asks again
        evidence = PilotEvidence(content, digest, target.since, state.now())
        await commit([PilotEvidenceAttached(rollout.id, target.node, evidence)], "the pilot is done")


async def collect_evidence(state: State, runner: Runs, target: Target) -> dict[str, Any]:
    records = await state.store.load_steps(target.rollout, target.node)
    ended = [record for record in records if record.state is not StepState.INTENDED]
    plan = state.index.rollout(target.rollout).plan
    variables = {name: value for stage in plan.stages for name, value in stage.variables.items()}
    allowed = (*state.settings.show_vars, *plan.shown_variables)
    changes, logs = [], []
    for record in ended:
        if record.handle and record.visible_to is None:
            run_changes, run_log = await _read_run(runner, record)
            for each in run_changes:
                each["diff"] = each["diff"] and hide_values(each["diff"], variables, allowed)
            changes += run_changes
            logs.append(run_log)
    return {
        "node": target.node,
        "team": target.team,
        "outcome": target.phase.value if target.outcome is None else target.outcome.value,
        "reason": target.last_text,
        "attempts": target.attempt,
        "steps": [_step(record) for record in ended[-MAX_STEPS:]],
        "changes": _limit_diffs(changes[-MAX_CHANGES:]),
        "logs": logs,
    }


def _step(record: StepRecord) -> dict[str, Any]:
    return {
        "attempt": record.attempt,
        "step": record.step,
        "action": record.action.value,
        "state": record.state.value,
        "seconds": round(max(0.0, record.at - record.began_at), 1),
        "text": record.text,
    }


async def _read_run(runner: Runs, record: StepRecord) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the changed tasks of a run, and the length and hash of its log."""
    changes: list[dict[str, Any]] = []
    lines, hashed = 0, hashlib.sha256()
    try:
        async for event in runner.read_events(record.handle):
            lines += 1
            hashed.update(json.dumps([event.at, event.kind, event.text], ensure_ascii=False).encode())
            if event.kind == "changed" and record.action is StepAction.RUN:
                changes.append(_change(record, event.text, event.fields))
    except NotFound:
        log.warning("%s: run %s has no log any more", record.node, record.handle)
    except RolloutdError as error:
        log.warning("%s: run %s: its log cannot be read: %s", record.node, record.handle, error)
    where = {"attempt": record.attempt, "step": record.step}
    return changes, {**where, "lines": lines, "sha256": hashed.hexdigest()}


def _change(record: StepRecord, text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": record.attempt,
        "step": record.step,
        "task": str(fields.get("task") or text),
        "diff": str(fields.get("diff") or "") or None,
    }


def _limit_diffs(changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the changes with diffs of at most MAX_DIFF_CHARS together."""
    left, found = MAX_DIFF_CHARS, []
    for change in changes:
        diff = change["diff"]
        if diff is not None and len(diff) > left:
            diff = f"{diff[:left]}\n(cut; the run's log has the rest)"
        left = max(0, left - len(diff or ""))
        found.append({**change, "diff": diff})
    return found
