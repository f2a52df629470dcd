"""The daemon's ports over the world: what one life of the daemon can see and do there.

They are as fallible as the real adapters: slow, refused, answered too late.  A
twin belongs to one life and dies with it; the world goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from machines.node import Observation, Sight
from rolloutd.errors import NodeUnreachable, NotFound, RolloutdError, SourceFailed
from rolloutd.ports import (
    Busy,
    Failed,
    Found,
    Host,
    Look,
    Ok,
    RunEvent,
    RunRequest,
    RunState,
    StepContext,
    StepResult,
    Unknown,
)
from tests.sim.loop import Process
from tests.sim.world import KEPT_KIND, Machine, Run, World

TREE = Path("/tree")
"""Where the playbooks are said to be; nobody reads it."""

POLL_S = 3.0
"""How long a look at a run's progress takes, about."""

CLAIM_LIMIT_S = 30.0
"""How long a wrapper may take to claim its run, as with the real runner."""


class SimClock:
    """ports.Clock on the world's wall clock."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return self._world.now()

    async def sleep(self, seconds: float) -> None:
        """Wait so long, by the monotonic clock."""
        await asyncio.sleep(seconds)


class SimAlarm:
    """ports.Alarm: instants become delays when they are set, as a timer's do."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def at(self, key: str, instant: float, poke: Callable[[], None]) -> None:
        """Poke at the instant."""
        self.cancel(key)
        delay_s = max(0.0, instant - self._world.now())
        self._timers[key] = asyncio.get_running_loop().call_later(delay_s, poke)

    def every(self, key: str, seconds: float, poke: Callable[[], None]) -> None:
        """Poke every so many seconds."""

        def again() -> None:
            if self._world.over:
                return
            self._timers[key] = loop.call_later(seconds, again)
            with contextlib.suppress(
                RuntimeError
            ):  # a daemon that is ending takes no more work; timers log it
                poke()

        self.cancel(key)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(seconds, again)

    def cancel(self, key: str) -> None:
        """Forget the key."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Forget all keys."""
        for key in list(self._timers):
            self.cancel(key)


TAKEOVER_GRACE_S = 1.0
"""An act that was begun when another daemon took over is on its way; a later one has no excuse."""


class Reach:
    """What one life can reach of the world; `epoch` is its tenure, once it has one."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.epoch = 0

    @property
    def reigns(self) -> bool:
        """Whether no later life has taken over: whoever decides does not know what a deposed one sees."""
        return self.epoch == self.world.epoch

    async def ask(self, node: str) -> Machine:
        """Connect to a node; raises NodeUnreachable or TimeoutError."""
        world = self.world
        machine = world.machines[node]
        await world.latency(0.3)
        if world.mischief.chance("ssh-slow", 0.02):
            await asyncio.sleep(40.0)
        if world.mischief.chance("ssh-timeout", 0.02):
            world.court.blemished[node] = world.loop.time()
            raise TimeoutError(f"{node}: no answer within 60 s")
        if not machine.up or world.mischief.chance("ssh-refused", 0.03):
            world.court.blemished[node] = world.loop.time()
            raise NodeUnreachable(f"{node}: tcp connect refused")
        return machine

    def mind_tenure(self, label: str) -> None:
        """Accuse this life if it begins to act although another has taken over."""
        world = self.world
        deposed = self.epoch < world.epoch and world.loop.time() > world.taken_over_at + TAKEOVER_GRACE_S
        if deposed and not world.over:
            world.court.accuse(f"{self.process.name} acts ({label}) although another daemon has taken over")

    async def effect(
        self, label: str, act: Callable[[], Any], *, refused: Callable[[], Any], on_its_way: bool = False
    ) -> Any:
        """Change something in the world; what is on its way was begun before, and minded then."""
        if not on_its_way:
            self.mind_tenure(label)
        return await self.world.effect(self.process, label, act, refused=refused)


class SimIsolator:
    """ports.Isolator: one bit per node and kind."""

    def __init__(self, reach: Reach, kind: str) -> None:
        self._reach = reach
        self._kind = kind

    async def look(self, ctx: StepContext) -> Look | Busy:
        """Say whether the bit is set."""
        machine = await self._reach.ask(ctx.host.name)
        likely = 0.5 if machine.stuck else 0.01
        if ctx.prior is None and self._reach.world.mischief.chance("look-busy", likely):
            return Busy(f"{machine.name} cannot be asked now")
        machine.looked = True
        bit = machine.bit(self._kind)
        prior = {"isolated": bit.is_set and not bit.kept} if ctx.prior is None else ctx.prior
        return Look(bit.is_set and not bit.gentle, prior, "set" if bit.is_set else "clear")

    async def do(self, ctx: StepContext) -> StepResult:
        """Set the bit; a node that is stuck keeps its work, and is Busy."""
        node, world = ctx.host.name, self._reach.world
        machine = world.machines[node]
        if not machine.up:
            return Unknown(f"{node}: tcp connect refused")

        def isolate() -> StepResult:
            if not ctx.gentle:
                world.court.drives_off(ctx.rollout, node, ctx.attempt)
            world.isolate(node, self._kind, ctx.rollout, gentle=ctx.gentle)
            return Busy(f"pods on {node} do not go") if machine.stuck and not ctx.gentle else Ok("set")

        result: StepResult = await self._reach.effect(
            f"do {self._kind} {ctx.key}", isolate, refused=lambda: self._refused(node)
        )
        return result

    async def undo(self, ctx: StepContext) -> StepResult:
        """Make the bit what it was."""
        node, world = ctx.host.name, self._reach.world
        if not world.machines[node].up:
            return Unknown(f"{node}: tcp connect refused")

        def restore() -> StepResult:
            world.restore(node, self._kind, ctx.rollout, ctx.prior, ctx.held)
            return Ok("as it was")

        result: StepResult = await self._reach.effect(
            f"undo {self._kind} {ctx.key}", restore, refused=lambda: self._refused(node)
        )
        return result

    def _refused(self, node: str) -> StepResult:
        if self._reach.world.chances.faults.random() < 0.7:
            return Unknown(f"{node}: the connection was refused")
        return Failed(f"the command on {node} ended with 1")


class SimCordon(SimIsolator):
    """An isolator that can say beforehand what it could do, and keeps a node out for whoever holds it."""

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach, KEPT_KIND)

    async def could(self, ctx: StepContext) -> Ok | Busy:
        """Say whether the node's work could go now."""
        machine = await self._reach.ask(ctx.host.name)
        stays = machine.stuck or self._reach.world.mischief.chance("could-not", 0.05)
        return Busy(f"pods on {machine.name} would not go") if stays else Ok("it could")

    async def let_go(self, host: Host) -> StepResult:
        """Put a kept node back in service."""
        world = self._reach.world

        def free() -> StepResult:
            world.let_go(host.name)
            return Ok("in service")

        result: StepResult = await self._reach.effect(
            f"let go {host.name}", free, refused=lambda: self._refused(host.name)
        )
        return result


class SimProbe:
    """ports.TrafficProbe: sees the clients' traffic on a node, unless it is blind."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def look(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Look once."""
        world, node = self._reach.world, ctx.host.name
        machine = await self._reach.ask(node)
        busy = None if machine.blind else machine.traffic
        if self._reach.reigns:
            world.court.looked(ctx.rollout, node, ctx.attempt, idle=busy is False)
        if busy is False:
            return Ok(f"{node} is idle")
        between = world.court.is_begun(ctx.rollout, node)
        world.marks.hit("fault:traffic-between" if between else "fault:traffic-before")
        if busy is None:
            world.marks.hit("fault:traffic-unknown")
            return Unknown(f"nobody can say whether {node} is busy")
        world.marks.hit("fault:traffic-busy")
        return Busy(f"{node} is busy")


class SimCheck:
    """ports.Check: the node answers, or what is asked of it is so."""

    def __init__(self, reach: Reach, *, deep: bool) -> None:
        self._reach = reach
        self._deep = deep

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Judge once; a node with its old boot id answers, and is red all the same."""
        try:
            machine = await self._reach.ask(ctx.host.name)
        except NodeUnreachable as error:
            return Failed(str(error))
        if machine.red:
            return Failed(f"{machine.name} still has its old boot id")
        wanted = ctx.params.get("equals")
        if self._deep and wanted is not None and machine.version != wanted:
            return Failed(f"it printed {machine.version!r}, not {wanted!r}")
        return Ok(f"{machine.name} is well")


class SimObserver:
    """ports.Observer: sees what is so, unless it is itself unwell."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Look at the hosts."""
        world = self._reach.world
        await world.latency(0.5)
        if world.mischief.chance("observer-fails", 0.05):
            raise RolloutdError("the observer has no route to anything")
        return [self._observe(world, host.name) for host in hosts]

    def _observe(self, world: World, node: str) -> Observation:
        machine = world.machines[node]
        sight = Sight.UP if machine.up else Sight.DOWN
        if world.mischief.chance("sight-lost", 0.02):
            sight = Sight.UNKNOWN
        if self._reach.reigns:
            world.court.tell("saw", node=node, up=sight is Sight.UP, foreign=machine.foreign)
        return Observation(node, sight, world.now(), f"seen {sight}", machine.foreign, machine.kept)


class SimInventory:
    """ports.Inventory: the nodes that are listed now."""

    source = "hosts"

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.groups = {"all": sorted(reach.world.machines)}

    async def refresh(self) -> Sequence[Found]:
        """Return the listed nodes."""
        world = self._reach.world
        await world.latency(1.0)
        if world.source_fails:
            raise SourceFailed("hosts: the file cannot be read")
        return [
            Found(machine.name, self.source, labels=machine.labels, connection={"ansible_host": machine.name})
            for machine in world.listed()
        ]


class SimRunner:
    """ports.Runner: claims, wrappers and handles as the real one has them, less the processes."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def start(self, request: RunRequest) -> str:
        """Start the run, or find it by its claim; without a claim it is begun under another handle."""
        world = self._reach.world
        for number in itertools.count(1):
            handle = request.run if number == 1 else f"{request.run}~{number}"
            run = world.runs.get(handle)
            if run is None:
                break
            if run.claimed_by == "wrapper":
                return handle
            run.claimed_by = "daemon"
        world.court.fallible.discard(handle)
        try:
            await self._reach.effect(
                f"start {handle}", lambda: world.spawn(handle, request), refused=self._no_room
            )
        except (TimeoutError, OSError):
            world.court.fallible.add(handle)
            raise
        until = asyncio.get_running_loop().time() + CLAIM_LIMIT_S
        while not world.runs[handle].claimed_by and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.1)
        return handle

    async def observe(self, handle: str) -> RunState:
        """Say where the run stands."""
        run = self._find(handle)
        if run.result is None and not run.wrapper:
            return RunState(Unknown(f"the run on {run.request.node} was lost"), run.percent)
        if isinstance(run.result, Ok):
            self._reach.world.court.ended_well(handle)
        return RunState(run.result, run.percent, "a task" if run.percent else "")

    async def wait(self, handle: str) -> RunState:
        """Return a moment later."""
        await asyncio.sleep(POLL_S * (0.5 + self._reach.world.chances.latency.random()))
        return await self.observe(handle)

    async def events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Nobody reads them here."""
        nothing: tuple[RunEvent, ...] = ()
        for event in nothing:
            yield event

    async def cancel(self, handle: str) -> None:
        """End every process of the run."""
        run = self._reach.world.runs.get(handle)
        if run is None:
            return

        world = self._reach.world
        await self._reach.effect(f"cancel {handle}", lambda: world.cancel(run), refused=lambda: None)

    async def clear(self, host: Host, *, keep: str | None, timeout_s: float) -> Ok | Failed:
        """End what older runs left on the node."""
        world = self._reach.world
        self._reach.mind_tenure(f"clear {host.name}")
        await self._reach.ask(host.name)

        def sweep() -> Ok | Failed:
            world.sweep(host.name, keep, "its processes were ended")
            return Ok("nothing is left")

        result: Ok | Failed = await self._reach.effect(
            f"clear {host.name}",
            sweep,
            refused=lambda: Failed(f"{host.name}: connection refused"),
            on_its_way=True,
        )
        return result

    def _find(self, handle: str) -> Run:
        try:
            return self._reach.world.runs[handle]
        except KeyError:
            raise NotFound(f"there is no run {handle}") from None

    def _no_room(self) -> None:
        raise OSError("no space left on device")
