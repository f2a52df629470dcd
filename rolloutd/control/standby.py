"""Wiring of a standby: it answers what the store knows until it leads.

It knows no adapter: a standby acts on nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from machines.facts.projection import Projection
from rolloutd import __version__
from rolloutd.control.routes import Services
from rolloutd.control.server import ControlServer
from rolloutd.engine.background.standby_follower import StandbyFollower
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Clock, Leadership
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.service.systemd import SystemdNotifier
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import open_store

log = logging.getLogger(__name__)

STANDBY_AFTER_S = 5.0
"""How long a start may wait for leadership before it says that it is a standby."""


@dataclass(slots=True)
class Standby:
    """A daemon that waits for leadership."""

    settings: Settings
    clock: Clock
    compiler: TeamPlanCompiler
    inherited: socket.socket | None
    leadership: Leadership
    has_waited: bool = False
    """Whether it was a standby, so that its settings may be old."""

    async def acquire_unless(self, stopping: asyncio.Event, service: SystemdNotifier) -> bool:
        """Return True when this daemon leads, False when it is stopped before; answer requests meanwhile."""
        acquiring = asyncio.create_task(self.leadership.acquire())
        stop = asyncio.create_task(stopping.wait())
        try:
            async with contextlib.AsyncExitStack() as stack:
                await asyncio.wait(
                    (acquiring, stop), timeout=STANDBY_AFTER_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not acquiring.done() and not stop.done():
                    self.has_waited = True
                    # One that cannot answer may still lead: the database may be away.
                    status = "Standby: another daemon leads."
                    try:
                        await stack.enter_async_context(self._serving())
                    except RolloutdError as error:
                        status = f"Waiting: {' '.join(str(error).split())}"
                        log.warning("standby: it answers nothing: %s", error)
                    # A service manager gives up what does not get ready, and ends what does not ping.
                    service.notify_ready(status)
                while not acquiring.done() and not stop.done():
                    service.ping_watchdog()
                    await asyncio.wait(
                        (acquiring, stop),
                        timeout=service.watchdog_ping_interval_s,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
            if acquiring.done():
                acquiring.result()
            return acquiring.done()
        finally:
            acquiring.cancel()
            stop.cancel()
            await asyncio.wait((acquiring, stop))

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        settings = self.settings
        store = await open_store(
            settings.state_dir, settings.store.postgresql, compile_plan=self.compiler, read_only=True
        )
        try:
            snapshot = await store.load_snapshot()
            index = Projection.build(snapshot, compile_limits(settings), self.compiler)
            state = State(index, store, self.clock, settings, ChangeNotifier(), epoch=snapshot.epoch)
            follower = StandbyFollower(state, self.leadership.record_followed)
            await follower.follow()
            server = ControlServer(
                self._services(state),
                path=settings.socket,
                group=settings.socket_group,
                # The leader's server takes the inherited one itself.
                inherited_socket=None if self.inherited is None else self.inherited.dup(),
            )
            await server.start()
            following = asyncio.create_task(follower.run(), name="standby")
            try:
                yield
            finally:
                following.cancel()
                await asyncio.wait((following,))
                await server.stop()
        finally:
            await store.close()

    def _services(self, state: State) -> Services:
        # What needs more than the store is not asked of a standby (Route.on_standby).
        absent: Any = None
        return Services(
            state,
            runners=absent,
            check_mode=absent,
            drift=absent,
            sources=absent,
            started_at=state.now(),
            version=__version__,
            refresh_inventory=absent,
            observe_nodes=absent,
            prune_runs=absent,
            verify_audit=absent,
            compare_anchors=absent,
            accept_inventory=absent,
            pin_identity=absent,
            checkpoints=absent,
            cleaner=absent,
            forecaster=absent,
            shell_command=absent,
            leadership=self.leadership,
            step_down=absent,
            is_standby=True,
        )
