"""Simulated adapters: the daemon's ports over the simulated world.

They fail like real adapters: slow, refused, late.  They end with their daemon
process; the world continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machines.model.node import NodeHealth, Observation
from rolloutd.configuration.target_values import OBJECT_KEY
from rolloutd.errors import NodeUnreachable, RolloutdError, SourceFailed
from rolloutd.ports import (
    STATUS,
    Busy,
    DiscoveredNode,
    Failed,
    Host,
    IsolationStatus,
    Ok,
    StepContext,
    StepResult,
    Unknown,
)
from rolloutd.settings import Settings
from tests.sim import hostile_values
from tests.sim.fault_injection import FaultyAccess
from tests.sim.hostile_values import judge_command
from tests.sim.sim_node import SimNode
from tests.sim.world import HOLD_AWARE_KIND, SimWorld

PLAYBOOK_TREE = Path("/tree")
"""Where the playbooks are said to be; nobody reads it."""


class SimIsolator:
    """ports.Isolator: one bit per node and kind."""

    def __init__(self, access: FaultyAccess, kind: str) -> None:
        self._access = access
        self._kind = kind

    async def inspect(self, ctx: StepContext) -> IsolationStatus | Busy:
        """Say whether the bit is set."""
        machine = await self._access.connect(ctx.host.name)
        likely = 0.5 if machine.stuck else 0.01
        if ctx.prior is None and self._access.world.fault_plan.chance("inspect-busy", likely):
            return Busy(f"{machine.name} cannot be asked now")
        machine.is_inspected = True
        bit = machine.isolation_flag(self._kind)
        prior = {"isolated": bit.is_set and not bit.left_for_hold} if ctx.prior is None else ctx.prior
        return IsolationStatus(bit.is_set and not bit.cordon_only, prior, "set" if bit.is_set else "clear")

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Set the bit; a node that is stuck keeps its work, and is Busy."""
        node, world = ctx.host.name, self._access.world
        machine = world.machines[node]
        if not machine.up:
            return Unknown(f"{node}: tcp connect refused")
        self._judge(ctx, "do")

        def isolate() -> StepResult:
            if not ctx.cordon_only:
                world.checker.on_drain(ctx.rollout, node, ctx.attempt)
            world.isolate(node, self._kind, ctx.rollout, cordon_only=ctx.cordon_only)
            return Busy(f"pods on {node} do not go") if machine.stuck and not ctx.cordon_only else Ok("set")

        result: StepResult = await self._access.run_effect(
            f"do {self._kind} {ctx.idempotency_key}", isolate, on_refused=lambda: self._refused(node)
        )
        return result

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Make the bit what it was."""
        node, world = ctx.host.name, self._access.world
        if not world.machines[node].up:
            return Unknown(f"{node}: tcp connect refused")
        self._judge(ctx, "undo")

        def restore() -> StepResult:
            world.restore(node, self._kind, ctx.rollout, ctx.prior, ctx.hold_reason)
            return Ok("as it was")

        result: StepResult = await self._access.run_effect(
            f"undo {self._kind} {ctx.idempotency_key}", restore, on_refused=lambda: self._refused(node)
        )
        return result

    def _judge(self, ctx: StepContext, key: str) -> None:
        if self._kind == "command":
            judge_command(self._access.world, str(ctx.params[key]))

    def _refused(self, node: str) -> StepResult:
        if self._access.world.streams.faults.random() < 0.7:
            return Unknown(f"{node}: the connection was refused")
        return Failed(f"the command on {node} ended with 1")


class SimCordon(SimIsolator):
    """An isolator that can say beforehand what it could do, and keeps a node out for whoever holds it."""

    def __init__(self, access: FaultyAccess) -> None:
        super().__init__(access, HOLD_AWARE_KIND)

    async def dry_run(self, ctx: StepContext) -> Ok | Busy:
        """Say whether the node's work could go now."""
        machine = await self._access.connect(ctx.host.name)
        world = self._access.world
        is_stuck = machine.stuck or world.fault_plan.chance("dry-run-fails", 0.05)
        is_permanent = world.job_faults is not None and await world.job_faults.block_isolation(machine)
        if is_stuck or is_permanent:
            return Busy(f"pods on {machine.name} would not go", is_permanent=is_permanent)
        return Ok("it could")

    async def release(self, host: Host) -> StepResult:
        """Put a kept node back in service."""
        world = self._access.world

        def free() -> StepResult:
            world.return_left_node(host.name)
            return Ok("in service")

        result: StepResult = await self._access.run_effect(
            f"let go {host.name}", free, on_refused=lambda: self._refused(host.name)
        )
        return result


class SimProbe:
    """ports.TrafficProbe: sees the clients' traffic on a node, unless it is blind."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Look once."""
        world, node = self._access.world, ctx.host.name
        machine = await self._access.connect(node)
        busy = None if machine.traffic_unknown else machine.traffic
        if self._access.is_current_leader:
            world.checker.on_probe_result(ctx.rollout, node, ctx.attempt, idle=busy is False)
        if busy is False:
            return Ok(f"{node} is idle")
        is_after_admission = world.checker.is_in_progress(ctx.rollout, node)
        world.coverage.count("fault:traffic-between" if is_after_admission else "fault:traffic-before")
        if busy is None:
            world.coverage.count("fault:traffic-unknown")
            return Unknown(f"{node}: traffic is unknown")
        world.coverage.count("fault:traffic-busy")
        return Busy(f"{node} is busy")


class SimCheck:
    """ports.Check: the node answers, or what is asked of it is so."""

    def __init__(self, access: FaultyAccess, *, runs_command: bool) -> None:
        self._access = access
        self._runs_command = runs_command

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Judge once; a node with its old boot id answers, and is red all the same."""
        faults = self._access.world.job_faults
        if faults is not None and ctx.step.startswith("soak."):
            await faults.during_soak_check(ctx.rollout)
        try:
            machine = await self._access.connect(ctx.host.name)
        except NodeUnreachable as error:
            return Failed(str(error))
        if machine.fails_checks:
            return Failed(f"{machine.name} still has its old boot id")
        if not machine.available:
            return Failed(f"{machine.name}: Available is False")
        wanted = ctx.params.get("equals")
        if self._runs_command and wanted is not None and machine.version != wanted:
            return Failed(f"it printed {machine.version!r}, not {wanted!r}")
        return Ok(f"{machine.name} is well")


class SimObserver:
    """ports.Observer: sees what is so, unless it is itself unwell."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Look at the hosts."""
        world = self._access.world
        await world.latency(0.5)
        if world.fault_plan.chance("observer-fails", 0.05):
            raise RolloutdError("the observer has no route to anything")
        return [self._observe(world, host.name) for host in hosts]

    def _observe(self, world: SimWorld, node: str) -> Observation:
        machine = world.machines[node]
        sight = NodeHealth.UP if machine.up and machine.available else NodeHealth.DOWN
        if world.fault_plan.chance("observation-lost", 0.02):
            sight = NodeHealth.UNKNOWN
        if self._access.is_current_leader:
            world.checker.feed_oracle(
                "saw",
                node=node,
                up=sight is NodeHealth.UP,
                down=sight is NodeHealth.DOWN,
                foreign=machine.cordoned_by_other,
            )
        return Observation(
            node,
            sight,
            world.now(),
            f"seen {sight}",
            machine.cordoned_by_other,
            machine.left_isolated_by,
            is_locked=machine.paused,
        )


class SimInventory:
    """ports.Inventory: the nodes that are listed now."""

    def __init__(self, access: FaultyAccess, settings: Settings) -> None:
        self._access = access
        names = (f"{each.kind}/{each.params['name']}" for each in settings.inventory)
        self.source = next(names, "hosts")
        self.groups = {"all": sorted(access.world.machines)}
        self._last_names: set[str] = set()

    async def refresh(self) -> Sequence[DiscoveredNode]:
        """Return the listed nodes."""
        world = self._access.world
        await world.latency(1.0)
        if world.source_fails:
            raise SourceFailed(f"{self.source}: the file cannot be read")
        if self._access.is_current_leader:
            world.checker.feed_oracle("answered")
        for machine in world.machines.values():
            # One that the daemon may not have as a node, as after it vanished, is a new node by another name.
            machine.listed_as = machine.listed_as if machine.name in self._last_names else ""
        if self._access.is_current_leader:
            world.checker.clusters.on_answer(world.listed())
        clear = (each for each in world.listed() if each.has_address and not each.has_twin)
        self._last_names = {machine.name for machine in clear}
        twins = [self._object(machine, "twin") for machine in world.listed() if machine.has_twin]
        return [*(self._object(machine, "machine") for machine in world.listed()), *twins]

    def _object(self, machine: SimNode, sort: str) -> DiscoveredNode:
        """Return what the inventory has of a machine, or of another object with its name."""
        return DiscoveredNode(
            machine.listed_as or machine.name,
            self.source,
            machine.kind,
            labels={**machine.labels, **hostile_values.LABELS},
            connection={
                **hostile_values.VARIABLES,
                "ansible_host": machine.name if machine.has_address else "no address",
                STATUS: machine.status,
                OBJECT_KEY: {"spec": {"endpoint": machine.endpoint}},
            },
            id=f"{sort}/{machine.name}",
        )
