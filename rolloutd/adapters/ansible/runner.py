"""Runner of ansible-playbook, whose runs outlive the daemon.

A run is a directory, whose name is the handle, and a wrapper process that claimed it (wrapper.py).  A daemon
that finds a directory without a claim claims it first, so that a late wrapper never begins.  A run whose
wrapper is gone without a status is Unknown, after its other processes on this machine have been ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from machines.model.rollout import FailureCode
from rolloutd import ports
from rolloutd.adapters.ansible import launcher, processes, progress, run_directory, stale_processes, wrapper
from rolloutd.adapters.ansible.artifact_store import RunArtifactStore, SharedOutput
from rolloutd.adapters.ansible.fast.fast_runs import FastRuns, NotForked, SelfTest
from rolloutd.adapters.ansible.interpreter import InterpreterCache
from rolloutd.adapters.ansible.inventory_cache import InventoryCache
from rolloutd.adapters.ansible.launcher import Launcher, LocalRun
from rolloutd.adapters.ansible.node_connections import NodeConnections
from rolloutd.adapters.ansible.older_runs import OlderRuns
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.run_slots import RunSlots
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed, NotFound

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
"""Interval of reading a run's events for a waiter; the kernel reports the run's end at once."""

CANCEL_TIMEOUT_S = 25.0
"""A wrapper ends its run within its own limits, 15 s; the rest is a margin."""

CANCEL_ON_NODE_TIMEOUT_S = 10.0
"""Limit of ending a cancelled run's processes on the node."""

MAX_FINISHED_RUNS = 100
"""Cached runs that are over, each with the end of its output: 2 MB in all."""


@dataclass(slots=True)
class _TrackedRun:
    """The cached state of a run; all of it can be read again."""

    directory: RunDirectory
    progress: progress.Progress
    process_exit: processes.ProcessExit | None = None
    offset: int = 0
    read_size: int = 0
    result: ports.Ok | ports.Failed | ports.Unknown | None = None
    has_slot: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AnsibleRunner:
    """Runs playbooks on nodes, at most `parallel` at once on this machine; None follows its cores."""

    def __init__(
        self,
        runs_dir: Path,
        shell: ports.Shell,
        find_tree: Callable[[ports.PinnedSource], Path],
        inventory: Callable[[], ports.InventorySnapshot],
        *,
        fence_dir: str = "",
        ansible_playbook: str | None = None,
        parallel: int | None = None,
        known_hosts: Path | None = None,
        user: str | None = None,
        key_file: Path | None = None,
        tree_cache: TreeCache | None = None,
        warm: bool = True,
        self_test: SelfTest | None = None,
        pipelining: bool = False,
        machine: str = "",
        inherited_nodes: Collection[str] = (),
        shared_output: SharedOutput | None = None,
        marks: str = "",
    ) -> None:
        """`runs_dir` holds all runs and is created if missing; `shell` runs commands on nodes.

        `find_tree` returns the directory of a source or raises NotFound.  A node keeps the latest fencing
        token in `fence_dir`, or in the user's home.  `machine` names this one in handles; on
        `inherited_nodes` runs of another may be under way, and it gets `shared_output` of ended ones.
        Daemons with the same `marks` end each other's leftovers; the path of `runs_dir` always is one.
        """
        runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._runs_dir = runs_dir.resolve()
        self.artifacts = RunArtifactStore(self._runs_dir)
        self.shared_output = shared_output
        self._shell = shell
        self._find_tree, self._inventory = find_tree, inventory
        self._connections = NodeConnections(self._runs_dir)
        self._run_slots = RunSlots(parallel)
        binary = ansible_playbook or str(Path(sys.executable).with_name("ansible-playbook"))
        self._fast = FastRuns(binary, self.status, enabled=warm, self_test=self_test)
        self._launcher = Launcher(
            binary,
            ports.ConnectionDefaults(known_hosts, user, key_file),
            fence_dir,
            pipelining,
            InventoryCache(self._runs_dir),
            self._connections,
            self._fast,
            tree_cache,
        )
        self._interpreters = InterpreterCache(shell)
        self.marks = marks or str(self._runs_dir)
        self._markers = stale_processes.RunMarkers(self.marks)
        self._machine = machine
        markers = set(map(stale_processes.RunMarkers, (self.marks, str(self._runs_dir))))
        self._older_runs = OlderRuns(self._runs_dir, shell, fence_dir, markers, set(inherited_nodes))
        self._tracked: dict[str, _TrackedRun] = {}
        self._start_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._node_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- the port ----------------------------------------------------------

    @property
    def status(self) -> ports.TunedRunnerStatus:
        return self._run_slots.status

    @property
    def place(self) -> str:
        return f"{self._machine or 'this machine'} {self._runs_dir}"

    async def check_available(self) -> None:
        """Return at once: the daemon runs here.  The self-test may begin, and is not awaited."""
        self._fast.begin_self_test()

    def run_id_here(self, name: str) -> str:
        return stale_processes.run_id_on(self._machine, name)

    def is_elsewhere(self, handle: str) -> bool:
        machine = stale_processes.machine_of(handle)
        return bool(machine) and machine != self._machine

    async def start(self, request: ports.RunRequest) -> str:
        """Wait in the queue, then start; raises ValueError for an invalid run id."""
        request = replace(request, run_id=stale_processes.run_name(request.run_id))
        lock = self._start_locks.setdefault(request.run_id, asyncio.Lock())
        async with lock:
            return await self._start(request)

    async def get_state(self, handle: str) -> ports.RunState:
        run = self._track(handle)
        async with run.lock:
            if run.result is None:
                run.result = await self._read_result(run)
                self._drop_oldest_finished()
            progress_now = run.progress
        state = progress_now.run_state(run.result, run.directory.read_metadata().get("began_at"))
        if not isinstance(run.result, ports.Unknown):
            return state
        run_id = ports.id_of(run.directory.path.name)
        directories = run_directory.directories_of(self._runs_dir, run_id)
        return replace(state, has_begun=any(each.may_have_begun() for each in directories))

    async def wait_for_change(self, handle: str) -> ports.RunState:
        run = self._track(handle)
        before = (run.offset, run.result)
        state = await self.get_state(handle)
        while state.result is None and (run.offset, run.result) == before:
            await self._wait_for_events(run)
            state = await self.get_state(handle)
        return state

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[ports.RunEvent]:
        is_here = (self._runs_dir / Path(handle).name).is_dir()
        shared = None if is_here or self.shared_output is None else await self.shared_output.find(handle)
        directory = shared or self._track(handle).directory
        if not directory.path.is_dir():
            raise NotFound(f"there is no run {handle} in {self._runs_dir} any more")
        while lines := await threads.RUNS.run(directory.read_events, offset):
            for line in lines:
                yield progress.to_run_event(line)
            offset = lines[-1].offset

    async def cancel(self, handle: str) -> None:
        # An unreachable node is not awaited: its stale processes are ended before its next run.
        run = self._track(handle)
        if (await self.get_state(handle)).result is not None:
            return
        directory = run.directory
        # A run that starts now would be one of those that are ended on the node.
        async with self._node_lock(str(directory.read_metadata().get("node", ""))):
            await self._cancel(handle, run)

    async def _cancel(self, handle: str, run: _TrackedRun) -> None:
        directory = run.directory
        host = _unfinished_run_host(directory)
        directory.take_claim()
        claim = directory.read_claim()
        if claim is not None and processes.request_stop(claim) and run.process_exit is not None:
            await run.process_exit.wait(CANCEL_TIMEOUT_S)
        await self._kill_local_processes(directory)
        if directory.read_status() is None:
            directory.record_cancelled(float(directory.read_metadata().get("began_at") or 0.0))
        left: ports.Ok | ports.Failed | ports.Unknown = ports.Ok()
        if host is not None:
            left = await self._older_runs.end(host, timeout_s=CANCEL_ON_NODE_TIMEOUT_S, grace_share=0.0)
        await self.get_state(handle)
        if not isinstance(left, ports.Ok):
            raise AdapterFailed(left.text)

    async def discard(self, handle: str) -> None:
        self._tracked.pop(handle, None)
        await self.artifacts.remove(handle, unmodified_since=math.inf)

    def run_marker(self, node: str, run_id: str) -> str:
        return self._markers.run_marker(node, run_id)

    async def end_inherited(self, host: ports.Host, fencing_token: str) -> None:
        await self._older_runs.end_inherited(host, f"{fencing_token} {self._machine or 'clean-up'}")

    async def clean_up_stale_runs(
        self, host: ports.Host, *, timeout_s: float, fencing_token: str = ""
    ) -> ports.Ok | ports.Failed | ports.Unknown:
        token = f"{fencing_token} {self._machine or 'clean-up'}" if fencing_token else ""
        return await self._older_runs.end(host, timeout_s=timeout_s, token=token)

    async def keep_connections(self, nodes: Collection[str]) -> None:
        await threads.RUNS.run(self._connections.keep, nodes)

    async def close(self) -> None:
        """Stop following the runs, which continue."""
        for run in self._tracked.values():
            if run.process_exit is not None:
                run.process_exit.close()
        self._tracked.clear()
        self._fast.close()

    # -- starting ----------------------------------------------------------

    async def _start(self, request: ports.RunRequest) -> str:
        for directory in run_directory.directories_of(self._runs_dir, request.run_id):
            handle = directory.path.name
            if not directory.path.exists():
                await self._launch(handle, directory, request)
                return handle
            # A directory claimed by the daemon never begins, so a retry needs the next one.
            is_claimed = handle in self._tracked or not directory.take_claim()
            if is_claimed and directory.may_have_begun():
                return handle
        times = f"{run_directory.MAX_START_ATTEMPTS} times"
        raise NotFound(f"run {request.run_id}: begun {times} and never claimed; check the machine")

    async def _launch(self, handle: str, directory: RunDirectory, request: ports.RunRequest) -> None:
        run = LocalRun.resolve(request, self._find_tree(request.source), self._inventory())
        if request.fencing_token:
            await self._older_runs.end_inherited(run.host, f"{request.fencing_token} {handle}")
        refusal = launcher.validate_playbook(run.tree, request.playbook)
        if refusal is None:
            python = await self._interpreters.resolve(run.host, run.tree, run.tree / request.playbook)
            refusal = python if isinstance(python, ports.Failed) else None
        if refusal is not None:
            launcher.record_refusal(directory, request, refusal)
            return
        await self._run_slots.acquire(request.node)
        tracked = _TrackedRun(directory, progress.Progress(request.node), has_slot=True)
        try:
            await self._prepare_when_possible(directory, run, python if isinstance(python, str) else None)
            self._older_runs.remote_tmp_dirs.add(
                str(directory.read_metadata()["remote_tmp"]).rpartition("/")[0]
            )
            async with self._node_lock(request.node):
                pid = await self._start_wrapper(directory, run)
            with contextlib.suppress(ProcessLookupError):  # a fork that is over is not our child
                self._watch_process(tracked, pid)
        except BaseException as error:
            self._release_slot(tracked)
            if not isinstance(error, FileExistsError):  # the directory of another start
                directory.abandon()
            raise
        self._tracked[handle] = tracked
        if tracked.process_exit is None:
            self._release_slot(tracked)

    def _node_lock(self, node: str) -> asyncio.Lock:
        return self._node_locks.setdefault(node, asyncio.Lock())

    async def _start_wrapper(self, directory: RunDirectory, run: LocalRun) -> int:
        """Start the run in a fork of Ansible or, if that cannot be, as a new process; return its pid."""
        try:
            pid = await self._fast.fork(directory, run.tree)
        except NotForked as reason:
            directory.append_event(f"Ansible started as a new process: {reason}")
            self.status.started["new process"] += 1
            return launcher.spawn_wrapper(directory, run.request.run_id)
        directory.append_event("Ansible started as a fork")
        self.status.started["fork"] += 1
        return pid

    async def _prepare_when_possible(
        self, directory: RunDirectory, run: LocalRun, interpreter: str | None
    ) -> None:
        """Prepare a run; on a full disk wait for space, because nothing has begun yet."""
        run_id = run.request.run_id
        marker = self.run_marker(run.request.node, run_id)
        is_reported = False
        while True:
            thread = threads.RUNS.run(self._launcher.prepare, directory, run, marker, interpreter)
            preparing = asyncio.create_task(thread)
            try:
                return await asyncio.shield(preparing)
            except asyncio.CancelledError:
                # The thread continues, so only at its end can its files be removed.
                preparing.add_done_callback(partial(_abandon, directory))
                raise
            except OSError as error:
                if error.errno not in wrapper.NO_SPACE:
                    raise
                if not is_reported:
                    log.warning("%s: no space for its files; it begins when there is", run_id)
                is_reported = True
            await threads.RUNS.run(shutil.rmtree, directory.path, ignore_errors=True)
            await asyncio.sleep(wrapper.SPACE_RETRY_S)

    # -- following ---------------------------------------------------------

    def _track(self, handle: str) -> _TrackedRun:
        if len(handle) > stale_processes.MAX_RUN_NAME and ports.id_of(handle) == handle:
            handle = stale_processes.run_name(handle)  # an id: the caller has not stored the handle yet
        run = self._tracked.get(handle)
        if run is None:
            directory = RunDirectory(self._runs_dir / handle)
            if Path(handle).name != handle or not directory.path.is_dir():
                where = (
                    "it began on another machine" if self.is_elsewhere(handle) else "its directory is gone"
                )
                raise NotFound(f"there is no run {handle} in {self._runs_dir}: {where}")
            node = str(directory.read_metadata().get("node", ""))
            run = self._tracked[handle] = _TrackedRun(directory, progress.Progress(node))
        return run

    async def _read_result(self, run: _TrackedRun) -> ports.Ok | ports.Failed | ports.Unknown | None:
        """Return the result after new events; the order matters: status after claim, events after status."""
        directory = run.directory
        refusal = directory.read_metadata().get("refused")
        if refusal is not None:
            facts = directory.read_metadata()
            code = FailureCode(facts.get("code", FailureCode.NEVER_STARTED))
            return ports.Failed(refusal, facts.get("evidence", ""), code)
        is_running = await self._ensure_tracked(run)
        status = directory.read_status()
        await threads.RUNS.run(_read_new_events, run)
        if status is not None:
            return await self._end(run, status)
        if is_running:
            return None
        # cancel() does not take the run's lock and may have recorded a status meanwhile.
        status = directory.read_status()
        if status is not None:
            return await self._end(run, status)
        return await self._resolve_lost_run(run)

    async def _ensure_tracked(self, run: _TrackedRun) -> bool:
        """Return whether the run's wrapper is alive, and follow its process."""
        if run.process_exit is not None and not run.process_exit.has_exited:
            return True
        claim = run.directory.read_claim()
        if claim is None and run.directory.take_claim():
            return False
        claim = claim or run.directory.read_claim()
        if claim is None or claim.holder != "run" or not claim.is_alive():
            return False
        if run.process_exit is None:
            try:
                self._watch_process(run, claim.pid)
            except ProcessLookupError:
                return False
            self._run_slots.take()
            run.has_slot = True
        return claim.is_alive()

    async def _resolve_lost_run(self, run: _TrackedRun) -> ports.Unknown:
        """Return the result of a run without a holder, after ending its processes on this machine."""
        claim = run.directory.read_claim()
        node = run.directory.read_metadata().get("node", "its node")
        if claim is not None and claim.holder == "daemon":
            run.directory.delete_secrets()  # the daemon may have crashed between claim and deletion
            return ports.Unknown(
                f"the run on {node} was prepared and never began: the daemon or the machine stopped before it"
            )
        left = await self._kill_local_processes(run.directory)
        run.directory.delete_secrets()
        more = f"; {left} of its processes would not end" if left else ""
        return ports.Unknown(f"the run on {node} was lost: its process is gone and left no outcome{more}")

    async def _end(self, run: _TrackedRun, status: run_directory.RunStatus) -> ports.Ok | ports.Failed:
        if run.process_exit is not None:
            self._run_slots.record_end(status.cpu_s, status.duration_s)
        result = await threads.RUNS.run(_read_outcome, run, status)
        if self.shared_output is not None:
            await self.shared_output.share(run.directory)
        if run.progress.changed_tasks or not isinstance(result, ports.Ok):
            self._interpreters.forget(run.progress.node)
        return result

    async def _wait_for_events(self, run: _TrackedRun) -> None:
        """Return after the run has ended or written events."""
        # Not the offset: a line that a full disk cut stays behind it until the run can write the rest.
        while run.directory.events_size() == run.read_size:
            if run.process_exit is None:
                await asyncio.sleep(POLL_INTERVAL_S)
                return
            if await run.process_exit.wait(POLL_INTERVAL_S):
                return

    def _watch_process(self, run: _TrackedRun, pid: int) -> None:
        run.process_exit = processes.ProcessExit(pid, lambda: self._release_slot(run))

    def _drop_oldest_finished(self) -> None:
        """Drop cached runs that are over beyond the limit: their directories have the same facts."""
        finished = [
            handle for handle, run in self._tracked.items() if run.result is not None and not run.has_slot
        ]
        for handle in finished[: max(0, len(finished) - MAX_FINISHED_RUNS)]:
            del self._tracked[handle]

    def _release_slot(self, run: _TrackedRun) -> None:
        if run.has_slot:
            run.has_slot = False
            self._run_slots.release()

    # -- ending ------------------------------------------------------------

    async def _kill_local_processes(self, directory: RunDirectory) -> int:
        facts = directory.read_metadata()
        if "sockets" not in facts:
            return 0
        left = await processes.kill_run_processes(facts["run"], directory.path, facts["sockets"])
        if shared := facts.get("shared_sockets"):
            left += await processes.kill_run_processes(facts["run"], directory.path, shared)
        await threads.PROCESSES.run(wrapper.remove_tree, facts["sockets"])
        return left


def _read_new_events(run: _TrackedRun) -> None:
    run.read_size = run.directory.events_size()
    while lines := run.directory.read_events(run.offset):
        for line in lines:
            run.progress = run.progress.apply_event(line.event)
        run.offset = lines[-1].offset


def _read_outcome(run: _TrackedRun, status: run_directory.RunStatus) -> ports.Ok | ports.Failed:
    facts = run.directory.read_metadata()
    playbook, limit_s = str(facts.get("playbook", "")), float(facts.get("timeout_s", 0.0))
    run.directory.delete_secrets()
    tree, output = str(facts.get("tree", "")), run.directory.read_output_tail()
    is_fenced = bool(facts.get("fenced"))
    return progress.evaluate_run(run.progress, status, playbook, limit_s, output, tree, is_fenced=is_fenced)


def _abandon(directory: RunDirectory, preparing: asyncio.Task[None]) -> None:
    """Abandon a run whose start was cancelled, once its preparation has ended."""
    if not preparing.cancelled():
        preparing.exception()  # retrieved, else asyncio logs it as never retrieved
    directory.abandon()


def _unfinished_run_host(directory: RunDirectory) -> ports.Host | None:
    """Return the host of a run that is not over, or None."""
    connection = directory.read_connection()
    return (
        None
        if connection is None
        else ports.Host(str(directory.read_metadata()["node"]), connection=connection)
    )
