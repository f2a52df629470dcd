"""The command that settles rows which the audit does not account for."""

from __future__ import annotations

from collections.abc import Sequence

from machines.model.events import MismatchSettled
from machines.states import IN_FLIGHT_PHASES
from rolloutd.commands.rollout_commands import Events, Principal
from rolloutd.engine.state import State
from rolloutd.errors import NotFound, Refused
from rolloutd.ports import RowMismatch

ALL = "all"


async def settle(state: State, who: Principal, subjects: Sequence[str], keep: str, reason: str) -> Events:
    """Return the events that settle these rows; `keep` is `audit` or `database`.

    The caller holds the lock of commits, so the rows are those of this moment.
    """
    found = (await state.store.verify_audit()).mismatches
    known = {row.mismatch.subject for row in found}
    for subject in subjects:
        if subject != ALL and subject not in known:
            raise NotFound(f"{subject}: the audit accounts for it; list mismatches with audit verify")
    chosen = [row for row in found if ALL in subjects or row.mismatch.subject in subjects]
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


def _require_restorable(state: State, row: RowMismatch) -> None:
    subject = row.mismatch.subject
    if not row.is_restorable:
        raise Refused("not-restorable", f"{subject}: the audit has only its hash; restore a backup")
    if row.table == "target" and row.expected is None:
        rollout, node = str(row.key["rollout"]), str(row.key["node"])
        targets = {each.node: each for each in state.index.targets(rollout)}
        if node in targets and targets[node].phase in IN_FLIGHT_PHASES:
            raise Refused("in-flight", f"{subject}: the node is in flight; stop the daemon, restore a backup")
