"""The rollout that a review compares with."""

from __future__ import annotations

import json
from typing import Final

from rolloutd import ports
from rolloutd.store.backend import Connection

# Nodes count as changed before any vote, if the rollout supersedes one with the same change.
_SELECT_APPROVED: Final = """
SELECT id, number, content, source FROM rollout
WHERE name = ? AND number < ? AND deleted_at IS NULL
    AND EXISTS (SELECT 1 FROM opened WHERE opened.rollout = rollout.id AND gate = 'start')
    AND EXISTS (SELECT 1 FROM target
        WHERE target.rollout = rollout.id AND outcome IN ('changed', 'already-current'))
ORDER BY number DESC LIMIT 1"""


def find_previous_approved(connection: Connection, rollout: str, owner: str) -> ports.ApprovedRollout | None:
    """Return the latest earlier rollout of the same plan and owner that was approved and changed nodes.

    Its plan is not compiled, because this version may be unable to.
    """
    sql = "SELECT name, number FROM rollout WHERE id = ?"
    name, number = connection.execute(sql, (rollout,)).fetchone()
    while found := connection.execute(_SELECT_APPROVED, (name, number)).fetchone():
        id_, number, content, source = found
        plan = json.loads(content)
        if plan["metadata"]["owner"] == owner:
            return ports.ApprovedRollout(id_, plan, json.loads(source))
    return None
