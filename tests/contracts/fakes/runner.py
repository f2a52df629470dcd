"""The in-memory fake of the Runner port: runs are values in a world that outlives the runner.

What a playbook does is said by `scripts`, by the playbook's name.  A runner may
be thrown away and made anew over the same world, as a restarted daemon does;
`kill` ends a run as SIGKILL would, and leaves its work on the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.fence import CLOCK_SLACK_S
from rolloutd.errors import NotFound
from rolloutd.ports import (
    AdapterContext,
    Failed,
    Host,
    InventorySnapshot,
    Ok,
    RunEvent,
    RunnerStatus,
    RunRequest,
    RunState,
    Unknown,
)
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import FakeShell


class Script(Enum):
    """What a playbook does on its node."""

    OK = "ok"
    FAIL = "fail"
    UNREACHABLE = "unreachable"
    NO_HOSTS = "nobody"
    MISSING = "missing"
    BROKEN = "broken"
    CHANGE = "change"
    UNCHECKED = "unchecked"
    DEFIES = "defies"
    LONG = "long"


_TASKS = {
    Script.OK: "install package",
    Script.FAIL: "install package",
    Script.CHANGE: "write the file",
    Script.UNCHECKED: "of each",
}


def _never_started(text: str) -> Failed:
    return Failed(text, code=FailureCode.NEVER_STARTED)


_ENDINGS: Mapping[Script, Callable[[RunRequest], Ok | Failed]] = {
    Script.CHANGE: lambda request: Ok(f"1 task on {request.node}"),
    Script.UNCHECKED: lambda request: Ok(f"1 task on {request.node}"),
    Script.DEFIES: lambda request: Failed(f'check mode would execute task "act at once" on {request.node}'),
    Script.OK: lambda request: Ok(f"2 tasks on {request.node}, 1 changed"),
    Script.FAIL: lambda request: Failed(f'task "install package" failed on {request.node}: no such package'),
    Script.UNREACHABLE: lambda request: Failed(
        f"{request.node} was unreachable: connection refused", code=FailureCode.UNREACHABLE
    ),
    Script.NO_HOSTS: lambda request: _never_started(f"no play of this playbook runs on {request.node}"),
    Script.MISSING: lambda request: _never_started(
        f"playbook {request.playbook}: the source does not have it"
    ),
    Script.BROKEN: lambda request: _never_started(
        f"ansible-playbook could not run {request.playbook}: line 3"
    ),
}


@dataclass(slots=True)
class FakeRun:
    """One run: `holder` is its wrapper, `on_node` its work on the node."""

    request: RunRequest
    deadline: float
    events: list[RunEvent] = field(default_factory=list)
    result: Ok | Failed | Unknown | None = None
    has_wrapper: bool = True
    on_node: bool = False
    percent: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add_event(self, kind: str, text: str, percent: float) -> None:
        """Add an event."""
        self.events.append(RunEvent(len(self.events) + 1, 0.0, kind, text, {"task": text}))
        self.percent = max(self.percent, percent)
        self.changed.set()

    def end(self, result: Ok | Failed | Unknown) -> None:
        """Give the run its outcome, once."""
        if self.result is None:
            self.result, self.has_wrapper = result, False
            self.changed.set()


Fence = tuple[tuple[int, ...], str, int, str]
"""What a node remembers of the newest run: its numbers, whose they are, the second it began, its holder."""


@dataclass(slots=True)
class FakeRunHost:
    """The machine and the nodes: they go on while no daemon looks."""

    scripts: Mapping[str, Script]
    runs: dict[str, FakeRun] = field(default_factory=dict)
    started_runs: list[str] = field(default_factory=list)
    fences: dict[str, Fence] = field(default_factory=dict)
    checked_runs: list[str] = field(default_factory=list)
    compliant: set[str] = field(default_factory=set)
    """Nodes on which a playbook has nothing left to change."""
    connected_nodes: frozenset[str] = frozenset()
    """Nodes whose runs share a connection."""

    def fence_allows(self, node: str, fencing_token: str, holder: str) -> bool:
        """Say whether the node's fence lets a run through, and remember the newest."""
        if not fencing_token:
            return True
        number, *named = fencing_token.split()
        token = tuple(int(part) for part in number.split("."))
        owner, at = (named[0], int(named[1])) if named else ("", 0)
        known, known_owner, known_at, known_holder = self.fences.get(node, ((0, 0), "", 0, ""))
        if owner and known_owner and owner != known_owner:
            is_newer = known_at > at + CLOCK_SLACK_S
        else:
            is_newer = token < known or (token == known and known_holder not in ("", holder))
        if not is_newer:
            self.fences[node] = (token, owner, at, holder)
        return not is_newer

    def kill(self, run: str) -> None:
        """End a run's processes on this machine without a word; its work on the node goes on."""
        self.runs[run].has_wrapper = False
        self.runs[run].changed.set()

    def has_work(self, node: str) -> bool:
        """Say whether a run's work is under way on the node."""
        return any(run.on_node for run in self.runs.values() if run.request.node == node)


class FakeRunner:
    """ports.Runner over a FakeRunHost; the handle is the run's id, and ends with its machine's name."""

    def __init__(self, world: FakeRunHost, machine: str = "") -> None:
        self._world = world
        self._machine = machine
        self.status = RunnerStatus(parallel=16)
        self.statuses = {"local": self.status}
        self.place = "here"

    async def check_available(self) -> None:
        """Return: the world is always there."""

    def run_id_for(self, name: str, node: str, kind: str = "") -> str:
        return self.run_id_here(name)

    def run_id_here(self, name: str) -> str:
        return f"{name}@{self._machine}" if self._machine else name

    def is_elsewhere(self, handle: str) -> bool:
        return handle.partition("@")[2] not in ("", self._machine)

    async def start(self, request: RunRequest) -> str:
        """Begin the run unless it has begun."""
        if request.run_id in self._world.runs:
            return request.run_id
        now = asyncio.get_running_loop().time()
        run = self._world.runs[request.run_id] = FakeRun(request, now + request.timeout_s)
        script = self._world.scripts.get(request.playbook, Script.MISSING)
        if not self._world.fence_allows(request.node, request.fencing_token, request.run_id):
            run.end(Failed(f"a newer run has been on this node: {request.run_id} is refused"))
        elif script is Script.LONG:
            run.on_node = True
            run.add_event("task", "long", 0.0)
        else:
            self._play(run, script)
        return request.run_id

    def _play(self, run: FakeRun, script: Script) -> None:
        task, node, check_only = _TASKS.get(script), run.request.node, run.request.check_only
        if task is not None:
            kind = "ok" if node in self._world.compliant else "changed"
            kind = "failed" if script is Script.FAIL else kind
            kind = "unchecked" if script is Script.UNCHECKED and check_only else kind
            run.add_event("task", task, 0.0)
            run.add_event(kind, task, 50.0)
        if check_only:
            self._world.checked_runs.append(run.request.run_id)
        elif script in {Script.OK, Script.CHANGE}:
            self._world.started_runs.append(run.request.run_id)
            self._world.compliant.add(node)
        run.end(_ENDINGS[script](run.request))

    async def get_state(self, handle: str) -> RunState:
        """Say where the run stands."""
        run = self._find(handle)
        if run.result is None and asyncio.get_running_loop().time() >= run.deadline:
            run.end(Failed(f'time limit passed during task "long" on {run.request.node}'))
        if run.result is None and not run.has_wrapper:
            run.end(Unknown(f"the run on {run.request.node} was lost"))
        percent = 100.0 if isinstance(run.result, Ok) else run.percent
        return RunState(run.result, percent, "long" if run.on_node else "", 0.0)

    async def wait_for_change(self, handle: str) -> RunState:
        """Return at the next change."""
        run = self._find(handle)
        if (await self.get_state(handle)).result is None and not run.changed.is_set():
            try:
                async with asyncio.timeout_at(run.deadline):
                    await run.changed.wait()
            except TimeoutError:
                return await self.get_state(handle)
        run.changed.clear()
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Yield the events from `offset` on."""
        for event in self._find(handle).events[offset:]:
            yield event

    async def cancel(self, handle: str) -> None:
        """End the run, here and on the node."""
        run = self._find(handle)
        text = f"the run of {run.request.playbook} on {run.request.node} was cancelled"
        run.end(Failed(text, code=FailureCode.INTERFERENCE))
        run.on_node = False

    async def keep_connections(self, nodes: Collection[str]) -> None:
        """Remember the nodes."""
        self._world.connected_nodes = frozenset(nodes)

    async def discard(self, handle: str) -> None:
        """Forget a run that is over."""
        run = self._world.runs.get(handle)
        if run is not None and run.result is not None:
            del self._world.runs[handle]

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        """End what older runs left on the node."""
        if not self._world.fence_allows(host.name, fencing_token, self._machine):
            return Failed(f"a newer run has been on {host.name}")
        for run in self._world.runs.values():
            if run.request.node == host.name:
                run.on_node = False
        return Ok()

    async def close(self) -> None:
        """Nothing is held."""

    def _find(self, handle: str) -> FakeRun:
        try:
            return self._world.runs[handle]
        except KeyError:
            raise NotFound(f"there is no run {handle}") from None


def playbook_context(host: FakeRunHost) -> AdapterContext:
    """Return what a daemon that has just started gives to the adapters that run playbooks."""
    return AdapterContext(FakeShell(), FakeClock(), FakeRunner(host), lambda: InventorySnapshot({}), None)
