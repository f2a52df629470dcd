"""Serializers of settings."""

from __future__ import annotations

from rolloutd.control.daemons import wire_daemons
from rolloutd.settings import Settings


def settings(current: Settings) -> wire_daemons.SettingsSummary:
    """Return limits, admins and teams; hosts, keys and paths stay private."""
    return {
        "observe_only": current.observe_only,
        "max_parallel": current.max_parallel,
        "admins": list(current.admins),
        "teams": [
            {
                "team": name,
                "members": list(team.members),
                "checks": len(team.verify),
                "windows": len(team.windows),
                "canaries": list(team.canaries),
            }
            for name, team in sorted(current.teams.items())
        ],
        "pools": [
            {"key": key, "max_unavailable": str(pool.max_unavailable)} for key, pool in current.pools.items()
        ],
    }
