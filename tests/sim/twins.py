"""The daemon's ports over the world: what one life of the daemon can see and do there.

They are as fallible as the real adapters: slow, refused, answered too late.  A
twin belongs to one life and dies with it; the world goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machines.node import Observation, Sight
from rolloutd.errors import NodeUnreachable, RolloutdError, SourceFailed
from rolloutd.ports import (
    Busy,
    Failed,
    Found,
    Host,
    Look,
    Ok,
    StepContext,
    StepResult,
    Unknown,
)
from tests.sim.reach import Reach
from tests.sim.world import KEPT_KIND, World

TREE = Path("/tree")
"""Where the playbooks are said to be; nobody reads it."""


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
