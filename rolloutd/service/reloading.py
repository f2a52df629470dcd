"""Takes up changed settings while the daemon runs, without touching nodes in flight.

What can be taken up at once is: who may do what (teams, admins), what limits
every plan (pools, max_parallel, observe_within, observe_only) and how often the
inventory is read.  All else is wired when the daemon starts; a restart takes it
up, and runs outlive a restart.  Settings with a mistake are refused whole: the
old ones stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from machines.events import SettingsChanged
from machines.plan import Plan
from rolloutd.compile import compile_limits, compile_plan
from rolloutd.errors import InvalidFile, RolloutdError
from rolloutd.settings import Settings, TeamSettings, load
from rolloutd.state import State

log = logging.getLogger("rolloutd.service.reloading")

AT_ONCE = frozenset(
    {
        "admins",
        "inventory_refresh_s",
        "keep",
        "max_parallel",
        "observe_only",
        "observe_within_s",
        "pools",
        "service_accounts",
        "teams",
    }
)
"""The settings that a running daemon can take up."""

MISTAKES, RESTART = "settings", "restart"
"""The subjects of what is said in the status after a reload."""


class Compiler:
    """Makes plans of their contents, under the teams of the settings as they are now."""

    def __init__(self, teams: Mapping[str, TeamSettings]) -> None:
        self.teams = teams

    def __call__(self, content: Mapping[str, Any]) -> Plan:
        """Return the plan that a content means."""
        return compile_plan(content, teams=self.teams)


class Reloading:
    """Reads the settings' files again; `then` is called when something was taken up."""

    def __init__(self, state: State, compiler: Compiler, then: Callable[[], None]) -> None:
        self._state = state
        self._compiler = compiler
        self._then = then

    async def reload(self) -> None:
        """Read, judge, take up; what went wrong is in the log and among the daemon's troubles."""
        state = self._state
        files = state.settings.files
        try:
            found = await asyncio.to_thread(load, files[0] if files else None)
        except InvalidFile as invalid:
            self._refuse(invalid)
            return
        state.lasting.pop(MISTAKES, None)
        changed = _changed(state.settings, found)
        self._tell_restart(tuple(key for key in changed if key not in AT_ONCE))
        now = tuple(key for key in changed if key in AT_ONCE)
        if not now:
            log.info("the settings were read again; nothing changes")
            return
        try:
            await self._take_up(found, now)
        except RolloutdError as failure:
            log.error("the new settings were not taken up, the old ones stay: %s", failure)
            state.lasting[MISTAKES] = f"new settings were not taken up: {failure}"
            return
        self._then()

    async def _take_up(self, found: Settings, keys: tuple[str, ...]) -> None:
        """Audit the change, then let it be so, with nothing else written in between."""
        state = self._state
        settings = state.settings.model_copy(update={key: getattr(found, key) for key in keys})
        async with state.deciding() as commit:
            compiler = Compiler(settings.teams)
            plans = {}
            for rollout in state.index.rollouts:
                content, _ = await state.store.content(rollout)
                plans[rollout] = compiler(content)
            event = SettingsChanged(digest(settings), _written(keys), state.now())
            await commit([event], "settings read again")
            self._compiler.teams = settings.teams
            state.settings = settings
            state.index.relimit(compile_limits(settings), plans)

    def _refuse(self, invalid: InvalidFile) -> None:
        for mistake in invalid.mistakes:
            log.error("%s", mistake)
        first, more = invalid.mistakes[0], len(invalid.mistakes) - 1
        rest = f" and {more} more" if more else ""
        self._state.lasting[MISTAKES] = f"the new settings have mistakes and the old ones stay: {first}{rest}"
        log.error("the new settings have mistakes (%d): the old ones stay", len(invalid.mistakes))

    def _tell_restart(self, keys: tuple[str, ...]) -> None:
        if not keys:
            self._state.lasting.pop(RESTART, None)
            return
        names = ", ".join(_written(keys))
        self._state.lasting[RESTART] = f"{names} changed in the settings and take a restart to be taken up"
        log.warning("these settings are taken up by a restart only: %s", names)


def digest(settings: Settings) -> str:
    """Return the hash of all settings, for the audit."""
    return hashlib.sha256(json.dumps(settings.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _changed(old: Settings, new: Settings) -> tuple[str, ...]:
    names = sorted(type(old).model_fields)
    return tuple(name for name in names if getattr(old, name) != getattr(new, name))


def _written(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys as they stand in the file."""
    return tuple(Settings.model_fields[key].alias or key for key in keys)
