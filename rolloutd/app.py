"""The only place where the parts are put together: settings, store, adapters, loop and socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from machines.events import DaemonStarted
from machines.projection import Projection
from rolloutd import __version__
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.shelf import RunShelf
from rolloutd.adapters.kit import (
    CHECKS,
    INVENTORIES,
    ISOLATORS,
    OBSERVERS,
    PROBES,
    WATCHES,
    Adapters,
    InventorySnapshot,
    Kit,
    kinds,
    make,
)
from rolloutd.adapters.sources.trees import TreeSources
from rolloutd.adapters.ssh.pool import SshShell
from rolloutd.adapters.timers import ApschedulerAlarm
from rolloutd.compile import compile_limits
from rolloutd.control.routes import Desk
from rolloutd.control.server import ControlServer
from rolloutd.daemon import Daemon
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.notifying import Notifying
from rolloutd.ports import Inventory, Notifier, Observer, Pinned, Store, Watch
from rolloutd.service.binding import rehearse
from rolloutd.service.caretaking import Caretaker
from rolloutd.service.footing import lacks
from rolloutd.service.reloading import Compiler, Reloading, digest
from rolloutd.service.systemd import Service, handed_socket
from rolloutd.settings import Settings
from rolloutd.state import State
from rolloutd.state.feed import Feed
from rolloutd.state.fleet import Fleet
from rolloutd.store import open_store
from rolloutd.store.database import FILE_NAME
from rolloutd.watching.observing import PlainHosts
from rolloutd.watching.pruning import Pruning
from rolloutd.watching.seeing import keep_watching

log = logging.getLogger("rolloutd")

SOCKET_LOOK_S = 10.0
"""How often the socket's file is looked for: somebody may clear its directory."""


class SystemClock:
    """The machine's clock (ports.Clock)."""

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)


async def serve(settings: Settings) -> None:
    """Be the daemon until SIGTERM or SIGINT; runs go on without it.

    Raises AlreadyRunning, StoreFailed, CannotListen or another RolloutdError
    when it cannot start.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    clock, service, listening = SystemClock(), Service.of(), handed_socket()
    service.status("Opening the database.")
    compiler = Compiler(settings.teams)
    for lack in await asyncio.to_thread(lacks, settings):
        log.warning("the settings name what is not there: %s", lack)
    channels = _channels(settings)
    # The tenure ends that of whoever has it, so it is taken only by one that people will be able to reach.
    place = partial(rehearse, settings.socket, settings.socket_group) if listening is None else None
    store = await open_store(settings.state_dir, compile=compiler, ready=place)
    try:
        state = await _state(settings, store, clock, compiler)
        service.status("Reading the inventory; what is in hand goes on.")
        async with _serving(state, clock, compiler, service, listening, channels):
            log.info("rolloutd %s is ready", __version__, extra={"socket": str(settings.socket)})
            await stopping.wait()
            log.info("stopping; runs go on and are found again")
            service.stopping("Stopping; runs go on and are found again.")
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _serving(
    state: State,
    clock: SystemClock,
    compiler: Compiler,
    service: Service,
    listening: socket.socket | None,
    channels: Sequence[Notifier],
) -> Any:
    """Run the daemon and its socket for as long as the context is open."""
    settings = state.settings
    sources = TreeSources(settings.state_dir)
    shell = SshShell(settings.ssh.known_hosts, settings.ssh.user, settings.ssh.key_file)
    runner = _runner(settings, shell)
    alarm = ApschedulerAlarm()
    kit = Kit(shell, clock, runner, lambda: _snapshot(state.fleet()), settings)
    gear = Gear(
        runner,
        Adapters(ISOLATORS, kit),
        Adapters(CHECKS, kit),
        _trees(state, sources),
        Adapters(PROBES, kit),
    )
    daemon = Daemon(
        state,
        gear,
        inventories=list(_inventories(kit, settings)),
        observers=list(_observers(kit, settings)),
        alarm=alarm,
    )
    watches = list(_watches(kit, settings))
    pruning = Pruning(state, RunShelf(settings.state_dir / "runs"), sources)
    desk = Desk(
        state, runner, sources, state.now(), __version__, daemon.refresh, daemon.observe, pruning.wish
    )
    server = ControlServer(desk, path=settings.socket, group=settings.socket_group, listening=listening)
    caretaker = Caretaker(state, service, Reloading(state, compiler, daemon.retime).reload)
    notifying = _notifying(state, channels)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, caretaker.wish_reload)
    if service.feed_every_s is not None:
        alarm.every("watchdog", service.feed_every_s, daemon.turn)
    try:
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(daemon.run(), name="daemon")
            beside = [
                tasks.create_task(keep_watching(state, watch, daemon.refresh), name=f"watch {watch.source}")
                for watch in watches
            ]
            await server.start()
            # Only now, so that whoever hears READY is answered.
            daemon.turned = lambda decision_s: caretaker.turned()
            daemon.turn()
            beside += [
                tasks.create_task(_keep_socket(server, clock), name="socket"),
                tasks.create_task(caretaker.reload_when_wished(), name="reload"),
                tasks.create_task(notifying.run(), name="notify"),
                tasks.create_task(_meter(state, daemon), name="metrics"),
                tasks.create_task(_prune(daemon, pruning), name="prune"),
                tasks.create_task(_verify_audit(daemon, caretaker, settings), name="audit"),
            ]
            try:
                yield
            finally:
                for task in (loop, *beside):
                    task.cancel()
    finally:
        await server.stop()
        alarm.close()
        await shell.close()
        for system in kit.shared.values():
            await system.close()


def _runner(settings: Settings, shell: SshShell) -> AnsibleRunner:
    return AnsibleRunner(
        settings.state_dir / "runs",
        shell,
        ansible_playbook=str(settings.ansible.bin) if settings.ansible.bin else None,
        parallel=settings.ansible.parallel,
        known_hosts=settings.ssh.known_hosts,
        user=settings.ssh.user,
        key_file=settings.ssh.key_file,
    )


async def _verify_audit(daemon: Daemon, caretaker: Caretaker, settings: Settings) -> None:
    # A long chain takes seconds of work; deciding comes first.
    await daemon.settled.wait()
    await caretaker.verify_audit(settings.state_dir / FILE_NAME)


async def _prune(daemon: Daemon, pruning: Pruning) -> None:
    # What is in hand comes first.
    await daemon.settled.wait()
    await pruning.run()


async def _meter(state: State, daemon: Daemon) -> None:
    """Serve metrics until cancelled, if the settings ask for them."""
    place = state.settings.metrics
    if place.listen is None and place.path is None:
        return
    # Loaded here: who asks for no metrics pays for none.
    from rolloutd.service.metrics import Meter, serving

    meter = Meter(state, __version__)
    state.committed = meter.committed
    looked_after = daemon.turned

    def turned(decision_s: float) -> None:
        meter.decided(decision_s)
        looked_after(decision_s)

    daemon.turned = turned
    try:
        async with serving(meter, place) as places:
            log.info("metrics are served at %s", " and ".join(places))
            await meter.measure_lag()
    except (RolloutdError, OSError) as error:
        state.lasting["metrics"] = f"there are no metrics: {error}"
        log.error("there are no metrics: %s", error)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Spare the garbage collector what is loaded: it stays, and to look through it again is costly."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


async def _state(settings: Settings, store: Store, clock: SystemClock, compiler: Compiler) -> State:
    with _uncollected():
        snapshot = await store.load()
        index = Projection.build(snapshot, compile_limits(settings), compiler)
    head = await store.head()
    state = State(index, store, clock, settings, Feed(head.seq if head else 0), epoch=snapshot.epoch)
    state.connect(await store.connections())
    await state.commit(
        [DaemonStarted(snapshot.epoch, __version__, digest(settings), clock.now())], cause="daemon started"
    )
    return state


def _snapshot(fleet: Fleet) -> InventorySnapshot:
    return InventorySnapshot(fleet.hosts, fleet.groups, fleet.generation)


def _channels(settings: Settings) -> Sequence[Notifier]:
    """Return whom to tell; raises InvalidFile."""
    if settings.notify is None:
        return ()
    # Imported only where the settings name it: it brings a hundred services along.
    from rolloutd.adapters import notices

    return notices.load(settings.notify.urls_file)


def _notifying(state: State, channels: Sequence[Notifier]) -> Notifying:
    wanted = state.settings.notify
    if wanted is None:
        return Notifying(state, ())
    return Notifying(state, channels, wanted.events, float(wanted.nothing_moved))


def _trees(state: State, sources: TreeSources) -> Any:
    pinned: dict[str, Pinned] = {}

    async def tree(rollout: str) -> Path:
        if rollout not in pinned:
            _, source = await state.store.content(rollout)
            pinned[rollout] = Pinned(source["kind"], source["pin"])
        # Looked for each time: what is gone is called gone, and what was submitted again is found.
        return sources.tree(pinned[rollout])

    return tree


def _inventories(kit: Kit, settings: Settings) -> Iterator[Inventory]:
    for source in settings.inventory:
        yield make(INVENTORIES, source.kind, replace(kit, params=source.params))


def _watches(kit: Kit, settings: Settings) -> Iterator[Watch]:
    for source in settings.inventory:
        if source.kind in kinds(WATCHES):
            yield make(WATCHES, source.kind, replace(kit, params=source.params))


def _observers(kit: Kit, settings: Settings) -> Iterator[Observer]:
    for kind in sorted({source.kind for source in settings.inventory} & kinds(WATCHES)):
        yield make(OBSERVERS, kind, kit)
    for source in settings.observe:
        yield PlainHosts(make(OBSERVERS, source.kind, replace(kit, params=source.params)))
    if not settings.observe:
        yield PlainHosts(make(OBSERVERS, "reachable", kit))


async def _keep_socket(server: ControlServer, clock: SystemClock) -> None:
    while True:
        await clock.sleep(SOCKET_LOOK_S)
        try:
            await server.ensure()
        except (RolloutdError, OSError) as error:
            log.error("the control socket cannot be made again: %s", error)
