"""One life of the daemon: rolloutd's own loop, drivers, state and store over the world.

It is wired as rolloutd.app wires it, with twins in place of the adapters, and
ends as a process ends: cut off, or by an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from machines.events import DaemonStarted
from machines.node import Observation, Sight
from machines.projection import Projection
from rolloutd.compile import compile_limits
from rolloutd.daemon import Daemon
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.service.reloading import Compiler, Reloading
from rolloutd.settings import Settings
from rolloutd.state import State
from rolloutd.state.feed import Feed
from rolloutd.store import SqliteStore, open_store
from tests.sim.clocks import SimAlarm, SimClock
from tests.sim.keeper import Keeper
from tests.sim.loop import Process
from tests.sim.reach import Reach
from tests.sim.runner import SimRunner
from tests.sim.twins import (
    TREE,
    SimCheck,
    SimCordon,
    SimInventory,
    SimIsolator,
    SimObserver,
    SimProbe,
)
from tests.sim.world import KEPT_KIND, World

LOCK = "lock"
"""The file that keeps a second daemon out, until somebody removes it."""


WATCHED_S = 10.0
"""How soon it is told that a node is kept, on average."""


class Life:
    """A daemon from its start to its end."""

    def __init__(self, world: World, number: int, state_dir: Path, settings: Settings) -> None:
        self.process = Process(f"daemon {number}")
        self.state: State | None = None
        self.daemon: Daemon | None = None
        self.keeper: Keeper | None = None
        self.ended: BaseException | None = None
        self.epoch = 0
        self._world = world
        self._state_dir = state_dir
        self._settings = settings
        self._compiler = Compiler(settings.teams)
        self._close: list[Callable[[], None]] = []
        self.task = world.loop.begin(self.process, self._live())

    @property
    def alive(self) -> bool:
        """Whether it was neither cut off nor has ended."""
        return self.process.alive and not self.task.done()

    def ask(self, asked: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Let the daemon answer somebody, as a handler of its socket does."""
        return self._world.loop.begin(self.process, asked)

    def stop(self) -> None:
        """Ask it to end, as SIGTERM does."""
        self.task.cancel()

    def release(self) -> None:
        """Let go of what the kernel lets go of when a process ends: its files and locks."""
        for close in self._close:
            close()
        self._close.clear()

    def compile(self, content: Any) -> Any:
        """Make a plan of its content."""
        return self._compiler(content)

    async def reload(self, settings: Settings) -> None:
        """Take up other pools and another max_parallel, as a reload does once the files are read."""
        state, world = self.state, self._world
        if state is None or world.over:
            return
        relimit = state.index.relimit

        def told(*args: Any) -> None:
            world.court.settings(settings)
            relimit(*args)

        state.index.relimit = told  # type: ignore[method-assign]
        try:
            await Reloading(state, self._compiler, state.poke)._take_up(settings, ("max_parallel", "pools"))
        except RolloutdError:
            return
        finally:
            state.index.relimit = relimit  # type: ignore[method-assign]
        world.marks.hit("fault:settings-changed")
        state.poke()

    async def _live(self) -> None:
        world = self._world
        store = await open_store(self._state_dir, compile=self.compile, inline=True, now=world.now)
        writer = store._writer
        assert writer is not None
        executors: tuple[Any, Any] = (store._reader, writer._executor)
        self._close += [*(each.connection.close for each in executors), writer._lock.release]
        try:
            await self._serve(store, writer)
        finally:
            await store.close()  # at a wished-for stop; a power cut does not come by here

    async def _serve(self, store: SqliteStore, writer: Any) -> None:
        world = self._world
        self.keeper = keeper = Keeper(store, world, self.process)
        keeper.overhear(writer._ledger)
        snapshot = await store.load()
        reach = Reach(world, self.process)
        self.epoch = reach.epoch = world.epoch = snapshot.epoch
        world.taken_over_at = world.loop.time()
        clock = SimClock(world)
        world.court.settings(self._settings)
        index = Projection.build(snapshot, compile_limits(self._settings), self.compile)
        head = await store.head()
        state = State(index, keeper, clock, self._settings, Feed(head.seq if head else 0))
        state.connect(await store.connections())
        await state.commit([DaemonStarted(snapshot.epoch, "sim", "", clock.now())], cause="daemon started")
        keeper.state = state
        world.court.alive_since = clock.now()
        gear = Gear(
            SimRunner(reach),
            {kind: SimIsolator(reach, kind) for kind in ("command", "playbook")}
            | {KEPT_KIND: SimCordon(reach)},
            {"reachable": SimCheck(reach, deep=False), "ssh": SimCheck(reach, deep=True)},
            self._tree,
            {"kubernetes": SimProbe(reach)},
        )
        self.daemon = Daemon(
            state,
            gear,
            inventories=[SimInventory(reach)],
            observers=[SimObserver(reach)],
            alarm=SimAlarm(world),
        )
        self.state = state
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(state))
            await self.daemon.run()
            watching.cancel()

    async def _watch(self, state: State) -> None:
        """Tell which nodes are kept and which no longer are, as a watch on the cluster does."""
        while True:
            await self._world.latency(WATCHED_S)
            known = {seen.node for seen in state.index.kept()}
            for machine in self._world.machines.values():
                if (machine.name in known) != bool(machine.kept) and machine.name in state.index.nodes:
                    now = state.now()
                    seen = Observation(machine.name, Sight.UP, now, "watched", machine.foreign, machine.kept)
                    self._world.court.tell("saw", node=machine.name, up=True, foreign=machine.foreign)
                    state.index.observed([seen], now)
                    state.poke()

    def look_in(self) -> Coroutine[Any, Any, None]:
        """Read the file beside the daemon, as `rolloutctl audit` does on the machine."""
        return self._look_in()

    async def _look_in(self) -> None:
        store = await open_store(self._state_dir, compile=self.compile, read_only=True, inline=True)
        try:
            await store.load()
            await store.head()
        finally:
            await store.close()

    async def _tree(self, rollout: str) -> Path:
        assert self.keeper is not None
        await self.keeper.content(rollout)
        return TREE


def remove_lock(state_dir: Path) -> None:
    """Remove the lock's file, as somebody does who takes it for a leftover."""
    (state_dir / LOCK).unlink(missing_ok=True)
