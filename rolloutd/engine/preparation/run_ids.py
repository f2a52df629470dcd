"""Names of the runs of prepare stages."""

from __future__ import annotations

from machines.model.preparation import Preparation

LOCALHOST = "localhost"
"""The daemon's machine, as the node of a build."""


def run_id(row: Preparation) -> str:
    """Return the id of a stage's run; the same after a restart."""
    return f"{row.rollout}.{row.node or LOCALHOST}.prepare.{row.stage}.{row.attempt}"
