"""Reload of the settings while the daemon runs; nodes in flight are not touched.

RELOADABLE_SETTINGS are applied at once.  All other settings need a restart, which runs survive.
Invalid settings are refused as a whole: the old ones stay in force.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from machines.model.events import SettingsChanged
from machines.model.plan import Plan
from rolloutd.concurrency import threads
from rolloutd.engine.state import State
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.settings import Settings, TeamSettings, load
from rolloutd.settings.compile import compile_limits, compile_plan

log = logging.getLogger(__name__)

RELOADABLE_SETTINGS = frozenset(
    {
        "admins",
        "host_class",
        "inventory_refresh_s",
        "keep",
        "max_parallel",
        "observe_only",
        "observe_within_s",
        "pools",
        "service_accounts",
        "show_vars",
        "teams",
    }
)
"""The settings that a running daemon can apply."""

SETTINGS_CONDITION, RESTART_CONDITION = "settings", "restart"
"""Subjects of the status conditions after a reload."""


class TeamPlanCompiler:
    def __init__(self, teams: Mapping[str, TeamSettings]) -> None:
        self.teams = teams

    def __call__(self, content: Mapping[str, Any]) -> Plan:
        return compile_plan(content, teams=self.teams)


async def read_again(settings: Settings, compiler: TeamPlanCompiler) -> Settings:
    """Return the settings with what their files now say of RELOADABLE_SETTINGS.

    A standby may have waited for weeks, while the leader's settings were reloaded.  Mistakes are logged, and
    the old ones stay.
    """
    if not settings.files:
        return settings
    try:
        loaded = await threads.FILES.run(load, settings.files[0])
    except InvalidFile as invalid:
        log.error("the settings have mistakes, those of the start are used: %s", invalid.diagnostics[0])
        return settings
    settings = settings.model_copy(update={key: getattr(loaded, key) for key in RELOADABLE_SETTINGS})
    compiler.teams = settings.teams
    return settings


class SettingsReloader:
    """Reads the settings' files again; calls `on_applied` when a setting was applied."""

    def __init__(self, state: State, compiler: TeamPlanCompiler, on_applied: Callable[[], None]) -> None:
        self._state = state
        self._compiler = compiler
        self._on_applied = on_applied

    async def reload(self) -> None:
        """Read, check and apply; failures are logged and shown in the daemon's status."""
        state = self._state
        files = state.settings.files
        try:
            loaded = await threads.FILES.run(load, files[0] if files else None)
        except InvalidFile as invalid:
            self._reject(invalid)
            return
        except Exception as error:
            # The old settings stay valid: an error in the new ones must not end the daemon.
            log.exception("the settings could not be read; the old ones stay")
            state.conditions[SETTINGS_CONDITION] = f"new settings could not be read: {error!r:.200}"
            return
        state.conditions.pop(SETTINGS_CONDITION, None)
        names = sorted(type(loaded).model_fields)
        changed = [name for name in names if getattr(state.settings, name) != getattr(loaded, name)]
        self._report_restart_required(tuple(key for key in changed if key not in RELOADABLE_SETTINGS))
        reloadable = tuple(key for key in changed if key in RELOADABLE_SETTINGS)
        if not reloadable:
            log.info("the settings were read again; nothing changes")
            return
        try:
            await self._apply(loaded, reloadable)
        except RolloutdError as failure:
            log.error("the new settings were not applied, the old ones stay: %s", failure)
            state.conditions[SETTINGS_CONDITION] = f"new settings were not applied: {failure}"
            return
        self._on_applied()

    async def _apply(self, loaded: Settings, keys: tuple[str, ...]) -> None:
        """Write the change to the audit, then apply it; no other commit can happen in between."""
        state = self._state
        settings = state.settings.model_copy(update={key: getattr(loaded, key) for key in keys})
        async with state.exclusive_commit() as commit:
            # Compile all plans before the commit: an error must refuse the settings as a whole.
            compiler = TeamPlanCompiler(settings.teams)
            plans = {}
            for rollout in state.index.rollouts:
                content, _ = await state.store.load_plan(rollout)
                plans[rollout] = compiler(content)
            event = SettingsChanged(hash_settings(settings), _setting_names(keys), state.now())
            await commit([event], "settings read again")
            self._compiler.teams = settings.teams
            state.settings = settings
            state.index.update_limits(compile_limits(settings), plans)

    def _reject(self, invalid: InvalidFile) -> None:
        for mistake in invalid.diagnostics:
            log.error("%s", mistake)
        first, more = invalid.diagnostics[0], len(invalid.diagnostics) - 1
        rest = f" and {more} more" if more else ""
        self._state.conditions[SETTINGS_CONDITION] = (
            f"the new settings have mistakes and the old ones stay: {first}{rest}"
        )
        log.error("the new settings have mistakes (%d): the old ones stay", len(invalid.diagnostics))

    def _report_restart_required(self, keys: tuple[str, ...]) -> None:
        if not keys:
            self._state.conditions.pop(RESTART_CONDITION, None)
            return
        names = ", ".join(_setting_names(keys))
        self._state.conditions[RESTART_CONDITION] = f"restart required to apply: {names}"
        log.warning("restart required to apply: %s", names)


def hash_settings(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _setting_names(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys as the settings file spells them."""
    return tuple(Settings.model_fields[key].alias or key for key in keys)
