"""A user with a shell who writes votes and opened gates into the database of a stopped daemon.

Sometimes the user lifts freezes too, or puts the checkpoint of an older copy of the database in its place.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutd.commands import audit_settlement
from rolloutd.errors import RolloutdError
from rolloutd.store.sqlite import database
from tests.sim.people import OLGA

if TYPE_CHECKING:
    from tests.sim.daemon_process import DaemonProcess
    from tests.sim.world import SimWorld

FORGERY_PROBABILITY = 0.15
"""Probability of a forgery before a start of the daemon; each lets rollouts wait until it is settled."""

_GATES = """
SELECT id, digest, 'start', '' FROM rollout WHERE ended_at IS NULL AND cancelled_at IS NULL
UNION SELECT DISTINCT r.id, r.digest, 'continue', t.wave
FROM rollout AS r JOIN target AS t ON t.rollout = r.id
WHERE r.ended_at IS NULL AND r.cancelled_at IS NULL AND t.wave != 'fleet'
"""


def forge_votes(world: SimWorld, state_dir: Path, probability: float) -> None:
    """Sometimes insert a yes, and the opened gate, for each gate that is not open."""
    if world.streams.forgeries.random() >= probability:
        return
    path = state_dir / database.FILE_NAME
    if not path.exists():
        return
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0.0)) as connection:
        try:
            _insert(world, connection)
            if world.is_forged:
                _replace_checkpoint(world, connection)
        except sqlite3.Error:
            return  # another daemon still has it, or it has no tables yet


def _insert(world: SimWorld, connection: sqlite3.Connection) -> None:
    actor = json.dumps({"kind": "person", "name": "oscar", "uid": 1002})
    connection.execute("BEGIN IMMEDIATE")
    for rollout, digest, gate, wave in connection.execute(_GATES).fetchall():
        row = (f"forged-{rollout}-{gate}-{wave}", rollout, gate, wave, digest, actor, world.now())
        vote = (
            "INSERT OR IGNORE INTO vote"
            " (id, rollout, gate, wave, digest, actor, yes, reason, at, teams, shown, nodes, more)"
            " VALUES (?, ?, ?, ?, ?, ?, 1, 'forged', ?, '[\"infra\"]', '[]', '[]', 0)"
        )
        opened = "INSERT OR IGNORE INTO opened (rollout, gate, wave, at) VALUES (?, ?, ?, ?)"
        changed = connection.execute(vote, row).rowcount
        changed += connection.execute(opened, (rollout, gate, wave, world.now())).rowcount
        if changed:
            world.is_forged = True
            world.coverage.count("fault:forged-votes")
    connection.execute("COMMIT")


def _replace_checkpoint(world: SimWorld, connection: sqlite3.Connection) -> None:
    """Sometimes put back a checkpoint that was signed earlier, and delete a freeze."""
    draw = world.streams.checkpoints.random()
    record = connection.execute("SELECT content, signature FROM audit_checkpoint").fetchone()
    if draw < 0.3 and world.old_checkpoint is not None:
        world.coverage.count("fault:old-checkpoint")
        connection.execute("UPDATE audit_checkpoint SET content = ?, signature = ?", world.old_checkpoint)
    elif 0.3 <= draw < 0.6 and connection.execute("DELETE FROM freeze").rowcount:
        world.coverage.count("fault:freeze-deleted")
    world.old_checkpoint = record


async def settle_forgeries(world: SimWorld, process: DaemonProcess) -> None:
    """As an admin, restore what the audit makes of the forged rows."""
    state, daemon = process.state, process.daemon
    if not world.is_forged or state is None or daemon is None:
        return
    try:
        report = await daemon.verify_audit()
        async with state.exclusive_commit(OLGA.actor) as commit:
            events = await audit_settlement.settle(state, OLGA, report, ["all"], "audit", "forged")
            await commit(events, "settle")
        report = await daemon.verify_audit()
    except RolloutdError:
        return
    world.is_forged = not report.ok
