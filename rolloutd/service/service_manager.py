"""systemd integration: status, watchdog, reload.

The loop itself pings the watchdog after each iteration; a timer only makes it iterate often enough.  So
systemd restarts the daemon when the loop hangs, the timer stops or the store never answers, and in no other
case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from machines.model.rollout import Rollout
from machines.states import Phase
from rolloutd.engine.state import State
from rolloutd.service.systemd import SystemdNotifier
from rolloutd.texts.formats import pluralize
from rolloutd.texts.reason_text import describe

log = logging.getLogger(__name__)

MAX_LISTED = 2
"""Rollouts whose reason is in the status line; the others are counted, and `rolloutctl status` shows them."""


class SystemdReporter:
    """Reports one daemon to systemd; the loop calls `on_iteration`, a signal sets `reload_requested`."""

    def __init__(
        self,
        state: State,
        systemd: SystemdNotifier,
        reload: Callable[[], Awaitable[None]],
        reload_requested: asyncio.Event,
    ) -> None:
        self._state = state
        self._systemd = systemd
        self._reload = reload
        self._reload_requested = reload_requested
        self._is_ready = False

    def on_iteration(self) -> None:
        """Ping the watchdog and report the status."""
        self._systemd.ping_watchdog()
        sentence = format_status(self._state)
        if self._is_ready:
            self._systemd.set_status(sentence)
        else:
            self._is_ready = True
            self._systemd.notify_ready(sentence)

    async def reload_on_request(self) -> None:
        """Reload on each request, one at a time, until cancelled."""
        while True:
            await self._reload_requested.wait()
            # Before the reload, so that a request during it causes another one.
            self._reload_requested.clear()
            self._systemd.notify_reloading()
            try:
                await self._reload()
            finally:
                self._systemd.notify_ready(format_status(self._state))


def format_status(state: State) -> str:
    """Return the one-line daemon status: problems first, then progress, then what waits."""
    parts = [f"Trouble: {problem}." for problem in state.problems()]
    live = [rollout for rollout in state.index.rollouts.values() if not rollout.closed]
    observing = "Observing only. " if state.index.limits.observe_only else ""
    if not live:
        parts.append(f"{observing}No rollout is live; {pluralize(len(state.index.nodes), 'node')} known.")
    else:
        parts.append(f"{observing}{_format_progress(state, live)}.")
        parts += _format_waiting(state, live)
    return " ".join(parts)


def _format_progress(state: State, live: Iterable[Rollout]) -> str:
    counters = [(rollout, state.index.counters(rollout.id)) for rollout in live]
    in_flight = state.index.in_flight()
    pending = sum(each.phases[Phase.PENDING] for _, each in counters)
    failed = sum(each.phases[Phase.FAILED] for _, each in counters)
    done = sum(each.phases[Phase.DONE] for _, each in counters)
    what = counters[0][0].id if len(counters) == 1 else pluralize(len(counters), "rollout")
    parts = [f"{pluralize(in_flight, 'node')} in flight", f"{pending} pending", f"{done} done"]
    return f"{what}: {', '.join(parts + ([f'{failed} FAILED'] if failed else []))}"


def _format_waiting(state: State, live: Iterable[Rollout]) -> Iterable[str]:
    waiting = [
        (rollout.id, describe(state.reasons[rollout.id])) for rollout in live if rollout.id in state.reasons
    ]
    for name, text in waiting[:MAX_LISTED]:
        yield f"{name} waits: {text}."
    if len(waiting) > MAX_LISTED:
        yield f"{len(waiting) - MAX_LISTED} more wait."
