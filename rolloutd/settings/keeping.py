"""What the settings say of how long things are kept on the daemon's disk."""

from __future__ import annotations

from rolloutd.planfile.scalars import Limit
from rolloutd.planfile.steps import Part, span


class Keep(Part):
    """How long files of ended rollouts are kept; the database, with audit and steps, is kept for ever."""

    runs_s: Limit | None = span(
        "90d",
        "What runs have said (`logs`), after their rollout has ended; `null` keeps it for ever.",
        alias="runs",
    )
    trees_s: Limit | None = span(
        "30d",
        "Playbook trees, after the last rollout that used them has ended, or since they were uploaded;"
        " `null` keeps them for ever.",
        alias="trees",
    )
