"""Serializers of runs and settings."""

from __future__ import annotations

from rolloutd.control.daemons import wire_daemons
from rolloutd.ports import (
    RunnerStatus,
)
from rolloutd.service.memory import memory_bytes
from rolloutd.settings import Settings


def runs(status: RunnerStatus) -> wire_daemons.Runs:
    """Return the runs on this machine."""
    return {
        "parallel": status.parallel,
        "active": status.active,
        "waiting": len(status.waiting),
        "forks": status.started["fork"],
        "new_processes": status.started["new process"],
        "fork_servers": len(status.servers),
        "fork_servers_bytes": memory_bytes(status.servers),
    }


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
