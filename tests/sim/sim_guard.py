"""The guards of simulated nodes: timers of the world, which need no daemon."""

from __future__ import annotations

from collections.abc import Callable

from rolloutd.errors import AdapterFailed
from rolloutd.ports import GuardReport, GuardState, StepContext
from tests.sim.fault_injection import FaultyAccess
from tests.sim.sim_node import SimGuard


class SimNodeGuard:
    """ports.NodeGuard: a guard keeps the version that a node has."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def arm(self, ctx: StepContext, *, order: str) -> GuardReport:
        """Arm a guard, or find the attempt's first one."""
        world, node = self._access.world, ctx.host.name
        after_s = float(ctx.params["after"])
        arm = lambda: world.arm_guard(node, ctx.rollout, ctx.attempt, after_s)  # noqa: E731
        return await self._change(f"arm {node}", ctx, arm)

    async def renew(self, ctx: StepContext) -> GuardReport:
        """Let the time of an armed guard begin again."""
        await self._access.connect(ctx.host.name)
        guard = self._find(ctx)
        if guard is not None and guard.state is GuardState.ARMED:
            guard.deadline = self._access.world.loop.time() + guard.after_s
        return self._report(ctx)

    async def disarm(self, ctx: StepContext) -> GuardReport:
        """Confirm the change, unless the timer came first."""
        end = lambda: self._access.world.end_guard(self._find(ctx), GuardState.CONFIRMED)  # noqa: E731
        return await self._change(f"disarm {ctx.host.name}", ctx, end)

    async def restore(self, ctx: StepContext) -> GuardReport:
        """Restore the node, unless its change is confirmed."""
        end = lambda: self._access.world.end_guard(self._find(ctx), GuardState.RESTORED, "daemon")  # noqa: E731
        return await self._change(f"restore {ctx.host.name}", ctx, end)

    async def inspect(self, ctx: StepContext) -> GuardReport:
        """Say what became of the guard."""
        await self._access.connect(ctx.host.name)
        return self._report(ctx)

    async def _change(self, label: str, ctx: StepContext, change: Callable[[], None]) -> GuardReport:
        self._access.check_leadership(label)  # before a slow login: what is on its way then may still land
        await self._access.connect(ctx.host.name)

        def refuse() -> GuardReport:
            raise AdapterFailed(f"{ctx.host.name}: the login cannot become root")

        def act() -> GuardReport:
            change()
            return self._report(ctx)

        report: GuardReport = await self._access.run_effect(
            label, act, on_refused=refuse, already_started=True
        )
        return report

    def _find(self, ctx: StepContext) -> SimGuard | None:
        return self._access.world.guards.get((ctx.rollout, ctx.host.name, ctx.attempt))

    def _report(self, ctx: StepContext) -> GuardReport:
        guard = self._find(ctx)
        if guard is None:
            return GuardReport(GuardState.NONE)
        restored = ("/etc/net",) if guard.state is GuardState.RESTORED else ()
        return GuardReport(guard.state, guard.by, restored)
