"""What a service owes its keeper, beside the loop: status, watchdog, reload, a look at the audit's chain.

The watchdog is fed by the deciding loop itself, after a turn: an alarm only
makes the loop turn often enough.  So a loop that hangs, an alarm that no longer
rings and a store that never answers all end in a restart, and nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from rolloutd import chain
from rolloutd.service import standing
from rolloutd.service.systemd import Service
from rolloutd.state import State

log = logging.getLogger("rolloutd.service.caretaking")

AUDIT = "audit"
"""The subject of what is said of the audit's chain."""


class Caretaker:
    """Looks after one daemon: `turned` is called by the loop, `wish_reload` by a signal."""

    def __init__(self, state: State, service: Service, reload: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        self._service = service
        self._reload = reload
        self._wished = asyncio.Event()
        self._is_ready = False

    def turned(self) -> None:
        """The loop has turned: feed the watchdog, and tell where things stand."""
        self._service.alive()
        self.tell()

    def tell(self) -> None:
        """Tell the service manager where things stand; the first time, that the daemon is ready."""
        sentence = standing.sentence(self._state)
        if self._is_ready:
            self._service.status(sentence)
        else:
            self._is_ready = True
            self._service.ready(sentence)

    def wish_reload(self) -> None:
        """Read the settings again, soon."""
        self._wished.set()

    async def reload_when_wished(self) -> None:
        """Reload as often as it is wished, one at a time, until cancelled."""
        while True:
            await self._wished.wait()
            self._wished.clear()
            self._service.reloading()
            try:
                await self._reload()
            finally:
                self._service.ready(standing.sentence(self._state))

    async def verify_audit(self, database: Path) -> None:
        """Check the audit's chain once, in a thread; a broken one stops nothing and is said loudly."""
        verdict = await asyncio.to_thread(chain.verify, database)
        if verdict.ok:
            log.info("the audit's chain is whole: %d entries, head %s", verdict.entries, verdict.head)
            return
        self._state.lasting[AUDIT] = (
            f"the audit's chain is BROKEN ({verdict.message}): the database was changed by hand or by"
            " its disk; keep a copy and see `rolloutctl audit verify`"
        )
        log.critical("%s", self._state.lasting[AUDIT], extra={"first_bad": verdict.first_bad})
        self.tell()
