"""The in-memory fake of the NodeGuard: nodes whose files are a dictionary, and timers of virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import Clock, GuardReport, GuardState, StepContext


@dataclass
class FakeGuard:
    """One guard on one node."""

    backup: dict[str, str | None]
    after_s: float
    deadline: float
    state: GuardState = GuardState.ARMED
    by: str = ""
    restored: tuple[str, ...] = ()


@dataclass
class FakeGuardedNode:
    """A node; `files` are its contents by path, `newest` the order of its newest guard."""

    files: dict[str, str] = field(default_factory=dict)
    guards: dict[str, FakeGuard] = field(default_factory=dict)
    newest: tuple[int, int] = (0, 0)


class FakeNodeGuard:
    """ports.NodeGuard; `down` are nodes that do not answer, `refusing` those that cannot arm."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.nodes: dict[str, FakeGuardedNode] = {}
        self.down: set[str] = set()
        self.refusing: set[str] = set()
        self.outcomes: list[GuardState] = []

    def node(self, name: str) -> FakeGuardedNode:
        """Return a node, after what its timers have done by now."""
        node = self.nodes.setdefault(name, FakeGuardedNode())
        for guard in node.guards.values():
            if guard.state is GuardState.ARMED and guard.deadline <= self._clock.now():
                self._restore(node, guard, "timer")
        return node

    async def arm(self, ctx: StepContext, *, order: str) -> GuardReport:
        node, token = self._find(ctx)
        if ctx.host.name in self.refusing:
            raise AdapterFailed(f"{ctx.host.name}: the login cannot become root")
        if token not in node.guards:
            epoch, _, number = order.split()[0].partition(".")
            if (int(epoch), int(number)) <= node.newest:
                raise AdapterFailed(f"{ctx.host.name}: a newer guard was armed")
            for other in node.guards.values():
                if other.state is GuardState.ARMED:
                    self._restore(node, other, "daemon")
            backup = {path: node.files.get(path) for path in ctx.params["paths"]}
            after_s = float(ctx.params["after"])
            node.guards = {token: FakeGuard(backup, after_s, self._clock.now() + after_s)}
            node.newest = int(epoch), int(number)
        return await self.renew(ctx)

    async def renew(self, ctx: StepContext) -> GuardReport:
        node, token = self._find(ctx)
        guard = node.guards.get(token)
        if guard is not None and guard.state is GuardState.ARMED:
            guard.deadline = self._clock.now() + guard.after_s
        return await self.inspect(ctx)

    async def disarm(self, ctx: StepContext) -> GuardReport:
        node, token = self._find(ctx)
        guard = node.guards.get(token)
        if guard is not None and guard.state is GuardState.ARMED:
            guard.state = GuardState.CONFIRMED
            self.outcomes.append(guard.state)
        return await self.inspect(ctx)

    async def restore(self, ctx: StepContext) -> GuardReport:
        node, token = self._find(ctx)
        guard = node.guards.get(token)
        if guard is not None and guard.state in (GuardState.ARMED, GuardState.RESTORED):
            self._restore(node, guard, guard.by or "daemon")
        return await self.inspect(ctx)

    async def inspect(self, ctx: StepContext) -> GuardReport:
        node, token = self._find(ctx)
        guard = node.guards.get(token)
        if guard is None:
            return GuardReport(GuardState.NONE)
        return GuardReport(guard.state, guard.by, guard.restored)

    def _find(self, ctx: StepContext) -> tuple[FakeGuardedNode, str]:
        if ctx.host.name in self.down:
            raise NodeUnreachable(f"{ctx.host.name}: tcp connect refused")
        return self.node(ctx.host.name), f"{ctx.rollout}.{ctx.attempt}"

    def _restore(self, node: FakeGuardedNode, guard: FakeGuard, by: str) -> None:
        changed = [path for path, text in guard.backup.items() if node.files.get(path) != text]
        for path in changed:
            text = guard.backup[path]
            if text is None:
                del node.files[path]
            else:
                node.files[path] = text
        if guard.state is GuardState.ARMED:
            self.outcomes.append(GuardState.RESTORED)
        guard.state, guard.by = GuardState.RESTORED, by
        guard.restored = tuple(sorted({*guard.restored, *changed}))
