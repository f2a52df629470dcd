"""The command that settles rows which the audit does not account for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from machines.model.events import MismatchSettled
from machines.states import IN_FLIGHT_PHASES
from rolloutd.commands.execution import Events, Principal
from rolloutd.engine.state import State
from rolloutd.errors import Conflict, NotFound, Refused
from rolloutd.ports import AuditReport, RowMismatch

ALL = "all"

MAX_ENTRIES_SINCE = 10_000
"""Entries between a verification and its settlement: those of minutes, read while all commits wait."""

_OF_ONE_NODE = frozenset({"PhaseMoved", "StepRecorded", "PreparationRecorded"})
"""Events that change no row of their rollout but those of their node; they are most of the entries."""


async def settle(
    state: State, who: Principal, report: AuditReport, subjects: Sequence[str], keep: str, reason: str
) -> Events:
    """Return the events that settle these rows of a report; `keep` is `audit` or `database`.

    The caller holds the lock of commits, and verified before that: a replay takes minutes.  A row that an
    entry may have changed since is refused.
    """
    found = report.mismatches
    known = {row.mismatch.subject for row in found}
    for subject in subjects:
        if subject != ALL and subject not in known:
            raise NotFound(f"{subject}: the audit accounts for it; list mismatches with audit verify")
    chosen = [row for row in found if ALL in subjects or row.mismatch.subject in subjects]
    await _require_unchanged(state, report, chosen)
    if keep == "audit":
        for row in chosen:
            _require_restorable(state, row)
        # Rows are removed before those that they refer to, and restored after them.
        chosen = [*reversed([row for row in chosen if row.expected is None]), *chosen]
        chosen = list({row.mismatch.subject: row for row in chosen}.values())
    return tuple(
        MismatchSettled(
            subject=row.mismatch.subject,
            table=row.table,
            key=row.key,
            row=row.expected if keep == "audit" else row.found,
            kept=keep,
            actor=who.actor,
            reason=reason,
            at=state.now(),
        )
        for row in chosen
    )


async def _require_unchanged(state: State, report: AuditReport, rows: Sequence[RowMismatch]) -> None:
    """Raise Conflict for a row that an entry after the report may have changed."""
    since = await state.store.read_audit(after=report.seq, limit=MAX_ENTRIES_SINCE)
    if len(since) == MAX_ENTRIES_SINCE:
        raise Conflict("audit: too much was written since its verification; settle again")
    for entry in (json.loads(each.text) for each in since):
        for row in rows:
            if _may_change(entry, row):
                raise Conflict(f"{row.mismatch.subject}: it changed since the verification; settle again")


def _may_change(entry: dict[str, Any], row: RowMismatch) -> bool:
    values = row.found or row.expected or row.key
    rollout, node = values.get("rollout", row.key.get("id")), values.get("node", row.key.get("name"))
    if node is not None:
        # An entry of many nodes names none.
        return entry["node"] == node or (entry["node"] is None and entry["rollout"] in (None, rollout))
    return entry["rollout"] in (None, rollout) and entry["event"] not in _OF_ONE_NODE


def _require_restorable(state: State, row: RowMismatch) -> None:
    subject = row.mismatch.subject
    if not row.is_restorable:
        raise Refused("not-restorable", f"{subject}: the audit has only its hash; restore a backup")
    if row.table == "target" and row.expected is None:
        rollout, node = str(row.key["rollout"]), str(row.key["node"])
        targets = {each.node: each for each in state.index.targets(rollout)}
        if node in targets and targets[node].phase in IN_FLIGHT_PHASES:
            raise Refused("in-flight", f"{subject}: the node is in flight; stop the daemon, restore a backup")
