"""Check `self_updates`: fails if a service of the node installs updates outside the plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.ports import Failed, Ok, ShellResult, StepContext, Unknown

MAX_TIMEOUT_S = 300.0
"""Limit of one try, whatever the plan says; the commands read a few files."""

NO_ANSWER = 75
"""Exit status of the command if systemd does not answer (EX_TEMPFAIL)."""

UNITS = {
    "unattended-upgrades": ("apt-daily-upgrade.timer",),
    "dnf-automatic": (
        "dnf-automatic-install.timer",
        "dnf-automatic.timer",
        "dnf5-automatic.timer",
    ),
    "zincati": ("zincati.service",),
}

_ALL_UNITS = " ".join(unit for units in UNITS.values() for unit in units)

COMMAND = (
    f"if command -v systemctl >/dev/null; then systemctl show -p Id -p ActiveState {_ALL_UNITS}"
    f" || exit {NO_ANSWER}; fi; "
    "if command -v apt-config >/dev/null; then apt-config dump APT::Periodic::Unattended-Upgrade; fi; "
    "grep -hsi '^[[:space:]]*apply_updates' /etc/dnf/automatic.conf; exit 0"
)

_APT_OFF = re.compile(r'^APT::Periodic::Unattended-Upgrade "0?";$', re.MULTILINE)
_APT_ON = re.compile(r'^APT::Periodic::Unattended-Upgrade "', re.MULTILINE)
_DNF_APPLIES = re.compile(r"^\s*apply_updates\s*=\s*(?:yes|true|1|on)\s*$", re.MULTILINE | re.IGNORECASE)
_APPLIES_ALWAYS = "dnf-automatic-install.timer"


class SelfUpdatesCheck(ShellAdapter):
    """ports.Check with the parameter `allow`."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        node = ctx.host.name
        timeout_s = ctx.remaining_s(self._clock.now(), most=MAX_TIMEOUT_S)
        result = await self._run(ctx, COMMAND, timeout_s=timeout_s)
        if not isinstance(result, ShellResult):
            return result
        if result.exit_status != 0:
            problem = f"its services cannot be listed (exit status {result.exit_status})"
            return Unknown(f"{node}: {problem}; run `systemctl status` there")
        active = find_active_updaters(result.stdout, ctx.params.get("allow", ()))
        if not active:
            return Ok(f"{node}: no service updates it outside the plan", output=result.stdout)
        units = ", ".join(unit for found in active.values() for unit in found)
        return Failed(
            f"{node}: unmanaged change: {', '.join(active)} updates it outside the plan;"
            f" disable {units}, or add it to `allow`",
            output=result.stdout,
        )


def find_active_updaters(output: str, allowed: Collection[str] = ()) -> Mapping[str, list[str]]:
    """Return the active units of each updater that installs updates, by the command's output."""
    active = _active_units(output)
    found: dict[str, list[str]] = {}
    for updater, units in UNITS.items():
        for unit in units:
            if unit in active and updater not in allowed and _is_switched_on(updater, unit, output):
                found.setdefault(updater, []).append(unit)
    return found


def _active_units(output: str) -> set[str]:
    """Return the active units of `systemctl show`, which lists each unit's properties in any order."""
    active = set()
    for block in output.split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if properties.get("ActiveState") == "active":
            active.add(properties.get("Id", ""))
    return active


def _is_switched_on(updater: str, unit: str, output: str) -> bool:
    """Return whether the updater's own configuration lets the unit install updates."""
    match updater:
        case "unattended-upgrades":
            return bool(_APT_ON.search(output)) and not _APT_OFF.search(output)
        case "dnf-automatic":
            return unit == _APPLIES_ALWAYS or bool(_DNF_APPLIES.search(output))
        case _:
            return True
