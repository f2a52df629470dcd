"""Contracts of the ports, as pytest classes.

A backend is the adapter under test, with the means to change what it acts on
or inspects.  The in-memory fakes and the real adapters pass the same suites.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest

from machines.model.node import NodeHealth, Observation
from rolloutd import ports
from rolloutd.contracts.harness import STEP_TIMEOUT_S, scenario, step_context
from rolloutd.errors import AdapterFailed, NodeUnreachable, SourceFailed
from rolloutd.plugin import Capability, Registration

MANY_NODES = 200
"""More nodes than an observer may have connections at once."""

ORDER, NEWER_ORDER = "1.7 database 1800000000", "1.8 database 1800000001"

BackendT = TypeVar("BackendT")


class _Contract(Generic[BackendT]):
    def open_backend(self, directory: Path) -> AbstractAsyncContextManager[BackendT]:
        """Open the adapter under test, with an empty directory for its files."""
        raise NotImplementedError


class IsolatorBackend(Protocol):
    """An isolator that can say whether a node is isolated, its parameters, and a node."""

    isolator: ports.Isolator
    host: ports.Host
    params: Mapping[str, Any]
    clock: ports.Clock

    async def is_isolated(self) -> bool:
        """Return whether the node is out of service, without asking the isolator."""

    async def isolate_from_outside(self) -> None:
        """Take the node out of service as another person or program would."""


class IsolatorContract(_Contract[IsolatorBackend]):
    registration: Registration | None = None

    can_inspect = True
    """False for an isolator whose inspect() says None: it acts even if others isolated the node."""

    async def _inspected(self, backend: IsolatorBackend) -> ports.StepContext:
        """Return the context with the prior state, which the daemon records before it acts."""
        ctx = step_context(backend.host, backend.params, backend.clock)
        return replace(ctx, prior=(await self._status(backend, ctx)).prior)

    async def _status(self, backend: IsolatorBackend, ctx: ports.StepContext) -> ports.IsolationStatus:
        status = await backend.isolator.inspect(ctx)
        assert isinstance(status, ports.IsolationStatus)
        assert (status.is_isolated is not None) == self.can_inspect
        return status

    @scenario
    async def test_isolates_and_returns_to_service(self, backend: IsolatorBackend) -> None:
        ctx = await self._inspected(backend)
        assert not (await self._status(backend, ctx)).is_isolated
        assert isinstance(await backend.isolator.isolate(ctx), ports.Ok)
        assert await backend.is_isolated()
        assert (await self._status(backend, ctx)).is_isolated is not False
        assert isinstance(await backend.isolator.return_to_service(ctx), ports.Ok)
        assert not await backend.is_isolated()
        assert not (await self._status(backend, ctx)).is_isolated

    @scenario
    async def test_repeats_do_no_harm(self, backend: IsolatorBackend) -> None:
        ctx = await self._inspected(backend)
        for _ in range(2):
            assert isinstance(await backend.isolator.isolate(ctx), ports.Ok)
            assert await backend.is_isolated()
        for _ in range(2):
            assert isinstance(await backend.isolator.return_to_service(ctx), ports.Ok)
            assert not await backend.is_isolated()

    @scenario
    async def test_isolated_from_outside_stays_isolated(self, backend: IsolatorBackend) -> None:
        if not self.can_inspect:
            return
        await backend.isolate_from_outside()
        ctx = step_context(backend.host, backend.params, backend.clock)
        # One that answers Busy here has nothing to restore, and is asked for nothing more.
        if isinstance(await backend.isolator.inspect(ctx), ports.IsolationStatus):
            ctx = await self._inspected(backend)
            assert isinstance(await backend.isolator.isolate(ctx), ports.Ok | ports.Busy)
            assert isinstance(await backend.isolator.return_to_service(ctx), ports.Ok)
        assert await backend.is_isolated()

    @scenario
    async def test_inspect_after_crash_keeps_first_prior(self, backend: IsolatorBackend) -> None:
        ctx = await self._inspected(backend)
        await backend.isolator.isolate(ctx)
        status = await self._status(backend, ctx)
        assert status.is_isolated is not False
        assert status.prior == ctx.prior

    @scenario
    async def test_rollout_that_shares_isolation_ends_it(self, backend: IsolatorBackend) -> None:
        ctx = await self._inspected(backend)
        assert isinstance(await backend.isolator.isolate(ctx), ports.Ok)
        joined = replace(ctx, rollout="r2", idempotency_key=f"r2/{backend.host.name}/1/step")
        assert (await self._status(backend, joined)).is_isolated is not False
        assert isinstance(await backend.isolator.isolate(joined), ports.Ok)
        assert isinstance(await backend.isolator.return_to_service(joined), ports.Ok)
        assert not await backend.is_isolated()

    @scenario
    async def test_registration_matches_adapter(self, backend: IsolatorBackend) -> None:
        if self.registration is not None:
            capabilities = self.registration.capabilities
            assert (Capability.DRY_RUN in capabilities) == isinstance(backend.isolator, ports.SupportsDryRun)
            reports = isinstance(backend.isolator, ports.SupportsProgressReports)
            assert (Capability.PROGRESS_REPORTS in capabilities) == reports


class CheckBackend(Protocol):
    check: ports.Check
    host: ports.Host
    params: Mapping[str, Any]
    clock: ports.Clock

    async def break_node(self) -> None:
        """Change the node so that the check fails."""

    async def repair_node(self) -> None:
        """Undo `break_node`."""

    async def state(self) -> object:
        """Return what a check that changes the node would change, such as a file's time."""


class CheckContract(_Contract[CheckBackend]):
    async def _check(self, backend: CheckBackend) -> ports.Ok | ports.Failed | ports.Unknown:
        return await backend.check.check(step_context(backend.host, backend.params, backend.clock))

    @scenario
    async def test_healthy_node_passes_and_is_unchanged(self, backend: CheckBackend) -> None:
        before = await backend.state()
        for _ in range(2):
            assert isinstance(await self._check(backend), ports.Ok)
        assert await backend.state() == before

    @scenario
    async def test_failure_text_names_node(self, backend: CheckBackend) -> None:
        await backend.break_node()
        result = await self._check(backend)
        assert isinstance(result, ports.Failed)
        assert backend.host.name in result.text

    @scenario
    async def test_repaired_node_passes_again(self, backend: CheckBackend) -> None:
        await backend.break_node()
        await self._check(backend)
        await backend.repair_node()
        assert isinstance(await self._check(backend), ports.Ok)


class TrafficProbeBackend(Protocol):
    probe: ports.TrafficProbe
    host: ports.Host
    params: Mapping[str, Any]
    clock: ports.Clock

    async def start_traffic(self) -> None:
        """Let clients use the node."""

    async def stop_traffic(self) -> None:
        """Undo `start_traffic`."""

    async def hide_traffic(self) -> None:
        """Prevent the probe from finding out whether there is traffic."""


class TrafficProbeContract(_Contract[TrafficProbeBackend]):
    async def _probe(self, backend: TrafficProbeBackend) -> ports.Ok | ports.Busy | ports.Unknown:
        return await backend.probe.probe(step_context(backend.host, backend.params, backend.clock))

    @scenario
    async def test_idle_node_is_ok(self, backend: TrafficProbeBackend) -> None:
        assert isinstance(await self._probe(backend), ports.Ok)

    @scenario
    async def test_traffic_is_busy_until_it_ends(self, backend: TrafficProbeBackend) -> None:
        await backend.start_traffic()
        found = await self._probe(backend)
        assert isinstance(found, ports.Busy)
        assert f"{backend.host.name} is busy" in found.text
        await backend.stop_traffic()
        assert isinstance(await self._probe(backend), ports.Ok)

    @scenario
    async def test_repeated_probe_changes_nothing(self, backend: TrafficProbeBackend) -> None:
        await backend.start_traffic()
        assert await self._probe(backend) == await self._probe(backend)

    @scenario
    async def test_unseen_traffic_is_unknown_and_names_node(self, backend: TrafficProbeBackend) -> None:
        await backend.hide_traffic()
        found = await self._probe(backend)
        assert isinstance(found, ports.Unknown)
        assert backend.host.name in found.text


class ObserverBackend(Protocol):
    """An observer and three nodes: one up, one down, one that it cannot judge."""

    observer: ports.Observer
    clock: ports.Clock
    up: ports.Host
    down: ports.Host
    unclear: ports.Host


class ObserverContract(_Contract[ObserverBackend]):
    @scenario
    async def test_reports_health_and_cause_of_each_node(self, backend: ObserverBackend) -> None:
        hosts = [backend.down, backend.up, backend.unclear]
        seen = await backend.observer.observe(hosts)
        assert [o.node for o in seen] == [host.name for host in hosts]
        assert [o.sight for o in seen] == [NodeHealth.DOWN, NodeHealth.UP, NodeHealth.UNKNOWN]
        assert all(o.why for o in seen)
        assert not any(o.cordoned_by_other for o in seen)

    @scenario
    async def test_reports_time_of_observation(self, backend: ObserverBackend) -> None:
        before = backend.clock.now()
        (seen,) = await backend.observer.observe([backend.up])
        assert before <= seen.at <= backend.clock.now()

    @scenario
    async def test_no_nodes_give_no_observations(self, backend: ObserverBackend) -> None:
        assert list(await backend.observer.observe([])) == []

    @scenario
    async def test_many_nodes_are_all_answered(self, backend: ObserverBackend) -> None:
        hosts = [replace(backend.up, name=f"n{number}") for number in range(MANY_NODES)]
        seen = await backend.observer.observe(hosts)
        assert [o.node for o in seen] == [host.name for host in hosts]


class InventoryBackend(Protocol):
    """An inventory whose source holds the nodes `names`."""

    inventory: ports.Inventory
    names: set[str]

    async def break_source(self) -> None:
        """Make the source unreadable, or unreachable."""


class InventoryContract(_Contract[InventoryBackend]):
    @scenario
    async def test_returns_each_node_once_with_its_source(self, backend: InventoryBackend) -> None:
        nodes = await backend.inventory.refresh()
        assert sorted(node.name for node in nodes) == sorted(backend.names)
        assert {node.source for node in nodes} == {backend.inventory.source}
        texts = [text for node in nodes for label in node.labels.items() for text in label]
        assert all(isinstance(text, str) for text in texts)

    @scenario
    async def test_daemon_takes_every_node(self, backend: InventoryBackend) -> None:
        """docs/plugins.md names the variables that a source may give."""
        for node in await backend.inventory.refresh():
            if isinstance(backend.inventory, ports.GivesTemplates):
                ports.require_readable(node.connection)
            else:
                ports.require_typed(node.connection)
                ports.without_templates(node.connection)
            for key, text in node.labels.items():
                ports.require_plain_text(f"label {key!r}", f"{key}={text}")

    @scenario
    async def test_repeated_refresh_returns_the_same(self, backend: InventoryBackend) -> None:
        assert list(await backend.inventory.refresh()) == list(await backend.inventory.refresh())

    @scenario
    async def test_broken_source_raises_and_returns_no_part(self, backend: InventoryBackend) -> None:
        await backend.break_source()
        with pytest.raises(SourceFailed, match=r"."):
            await backend.inventory.refresh()


class WatchBackend(Protocol):
    """A watch whose source holds the nodes `names`."""

    watch: ports.Watch
    names: set[str]

    async def add_node(self) -> str:
        """Add a node to the source and return its name."""


class WatchContract(_Contract[WatchBackend]):
    @scenario
    async def test_reports_nodes_and_changes_until_cancelled(self, backend: WatchBackend) -> None:
        observed: dict[str, Observation] = {}
        event = asyncio.Event()
        changes = 0

        def on_observed(observations: Sequence[Observation]) -> None:
            observed.update({each.node: each for each in observations})
            event.set()

        def on_nodes_changed() -> None:
            nonlocal changes
            changes += 1
            event.set()

        async def wait_until(names: set[str], more_changes_than: int) -> None:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                while not names <= observed.keys() or changes <= more_changes_than:
                    await event.wait()
                    event.clear()

        task = asyncio.create_task(backend.watch.run(on_observed, on_nodes_changed))
        try:
            await wait_until(backend.names, -1)
            before = changes
            await wait_until({await backend.add_node()}, before)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert task.cancelled()


class NodeGuardBackend(Protocol):
    """A guard, its parameters without `after`, and a node that it guards."""

    guard: ports.NodeGuard
    host: ports.Host
    params: Mapping[str, Any]
    clock: ports.Clock

    async def change_node(self) -> None:
        """Change what the guard restores, as a playbook would."""

    async def state(self) -> object:
        """Return what the guard restores, as the node has it now."""

    async def cut_off(self) -> None:
        """Make the node unreachable until the backend is closed."""

    async def let_time_pass(self) -> None:
        """Let a moment of the node's time pass."""


class NodeGuardContract(_Contract[NodeGuardBackend]):
    after_s = 2
    """Shortest silence that the guard can count; one test waits for it."""

    def _context(
        self, backend: NodeGuardBackend, *, after_s: int = 600, attempt: int = 1
    ) -> ports.StepContext:
        params = {**backend.params, "after": after_s}
        return replace(step_context(backend.host, params, backend.clock), attempt=attempt)

    async def _arm_and_change(
        self, backend: NodeGuardBackend, ctx: ports.StepContext
    ) -> tuple[object, object]:
        """Change the node under an armed guard; return its states before and after the change."""
        before = await backend.state()
        assert (await backend.guard.arm(ctx, order=ORDER)).state is ports.GuardState.ARMED
        await backend.change_node()
        after = await backend.state()
        assert before != after
        return before, after

    @scenario
    async def test_silence_restores(self, backend: NodeGuardBackend) -> None:
        ctx = self._context(backend, after_s=self.after_s)
        before, _ = await self._arm_and_change(backend, ctx)
        async with asyncio.timeout(self.after_s + STEP_TIMEOUT_S):
            while (report := await backend.guard.inspect(ctx)).state is not ports.GuardState.RESTORED:
                await backend.let_time_pass()
        assert (report.by, report.problems) == ("timer", ())
        assert report.restored
        assert await backend.state() == before
        assert await backend.guard.disarm(ctx) == report

    @scenario
    async def test_disarmed_guard_keeps_change(self, backend: NodeGuardBackend) -> None:
        guard, ctx = backend.guard, self._context(backend)
        _, after = await self._arm_and_change(backend, ctx)
        for operation in (guard.disarm, guard.disarm, guard.restore):
            assert (await operation(ctx)).state is ports.GuardState.CONFIRMED
        assert await backend.state() == after

    @scenario
    async def test_restore_by_daemon_can_be_repeated(self, backend: NodeGuardBackend) -> None:
        ctx = self._context(backend)
        before, _ = await self._arm_and_change(backend, ctx)
        report = await backend.guard.restore(ctx)
        assert (report.state, report.by) == (ports.GuardState.RESTORED, "daemon")
        assert await backend.state() == before
        assert await backend.guard.restore(ctx) == report
        await backend.change_node()  # a run that continued without the daemon
        assert (await backend.guard.restore(ctx)).restored == report.restored
        assert await backend.state() == before

    @scenario
    async def test_second_arm_finds_first(self, backend: NodeGuardBackend) -> None:
        ctx = self._context(backend)
        before, _ = await self._arm_and_change(backend, ctx)
        assert (await backend.guard.arm(ctx, order=NEWER_ORDER)).state is ports.GuardState.ARMED
        assert (await backend.guard.renew(ctx)).state is ports.GuardState.ARMED
        await backend.guard.restore(ctx)
        assert await backend.state() == before
        assert (await backend.guard.arm(ctx, order=NEWER_ORDER)).state is ports.GuardState.RESTORED

    @scenario
    async def test_newer_guard_ends_older_one(self, backend: NodeGuardBackend) -> None:
        ctx, newer = self._context(backend), self._context(backend, attempt=2)
        before, after = await self._arm_and_change(backend, ctx)
        assert (await backend.guard.arm(newer, order=NEWER_ORDER)).state is ports.GuardState.ARMED
        assert await backend.state() == before
        await backend.change_node()
        with pytest.raises(AdapterFailed):
            await backend.guard.arm(ctx, order=ORDER)
        assert (await backend.guard.restore(ctx)).state is ports.GuardState.NONE
        assert await backend.state() == after

    @scenario
    async def test_node_without_guard_reports_none(self, backend: NodeGuardBackend) -> None:
        ctx = self._context(backend)
        for operation in self._questions(backend):
            assert (await operation(ctx)).state is ports.GuardState.NONE

    @scenario
    async def test_silent_node_is_unreachable(self, backend: NodeGuardBackend) -> None:
        ctx = self._context(backend)
        await backend.cut_off()
        for operation in self._questions(backend):
            with pytest.raises(NodeUnreachable):
                await operation(ctx)

    def _questions(
        self, backend: NodeGuardBackend
    ) -> Sequence[Callable[[ports.StepContext], Awaitable[ports.GuardReport]]]:
        guard = backend.guard
        return guard.renew, guard.disarm, guard.restore, guard.inspect
