"""Wiring of the daemon: settings, store, adapters, loop and socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from machines.facts.projection import Projection
from machines.model.events import DaemonStarted
from rolloutd import __version__, plugin, ports
from rolloutd.adapters.ansible.artifact_store import OUTPUT_DIRECTORY
from rolloutd.adapters.ansible.machine import load_machine
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.adapters.directory_store import shared_store
from rolloutd.adapters.registry import AdapterRegistry, create_adapter
from rolloutd.adapters.sources.git import TrustedKeys
from rolloutd.adapters.sources.tree_store import TREES_DIRECTORY, TreeStore
from rolloutd.adapters.ssh.checkpoints import SshCheckpoints
from rolloutd.adapters.ssh.node_files import SshNodeFiles
from rolloutd.adapters.ssh.person_shell import shell_command
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.ssh.snapshot import SshSnapshots
from rolloutd.adapters.ssh.staged_files import SshStagedFiles
from rolloutd.adapters.ssh.stager import SshStager, UrlStager
from rolloutd.adapters.timers import ApschedulerTimers, SystemClock
from rolloutd.adapters.webhook_notifier import load_webhook
from rolloutd.audit.audit_segments import SEGMENTS_DIRECTORY
from rolloutd.concurrency import garbage, threads
from rolloutd.configuration.documents import fingerprint, load_redaction_key
from rolloutd.control.routes import Services
from rolloutd.control.server import ControlServer
from rolloutd.control.standby import Standby
from rolloutd.engine.background.audit_anchor import AuditAnchor
from rolloutd.engine.background.audit_export import AuditExporter
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.background.node_observations import HostOnlyObserver, run_watch
from rolloutd.engine.background.retention import RetentionCleaner
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.forecasts import Forecaster
from rolloutd.engine.notifications import NotificationDispatcher
from rolloutd.engine.preparation.builds import ARTIFACTS_DIRECTORY
from rolloutd.engine.runners import RoutedRunners
from rolloutd.engine.state import State
from rolloutd.engine.tasks import wait_for_first
from rolloutd.errors import LeadershipLost, RolloutdError, SourceFailed
from rolloutd.service.disk_reserve import keep_reserve
from rolloutd.service.listen_socket import check_bindable
from rolloutd.service.preflight import find_missing_prerequisites
from rolloutd.service.reload import SettingsReloader, TeamPlanCompiler, hash_settings, read_again
from rolloutd.service.service_manager import SystemdReporter
from rolloutd.service.systemd import SystemdNotifier, inherited_socket
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits, compile_source_rules
from rolloutd.store import Store, backend_of, leadership_of, open_store
from rolloutd.texts.formats import short_hash

log = logging.getLogger(__name__)

ANCHOR_AT_STOP_S = 10.0
"""Limit of the last write to the audit's anchors: a stop must not wait for a machine that is down."""

RENEW_S = 5.0

SOCKET_CHECK_S = 10.0
"""Interval between checks that the socket's file exists: a cleanup job may remove it."""


async def serve(settings: Settings, leadership: ports.Leadership | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT; playbook runs continue without it.

    It first waits for leadership; the lock of an SQLite file's state directory does not wait.
    Raises AlreadyRunning, StoreFailed, CannotListen or another RolloutdError when it cannot start, and
    LeadershipLost when it must not continue.
    """
    stopping, stepping_down, reload_requested = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    # From here on: a standby that SIGHUP ended would not be started again.
    loop.add_signal_handler(signal.SIGHUP, reload_requested.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    clock, service, inherited = SystemClock(), SystemdNotifier.from_environment(), inherited_socket()
    compiler = TeamPlanCompiler(settings.teams)
    for missing in await threads.FILES.run(find_missing_prerequisites, settings):
        log.warning("the settings name what is not there: %s", missing)
    channels = _load_channels(settings)
    address, name = settings.store.postgresql, settings.name or ""
    leadership = leadership or leadership_of(settings.state_dir, address, name=name)
    service.set_status("Waiting for leadership.")
    standby = Standby(settings, clock, compiler, inherited, leadership)
    try:
        if not await standby.acquire_unless(stopping, service):
            return
        if standby.has_waited:
            settings = await read_again(settings, compiler)
            reload_requested.set()  # it reports what is not applied
        service.set_status("Opening the database.")
        # A new term ends that of another daemon, so begin one only if clients can reach this daemon.
        if inherited is None:
            await threads.ACCOUNTS.run(check_bindable, settings.socket, settings.socket_group)
        store = await open_store(
            settings.state_dir,
            address,
            compile_plan=compiler,
            redaction_key_file=settings.redaction_key_file,
            name=name,
        )
        try:
            state = await _load_state(settings, store, clock, compiler, leadership)
            service.set_status("Reading the inventory; nodes in flight continue.")
            async with _run_services(
                state,
                clock,
                compiler,
                service,
                inherited,
                channels,
                leadership,
                stepping_down.set,
                reload_requested,
            ):
                log.info("rolloutd %s is ready", __version__, extra={"socket": str(settings.socket)})
                await wait_for_first(stopping.wait(), stepping_down.wait())
                log.info("stopping; runs continue and are found again")
                service.notify_stopping("Stopping; runs continue and are found again.")
        finally:
            await store.close()
        if stepping_down.is_set():
            # Not before: the successor's first commit ends what this daemon still writes.
            await leadership.hand_over()
            raise LeadershipLost("leader: it stepped down; its next start is a standby")
    finally:
        await leadership.release()


async def _keep_leadership(leadership: ports.Leadership) -> None:
    """Renew until cancelled; Daemon.run() ends when it is lost."""
    while True:
        await asyncio.sleep(min(RENEW_S, leadership.renewal_s))
        await leadership.renew()


@contextlib.asynccontextmanager
async def _run_services(
    state: State,
    clock: SystemClock,
    compiler: TeamPlanCompiler,
    service: SystemdNotifier,
    inherited: socket.socket | None,
    channels: Sequence[ports.Notifier],
    leadership: ports.Leadership,
    step_down: Callable[[], None],
    reload_requested: asyncio.Event,
) -> Any:
    """Run the daemon and its socket for as long as the context is open."""
    settings = state.settings
    tree_cache = TreeCache(settings.state_dir / "ansible", settings.ansible.bin)
    sources = _make_sources(settings, tree_cache)
    shell = SshShell(
        settings.ssh.known_hosts,
        settings.ssh.user,
        settings.ssh.key_file,
        before_command=leadership.require,
    )
    shared: dict[str, Any] = {}
    runner = await _make_runners(state, shell, clock, sources, shared)
    timers = ApschedulerTimers()
    context = ports.AdapterContext(shell, clock, runner, state.connections.snapshot, settings, shared=shared)
    checkpoints, built = SshCheckpoints(shell), shared_store(settings, ARTIFACTS_DIRECTORY)
    stagers = {"ssh": SshStager(shell), "url": UrlStager(shell)}
    adapters = AdapterSet(
        runner,
        AdapterRegistry(plugin.ISOLATORS, context),
        AdapterRegistry(plugin.CHECKS, context),
        _make_source_lookup(state, sources, tree_cache),
        AdapterRegistry(plugin.PROBES, context),
        AdapterRegistry(plugin.GUARDS, context),
        PreparationAdapters(
            stagers, SshSnapshots(shell), checkpoints, SshStagedFiles(shell), sources.tree_path, built
        ),
    )
    inventories: list[ports.Inventory] = _make_adapters(plugin.INVENTORIES, settings.inventory, context)
    daemon = Daemon(
        state,
        adapters,
        inventories=inventories,
        observers=list(_make_observers(context, settings)),
        timers=timers,
        source_rules={
            inventory.source: compile_source_rules(source.params)
            for inventory, source in zip(inventories, settings.inventory, strict=True)
        },
    )
    watched = [
        source for source in settings.inventory if source.kind in plugin.installed_adapters(plugin.WATCHES)
    ]
    watches: list[ports.Watch] = _make_adapters(plugin.WATCHES, watched, context)
    retention = RetentionCleaner(
        state,
        runner.artifacts,
        [*sources.artifact_stores, tree_cache, built, shared_store(settings, OUTPUT_DIRECTORY)],
        AuditExporter(
            state, settings.state_dir / SEGMENTS_DIRECTORY, backend_of(settings.state_dir).load_signing_key()
        ),
    )
    files = SshNodeFiles(shell, settings.ansible.fence_dir, settings.ssh.guard_dir)
    cleaner = NodeCleaner(state, files, checkpoints, stagers.values())
    notifications = _make_notifications(state, channels)
    anchor = AuditAnchor(
        state,
        _make_adapters(plugin.ANCHORS, settings.audit.anchors, context),
        notifications.announce_audit_head,
    )
    forecaster = Forecaster(state, notifications.announce_missed_forecast)
    services = Services(
        state,
        runner,
        daemon.check_mode,
        daemon.drift,
        sources,
        state.now(),
        __version__,
        daemon.refresh_inventory,
        daemon.observe_nodes,
        retention.wake_up,
        daemon.verify_audit,
        anchor.compare,
        daemon.accept_inventory,
        daemon.pin_identity,
        checkpoints,
        cleaner,
        forecaster,
        partial(shell_command, on_host=settings.shell.host, on_kubernetes=settings.shell.kubernetes),
        leadership,
        step_down,
    )
    server = ControlServer(
        services, path=settings.socket, group=settings.socket_group, inherited_socket=inherited
    )
    reloader = SettingsReloader(state, compiler, daemon.reschedule)
    systemd_reporter = SystemdReporter(state, service, reloader.reload, reload_requested)
    if service.watchdog_ping_interval_s is not None:
        timers.call_every("watchdog", service.watchdog_ping_interval_s, daemon.wake_up)
    try:
        async with asyncio.TaskGroup() as tasks:
            # Before the loop, so that no decision is made before the first check.
            companions = [
                tasks.create_task(keep_reserve(state), name="disk"),
                tasks.create_task(_keep_leadership(leadership), name="leadership"),
                tasks.create_task(runner.watch(), name="runners"),
            ]
            loop = tasks.create_task(daemon.run(), name="daemon")
            companions += [
                tasks.create_task(
                    run_watch(state, watch, partial(daemon.refresh_inventory, watch.source)),
                    name=f"watch {watch.source}",
                )
                for watch in watches
            ]
            await server.start()
            # Only after server.start(): this listener reports READY, and then clients must get an answer.
            daemon.iteration_listeners.append(lambda decision_s: systemd_reporter.on_iteration())
            daemon.wake_up()
            companions += [
                tasks.create_task(_maintain_server(server, clock), name="socket"),
                tasks.create_task(_run_later(daemon, systemd_reporter.reload_on_request), name="reload"),
                tasks.create_task(notifications.run(), name="notify"),
                tasks.create_task(_run_later(daemon, anchor.run), name="anchor"),
                tasks.create_task(_serve_metrics(state, daemon), name="metrics"),
                tasks.create_task(_run_later(daemon, retention.run), name="prune"),
                tasks.create_task(_run_later(daemon, cleaner.run), name="clean"),
                tasks.create_task(_run_later(daemon, forecaster.run), name="forecast"),
                tasks.create_task(
                    _run_later(daemon, partial(_serve_fleetlock, state, daemon)), name="fleetlock"
                ),
                tasks.create_task(
                    _run_later(daemon, partial(_run_operator, state, sources, context)), name="operator"
                ),
            ]
            try:
                yield
            finally:
                for task in (loop, *companions):
                    task.cancel()
    finally:
        await server.stop()
        timers.close()
        if not leadership.lost.is_set():
            with contextlib.suppress(RolloutdError, TimeoutError):
                async with asyncio.timeout(ANCHOR_AT_STOP_S):
                    await server.record_denial_numbers(is_last=True)
                    await anchor.write()
        await shell.close()
        for system in context.shared.values():
            await system.close()


def _make_sources(settings: Settings, tree_cache: TreeCache) -> TreeStore:
    git = settings.git
    keys = TrustedKeys(git.allowed_signers, git.gnupg_home) if git.verify_signatures else None
    return TreeStore(
        settings.files_dir,
        trees=shared_store(settings, TREES_DIRECTORY),
        git_dir=settings.state_dir / "git",
        trusted_keys=keys,
        prepare=tree_cache.prepare,
    )


async def _make_runners(
    state: State, shell: SshShell, clock: ports.Clock, sources: TreeStore, shared: dict[str, Any]
) -> RoutedRunners:
    settings = state.settings
    machine = await threads.FILES.run(load_machine, settings.state_dir)
    context = ports.RunnerContext(
        plugin.LOCAL_RUNNER,
        shell,
        clock,
        state.connections.snapshot,
        settings,
        sources.tree_path,
        machine=machine,
        inherited_nodes=await state.store.take_over_runs(machine),
        # With a file, only this state directory's daemons act on the nodes.
        marks=await state.database_id() if settings.store.postgresql is not None else "",
        shared=shared,
    )
    local = await threads.FILES.run(create_adapter, plugin.RUNNERS, plugin.LOCAL_RUNNER, context)
    elsewhere = {
        each.runner_name: create_adapter(
            plugin.RUNNERS,
            each.kind,
            replace(context, name=each.runner_name, params=each.params, stale_runs=local),
        )
        for each in settings.runners
    }
    changes = AdapterRegistry(plugin.CHANGES, replace(context, name="", stale_runs=local))
    return RoutedRunners(state, {**elsewhere, plugin.LOCAL_RUNNER: local}, changes)


async def _run_later(daemon: Daemon, work: Callable[[], Awaitable[None]]) -> None:
    # First decide, so that nodes in flight continue: what this waits for may be slow to answer.
    await daemon.first_iteration_done.wait()
    await work()


async def _serve_metrics(state: State, daemon: Daemon) -> None:
    """Serve metrics until cancelled, if the settings ask for them."""
    endpoint = state.settings.metrics
    if endpoint.listen is None and endpoint.path is None:
        return
    # Imported here: a daemon without metrics does not load the library.
    from rolloutd.service.metrics import MetricsCollector, serve_metrics

    collector = MetricsCollector(state, __version__)
    state.commit_listeners.append(collector.record_commit)
    daemon.iteration_listeners.append(collector.record_decision)
    try:
        async with serve_metrics(collector, endpoint) as endpoints:
            log.info("metrics are served at %s", " and ".join(endpoints))
            await collector.measure_lag()
    except (RolloutdError, OSError) as error:
        state.conditions["metrics"] = f"metrics: not served: {error}"
        log.error("metrics: not served: %s", error)


async def _serve_fleetlock(state: State, daemon: Daemon) -> None:
    if state.settings.fleetlock is not None:
        # Imported here: a daemon that serves none does not load it.
        from rolloutd.fleetlock.server import run_fleetlock

        await run_fleetlock(state, daemon.observe_nodes)


async def _run_operator(state: State, sources: TreeStore, context: ports.AdapterContext) -> None:
    if state.settings.operator is not None:
        # Imported here: a daemon without objects does not load it.
        from rolloutd.operator.runner import run_operator

        await run_operator(state, sources, context)


async def _load_state(
    settings: Settings,
    store: Store,
    clock: SystemClock,
    compiler: TeamPlanCompiler,
    leadership: ports.Leadership,
) -> State:
    with garbage.uncollected():  # what is loaded here stays
        snapshot = await store.load_snapshot()
        index = Projection.build(snapshot, compile_limits(settings), compiler)
        head = await store.latest_audit_entry()
        key = load_redaction_key(settings.state_dir, settings.redaction_key_file)
        state = State(
            index,
            store,
            clock,
            settings,
            ChangeNotifier(head.seq if head else 0),
            epoch=snapshot.epoch,
            redaction_key=key,
            leadership_lost=leadership.lost,
            require_leadership=leadership.require,
        )
        if settings.store.postgresql is not None or settings.redaction_key_file is not None:
            # Another key would seal what the next daemon cannot read, and give configurations other hashes.
            await store.require_redaction_key(fingerprint(key))
        await state.load_connections()
    started = DaemonStarted(snapshot.epoch, __version__, hash_settings(settings), clock.now())
    await state.record_start(started, head)
    return state


def _load_channels(settings: Settings) -> Sequence[ports.Notifier]:
    """Return the notification channels; raises InvalidFile."""
    if settings.notify is None:
        return ()
    channels = [load_webhook(each.url, each.key_file) for each in settings.notify.webhooks]
    if settings.notify.urls_file is not None:
        # Imported only where the settings name it: apprise loads a hundred services.
        from rolloutd.adapters import apprise_notifier

        channels += apprise_notifier.load_notifiers(settings.notify.urls_file)
    return channels


def _make_notifications(state: State, channels: Sequence[ports.Notifier]) -> NotificationDispatcher:
    wanted = state.settings.notify
    if wanted is None:
        return NotificationDispatcher(state, ())
    return NotificationDispatcher(state, channels, wanted.events, float(wanted.nothing_moved))


def _make_source_lookup(
    state: State, sources: TreeStore, tree_cache: TreeCache
) -> Callable[[str], Awaitable[ports.PinnedSource]]:
    pinned: dict[str, ports.PinnedSource] = {}

    async def find_source(rollout: str) -> ports.PinnedSource:
        if rollout not in pinned:
            found = ports.PinnedSource.from_record((await state.store.load_plan(rollout))[1])
            # Another machine may have stored the tree, and a server may have other content by now.
            installed = await tree_cache.prepare(await sources.find_tree(found))
            if found.requirements not in ("", installed):  # an earlier version recorded none
                raise SourceFailed(
                    f"requirements: installed is {short_hash(installed) or 'nothing'}, approved was"
                    f" {short_hash(found.requirements)}; submit the plan again"
                )
            pinned[rollout] = found
        # Each time: a tree may be pruned, and another submit may add it again.
        await sources.find_tree(pinned[rollout])
        return pinned[rollout]

    return find_source


def _make_adapters(group: str, configured: Iterable[Any], context: ports.AdapterContext) -> list[Any]:
    return [create_adapter(group, each.kind, replace(context, params=each.params)) for each in configured]


def _make_observers(context: ports.AdapterContext, settings: Settings) -> Iterator[ports.Observer]:
    watched = {source.kind for source in settings.inventory} & plugin.installed_adapters(
        plugin.WATCHES
    ).keys()
    for kind in sorted(watched & plugin.installed_adapters(plugin.OBSERVERS).keys()):
        yield create_adapter(plugin.OBSERVERS, kind, context)
    for number, source in enumerate(settings.observe):
        observer = create_adapter(plugin.OBSERVERS, source.kind, replace(context, params=source.params))
        yield HostOnlyObserver(observer, f"observe.{number}.{source.kind}")
    if not settings.observe:
        yield HostOnlyObserver(create_adapter(plugin.OBSERVERS, "reachable", context), "observe.0.reachable")


async def _maintain_server(server: ControlServer, clock: SystemClock) -> None:
    while True:
        await clock.sleep(SOCKET_CHECK_S)
        try:
            await server.ensure_listening()
            await server.record_denial_numbers()
        except (RolloutdError, OSError) as error:
            log.error("the control socket cannot be made again: %s", error)
