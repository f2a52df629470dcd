"""The systemd unit that owns a control socket, and whether it should answer.

A machine without systemd has no such unit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

UNITS = ("rolloutd.socket", "rolloutd.service")

QUERY_TIMEOUT_S = 10.0
"""Time limit for systemctl, which answers in milliseconds."""

STOPPED = "inactive"


def describe_expected_unit(socket: Path) -> str | None:
    """Return which enabled or started unit should answer at this socket; None without one."""
    units = _query_units()
    if not any(unit.get("Listen", "").startswith(f"{socket} ") for unit in units):
        return None
    for unit in units:
        is_enabled, state = unit.get("UnitFileState") == "enabled", unit.get("ActiveState", STOPPED)
        if is_enabled or state != STOPPED:
            return f"{unit['Id']} is {'enabled and ' if is_enabled else ''}{state}"
    return None


def _query_units() -> list[dict[str, str]]:
    """Return the properties of the installed units; empty where no systemd answers."""
    command = ["systemctl", "show", "--property=Id,UnitFileState,ActiveState,Listen", *UNITS]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    blocks = result.stdout.split("\n\n") if result.returncode == 0 else []
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]
