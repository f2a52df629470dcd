"""The Runner port by ansible-playbook: runs that outlive the daemon and are found again.

A run is a directory, and a wrapper process that claimed it (wrapper.py).  The
handle is the directory's name.  Whoever finds a directory without a claim takes
the claim before anything else happens, so a late wrapper never begins; a run
whose wrapper is gone without a status is Unknown, after its other processes
here have been ended.  This file starts, follows and cancels; what is in which
file is rundir's affair, what events mean is progress's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from rolloutd.adapters.ansible import environment, launch, processes, progress, remnants, rundir, wrapper
from rolloutd.adapters.ansible.environment import Defaults
from rolloutd.adapters.ansible.interpreter import Interpreters, as_host
from rolloutd.adapters.ansible.inventories import Inventories
from rolloutd.adapters.ansible.rundir import RunDir
from rolloutd.errors import NotFound
from rolloutd.ports import Failed, Host, Ok, RunEvent, RunRequest, RunState, Shell, Unknown

FOLLOW_S = 0.25
"""How often a run's events are looked at while somebody waits; its end is told by the kernel at once."""

CLAIM_LIMIT_S = 30.0
"""A wrapper claims its run within some 20 ms; on a machine that starves, later."""

CANCEL_LIMIT_S = 25.0
"""A wrapper that was asked to end its run needs at most its own limits, 15 s, and some air."""

CANCEL_NODE_S = 10.0
"""How long the node may take to end what a cancelled run left there: nobody waits for it by then."""

MOST_OVER = 100
"""Runs that are over and still known by heart, each with the end of its output: 2 MB in all."""

TRIES_LIMIT = 16
"""Directories that one run may use up by daemons dying at the wrong moment; it takes one such death each."""


@dataclass(slots=True)
class _Followed:
    """What this daemon knows of a run by heart; all of it can be read again."""

    directory: RunDir
    departure: processes.Departure | None = None
    progress: progress.Progress | None = None
    offset: int = 0
    result: Ok | Failed | Unknown | None = None
    has_slot: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AnsibleRunner:
    """Runs playbooks on nodes, at most `parallel` at once on this machine."""

    def __init__(
        self,
        runs_dir: Path,
        shell: Shell,
        *,
        ansible_playbook: str | None = None,
        parallel: int = 16,
        known_hosts: Path | None = None,
        user: str | None = None,
        key_file: Path | None = None,
    ) -> None:
        """Take the directory of all runs (made if missing) and how nodes are asked things."""
        runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._runs_dir = runs_dir.resolve()
        self._shell = shell
        self._binary = ansible_playbook or str(Path(sys.executable).with_name("ansible-playbook"))
        self._inventories = Inventories(self._runs_dir)
        self._slots = asyncio.Semaphore(parallel)
        self._defaults = Defaults(known_hosts, user, key_file)
        self._interpreters = Interpreters(shell)
        self._marks = remnants.Marks(self._runs_dir)
        self._followed: dict[str, _Followed] = {}
        self._tmp_bases = {environment.DEFAULT_REMOTE_TMP}
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- the port ----------------------------------------------------------

    async def start(self, request: RunRequest) -> str:
        """Start the run and return its handle; a run that has a claim is not started again.

        Waits while `parallel` runs are under way; the run's own limit counts
        from its own start.  Raises ValueError for a run id that is no file name.
        """
        remnants.check_run(request.run)
        lock = self._starting.setdefault(request.run, asyncio.Lock())
        async with lock:
            return await self._start(request)

    async def observe(self, handle: str) -> RunState:
        """Say where the run stands; raises NotFound for a handle that is none of ours."""
        run = self._follow(handle)
        async with run.lock:
            if run.result is None:
                run.result = await self._look(run)
                self._forget_the_oldest()
            now = run.progress
        assert now is not None
        percent = 100.0 if isinstance(run.result, Ok) else now.percent
        began_at = run.directory.facts().get("began_at")
        return RunState(run.result, percent, now.task, began_at)

    async def wait(self, handle: str) -> RunState:
        """Return once the run has said something new or is over; at once when it is over."""
        run = self._follow(handle)
        before = (run.offset, run.result)
        state = await self.observe(handle)
        while state.result is None and (run.offset, run.result) == before:
            await self._news(run)
            state = await self.observe(handle)
        return state

    async def events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Yield what the run has said from `offset` on, and end when there is no more for now."""
        directory = self._follow(handle).directory
        if not directory.path.is_dir():
            raise NotFound(f"there is no run {handle} in {self._runs_dir} any more")
        while lines := await asyncio.to_thread(directory.read_lines, offset):
            for line in lines:
                yield _as_event(line)
            offset = lines[-1].offset

    async def cancel(self, handle: str) -> None:
        """End every process of the run, here and on the node, and close its connections.

        A node that does not answer is not waited for: `clear` asks it again
        before anything else may run there.
        """
        run = self._follow(handle)
        if (await self.observe(handle)).result is not None:
            return
        directory = run.directory
        host = _host_of(directory)
        directory.take_claim()
        claim = directory.claim()
        if claim is not None and processes.ask_to_end(claim) and run.departure is not None:
            await run.departure.wait(CANCEL_LIMIT_S)
        await self._end_here(directory)
        if directory.status() is None:
            directory.close_as_cancelled(float(directory.facts().get("began_at") or 0.0))
        if host is not None:
            await self._clear(host, keep=None, timeout_s=CANCEL_NODE_S, wait_share=0.0)
        await self.observe(handle)

    async def clear(self, host: Host, *, keep: str | None, timeout_s: float) -> Ok | Failed:
        """See to it that no older run's process is left on the node: waited for, then ended."""
        return await self._clear(host, keep=keep, timeout_s=timeout_s, wait_share=remnants.WAIT_SHARE)

    async def close(self) -> None:
        """Stop following; the runs go on."""
        for run in self._followed.values():
            if run.departure is not None:
                run.departure.close()
        self._followed.clear()

    # -- starting ----------------------------------------------------------

    async def _start(self, request: RunRequest) -> str:
        for attempt in range(1, TRIES_LIMIT + 1):
            handle = request.run if attempt == 1 else f"{request.run}~{attempt}"
            directory = RunDir(self._runs_dir / handle)
            if not directory.path.exists():
                await self._begin(handle, directory, request)
                return handle
            if handle in self._followed or not directory.take_claim():
                claim = directory.claim()
                if claim is None or claim.by == "run" or _is_over(directory):
                    return handle
        raise NotFound(
            f"run {request.run} has been begun {TRIES_LIMIT} times and never claimed; look at the machine"
        )

    async def _begin(self, handle: str, directory: RunDir, request: RunRequest) -> None:
        refusal = launch.refusal(request)
        if refusal is None:
            host = as_host(request.node, request.inventory[request.node])
            python = await self._interpreters.of(host, request.tree, request.tree / request.playbook)
            refusal = python if isinstance(python, Failed) else None
        if refusal is not None:
            directory.make()
            facts = {"node": request.node, "refused": refusal.text, "evidence": refusal.output}
            directory.write_facts(facts)
            directory.take_claim()
            return
        await self._slots.acquire()
        run = _Followed(directory, has_slot=True)
        try:
            await asyncio.to_thread(
                launch.prepare,
                directory,
                request,
                binary=self._binary,
                mark=self._marks.mark(request.node, request.run),
                defaults=self._defaults,
                interpreter=python if isinstance(python, str) else None,
                inventories=self._inventories,
            )
            self._tmp_bases.add(str(directory.facts()["remote_tmp"]).rpartition("/")[0])
            self._watch(run, launch.spawn(directory, request.run))
        except BaseException:
            self._free(run)
            raise
        self._followed[handle] = run

    # -- following ---------------------------------------------------------

    def _follow(self, handle: str) -> _Followed:
        run = self._followed.get(handle)
        if run is None:
            directory = RunDir(self._runs_dir / handle)
            if Path(handle).name != handle or not directory.path.is_dir():
                raise NotFound(f"there is no run {handle} in {self._runs_dir}")
            run = self._followed[handle] = _Followed(directory)
        if run.progress is None:
            run.progress = progress.Progress(str(run.directory.facts().get("node", "")))
        return run

    async def _look(self, run: _Followed) -> Ok | Failed | Unknown | None:
        """Read what is new and judge; the order matters: status after claim, events after status."""
        directory = run.directory
        refused = directory.facts().get("refused")
        if refused is not None:
            return Failed(refused, directory.facts().get("evidence", ""))
        lives = await self._attach(run)
        status = directory.status()
        await asyncio.to_thread(_read_on, run)
        if status is not None:
            return await asyncio.to_thread(_judge, run, status)
        if lives:
            return None
        status = directory.status()
        if status is not None:
            return await asyncio.to_thread(_judge, run, status)
        return await self._lost(run)

    async def _attach(self, run: _Followed) -> bool:
        """Say whether the run's wrapper lives; follow it by pid and start time if nobody does yet."""
        if run.departure is not None and not run.departure.gone:
            return True
        claim = run.directory.claim()
        if claim is None and run.directory.take_claim():
            return False
        claim = claim or run.directory.claim()
        if claim is None or claim.by != "run" or not claim.lives():
            return False
        if run.departure is None:
            try:
                self._watch(run, claim.pid)
            except ProcessLookupError:
                return False
            if not self._slots.locked():  # more may have been running than are allowed now
                await self._slots.acquire()
                run.has_slot = True
        return claim.lives()

    async def _lost(self, run: _Followed) -> Unknown:
        """Name a run that nobody holds any more, after ending what it left on this machine."""
        claim = run.directory.claim()
        node = run.directory.facts().get("node", "its node")
        if claim is not None and claim.by == "daemon":
            run.directory.forget_secrets()  # whoever claimed it may have died before it could
            return Unknown(
                f"the run on {node} was prepared and never began: the daemon or the machine stopped before it"
            )
        left = await self._end_here(run.directory)
        run.directory.forget_secrets()
        more = f"; {left} of its processes would not end" if left else ""
        return Unknown(f"the run on {node} was lost: its process is gone and left no outcome{more}")

    async def _news(self, run: _Followed) -> None:
        """Return when the run has ended or written more, or soon after."""
        while run.directory.events_size() == run.offset:
            if run.departure is None:
                await asyncio.sleep(FOLLOW_S)
                return
            if await run.departure.wait(FOLLOW_S):
                return

    def _watch(self, run: _Followed, pid: int) -> None:
        run.departure = processes.Departure(pid, lambda: self._free(run))

    def _forget_the_oldest(self) -> None:
        """Know no more runs by heart that are over than a few: their directories know it as well."""
        over = [
            handle for handle, run in self._followed.items() if run.result is not None and not run.has_slot
        ]
        for handle in over[: max(0, len(over) - MOST_OVER)]:
            del self._followed[handle]

    def _free(self, run: _Followed) -> None:
        if run.has_slot:
            run.has_slot = False
            self._slots.release()

    # -- ending ------------------------------------------------------------

    async def _end_here(self, directory: RunDir) -> int:
        facts = directory.facts()
        if "sockets" not in facts:
            return 0
        left = await processes.end_all(facts["run"], directory.path, facts["sockets"])
        await asyncio.to_thread(wrapper.remove, facts["sockets"].encode())
        return left

    async def _clear(
        self, host: Host, *, keep: str | None, timeout_s: float, wait_share: float
    ) -> Ok | Failed:
        said = host.connection.get("ansible_remote_tmp")
        return await remnants.clear(
            self._shell,
            host,
            self._marks.token(host.name),
            keep=keep.partition("~")[0] if keep else None,
            timeout_s=timeout_s,
            wait_share=wait_share,
            bases=tuple(sorted(self._tmp_bases | ({str(said)} if said else set()))),
        )


def _is_over(directory: RunDir) -> bool:
    """Say whether a run that the daemon claimed has an outcome all the same."""
    return directory.status() is not None or directory.facts().get("refused") is not None


def _read_on(run: _Followed) -> None:
    assert run.progress is not None
    while lines := run.directory.read_lines(run.offset):
        for line in lines:
            run.progress = run.progress.after(line.event)
        run.offset = lines[-1].offset


def _judge(run: _Followed, status: rundir.Status) -> Ok | Failed:
    assert run.progress is not None
    facts = run.directory.facts()
    playbook, limit_s = str(facts.get("playbook", "")), float(facts.get("timeout_s", 0.0))
    run.directory.forget_secrets()
    tree, output = str(facts.get("tree", "")), run.directory.output()
    return progress.verdict(run.progress, status, playbook, limit_s, output, tree)


def _host_of(directory: RunDir) -> Host | None:
    """Return the node of a run that is not over, as the shell needs it."""
    facts = directory.facts()
    return as_host(str(facts["node"]), facts["connection"]) if "connection" in facts else None


def _as_event(line: rundir.Line) -> RunEvent:
    event = dict(line.event)
    at, kind = event.pop("at", 0.0), event.pop("kind", "")
    event.pop("text", None)
    return RunEvent(line.offset, float(at), str(kind), progress.told(line.event), event)
