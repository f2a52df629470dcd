"""One simulated daemon process: rolloutd's own loop, drivers, state and store.

It is wired like rolloutd.app, with simulated adapters.  It ends like a process:
by a power cut, or by its own error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from machines.facts.node_work import NodeWork
from machines.facts.projection import Projection
from machines.model.events import DaemonStarted, Event
from machines.model.limits import Budget
from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.state import LARGE_COMMIT_ROWS, State
from rolloutd.errors import RolloutdError
from rolloutd.ports import PinnedSource, SourceRules
from rolloutd.service.reload import SettingsReloader, TeamPlanCompiler
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import StateLock, Store, open_store
from tests.contracts.fakes.sources import SOURCE
from tests.sim import workspace
from tests.sim.fault_injection import FaultyAccess
from tests.sim.faulty_store import FaultyStore
from tests.sim.loop import SimProcess
from tests.sim.sim_adapters import (
    PLAYBOOK_TREE,
    SimCheck,
    SimCordon,
    SimInventory,
    SimIsolator,
    SimObserver,
    SimProbe,
)
from tests.sim.sim_clock import SimClock, SimTimers
from tests.sim.sim_guard import SimNodeGuard
from tests.sim.sim_preparation import SimCheckpoints, SimNodeFiles, SimSnapshots, SimStager
from tests.sim.sim_runner import SimRunner
from tests.sim.world import HOLD_AWARE_KIND, SimWorld

LOCK_FILE = "lock"
"""The file that keeps a second daemon out, until a user removes it."""


LISTENER_FAILS = 0.005
"""Share of the commits of which a listener raises an error."""

WATCH_DELAY_S = 10.0
"""Mean delay until a watch reports that a node was left isolated."""


class JudgedFacts(Projection):
    """Facts whose work is judged when it begins."""

    on_work: Callable[[], None] = staticmethod(lambda: None)

    def record_work(self, work: NodeWork) -> None:
        """Record work, and judge it."""
        super().record_work(work)
        self.on_work()


class DaemonProcess:
    """A daemon from its start to its end."""

    def __init__(
        self,
        world: SimWorld,
        number: int,
        state_dir: Path,
        settings: Settings,
        *,
        judges_whole_fleet: bool = True,
    ) -> None:
        self.process = SimProcess(f"daemon {number}")
        self.state: State | None = None
        self.daemon: Daemon | None = None
        self.store: FaultyStore | None = None
        self.cleaner: NodeCleaner | None = None
        self.exit_error: BaseException | None = None
        self.epoch = 0
        self._world = world
        self._state_dir = state_dir
        self._settings = settings
        self._judges_whole_fleet = judges_whole_fleet
        self._compiler = TeamPlanCompiler(settings.teams)
        self._close_callbacks: list[Callable[[], None]] = []
        self._rollouts_with_source: set[str] = set()
        self.task = world.loop.start_in(self.process, self._run())

    @property
    def alive(self) -> bool:
        """Whether it was neither cut off nor has ended."""
        return self.process.alive and not self.task.done()

    def run(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a request in the daemon, like a handler of its socket."""
        return self._world.loop.start_in(self.process, coro)

    def stop(self) -> None:
        """Stop it, like SIGTERM."""
        self.task.cancel()

    def close_files(self) -> None:
        """Close its files and locks, like the kernel at a process's end."""
        for close in self._close_callbacks:
            close()
        self._close_callbacks.clear()

    def compile(self, content: Any) -> Any:
        """Compile a plan."""
        return self._compiler(content)

    async def reload(self, settings: Settings) -> None:
        """Apply other pools and another max_parallel, like a reload."""
        state, world = self.state, self._world
        if state is None or world.is_finished:
            return

        def on_limits(*args: Any) -> None:
            world.checker.on_settings(settings)
            # The commit before may have replaced the facts by a fork, with this method.
            vars(state.index).pop("update_limits")
            state.index.update_limits(*args)

        state.index.update_limits = on_limits  # type: ignore[method-assign]
        try:
            await SettingsReloader(state, self._compiler, state.wake_up)._apply(
                settings, ("max_parallel", "pools")
            )
        except RolloutdError:
            return
        finally:
            vars(state.index).pop("update_limits", None)
        world.coverage.count("fault:settings-changed")
        state.wake_up()

    async def _run(self) -> None:
        world = self._world
        lock = StateLock(self._state_dir, now=world.now)
        await lock.acquire()
        self._close_callbacks.append(lock.close)
        try:
            store = await open_store(
                self._state_dir, workspace.postgresql, compile_plan=self.compile, inline=True, now=world.now
            )
            writer = store._writer
            assert writer is not None
            executors: tuple[Any, Any] = (store._reader, writer._executor)
            self._close_callbacks[:0] = [each.connection.close for each in executors]
            try:
                await self._serve(store, writer)
            finally:
                await store.close()  # at a regular stop; a power cut never gets here
        finally:
            await lock.release()

    async def _serve(self, store: Store, writer: Any) -> None:
        world = self._world
        self.store = faulty_store = FaultyStore(store, world, self.process)
        faulty_store.intercept_writes(writer._batch_writer)
        if world.commit_s:
            faulty_store.slow_writes(writer._executor)
        snapshot = await store.load_snapshot()
        access = FaultyAccess(world, self.process)
        self.epoch = access.epoch = world.epoch = snapshot.epoch
        world.taken_over_at = world.loop.time()
        world.checker.guards = world.guards
        clock = SimClock(world)
        world.checker.on_settings(self._settings)
        index = JudgedFacts.build(snapshot, compile_limits(self._settings), self.compile)
        index.on_work = world.checker.work.look
        head = await store.latest_audit_entry()
        state = State(
            index,
            faulty_store,
            clock,
            self._settings,
            ChangeNotifier(head.seq if head else 0),
            epoch=snapshot.epoch,
            redaction_key=b"sim",
            # As commits of hundreds of rows are made; one of a few rows is as good to interrupt.
            large_commit_rows=world.streams.commits.choice((LARGE_COMMIT_ROWS, 2, 1))
            if self._judges_whole_fleet
            else LARGE_COMMIT_ROWS,
        )
        await state.load_connections()
        world.checker.on_daemon_start(world.loop.lived_until(self.process))
        await state.record_start(DaemonStarted(snapshot.epoch, "sim", "", clock.now()), head)
        faulty_store.state = state if self._judges_whole_fleet else None
        stager = SimStager(access)
        adapters = AdapterSet(
            SimRunner(access),
            {kind: SimIsolator(access, kind) for kind in ("command", "playbook")}
            | {HOLD_AWARE_KIND: SimCordon(access)},
            {"ssh": SimCheck(access, runs_command=True)}
            | {kind: SimCheck(access, runs_command=False) for kind in ("reachable", "cluster")},
            self._find_source,
            {"kubernetes": SimProbe(access)},
            guards={"ssh": SimNodeGuard(access)},
            preparation=PreparationAdapters(
                {"ssh": stager},
                SimSnapshots(access),
                SimCheckpoints(access),
                stager,
                lambda source: PLAYBOOK_TREE,
                DirectoryStore(PLAYBOOK_TREE / "artifacts"),
            ),
        )
        inventory = SimInventory(access, state.settings)
        self.daemon = Daemon(
            state,
            adapters,
            inventories=[inventory],
            observers=[SimObserver(access)],
            timers=SimTimers(world),
            # A fleet of ten would be held at the second leaver.
            source_rules={inventory.source: SourceRules(max_removed=Budget(count=None, percent=50))},
        )
        self.cleaner = NodeCleaner(state, SimNodeFiles(access), SimCheckpoints(access), [stager])
        state.commit_listeners.append(self._hear_commit)
        self.state = state
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._clean(self.daemon, self.cleaner))]
            # Without faults a large fleet has no such node, and each look is over the fleet.
            if self._judges_whole_fleet:
                beside.append(tasks.create_task(self._report_left_nodes(state)))
            await self.daemon.run()
            for task in beside:
                task.cancel()

    def _hear_commit(self, events: Sequence[Event], commit_s: float) -> None:
        """Raise an error, as a service that listens to commits may: what is written must not be lost."""
        world = self._world
        if not world.is_finished and world.streams.listeners.random() < LISTENER_FAILS:
            world.coverage.count("fault:listener-fails")
            raise OSError("the listener's pipe is closed")

    async def _clean(self, daemon: Daemon, cleaner: NodeCleaner) -> None:
        await daemon.first_iteration_done.wait()
        await cleaner.run()

    async def _report_left_nodes(self, state: State) -> None:
        """Report nodes that were left isolated, and their release, like a watch on the cluster."""
        while True:
            await self._world.latency(WATCH_DELAY_S)
            reported = {observation.node for observation in state.index.left_cordoned()}
            for machine in self._world.machines.values():
                if (machine.name in reported) != bool(
                    machine.left_isolated_by
                ) and machine.name in state.index.nodes:
                    now = state.now()
                    seen = Observation(
                        machine.name,
                        NodeHealth.UP,
                        now,
                        "watched",
                        machine.cordoned_by_other,
                        machine.left_isolated_by,
                        is_locked=machine.paused,
                    )
                    self._world.checker.feed_oracle(
                        "saw", node=machine.name, up=True, foreign=machine.cordoned_by_other
                    )
                    state.index.record_observations([seen], now)
                    state.wake_up()

    def open_read_only(self) -> Coroutine[Any, Any, None]:
        """Read the file while the daemon runs, like `rolloutctl audit`."""
        return self._open_read_only()

    async def _open_read_only(self) -> None:
        store = await open_store(
            self._state_dir, workspace.postgresql, compile_plan=self.compile, read_only=True, inline=True
        )
        try:
            await store.load_snapshot()
            await store.latest_audit_entry()
        finally:
            await store.close()

    async def _find_source(self, rollout: str) -> PinnedSource:
        # Once for each rollout, like rolloutd.app.
        if rollout not in self._rollouts_with_source:
            assert self.store is not None
            await self.store.load_plan(rollout)
            self._rollouts_with_source.add(rollout)
        return SOURCE


def remove_lock(state_dir: Path) -> None:
    """Remove the lock file, like a user who takes it for a leftover."""
    (state_dir / LOCK_FILE).unlink(missing_ok=True)
