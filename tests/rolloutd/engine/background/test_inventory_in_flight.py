"""Nodes in flight that their inventory removes, renames, duplicates or moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import NodesRemoved, StepRecorded
from machines.model.node import ConflictKind
from machines.model.step_record import StepAction
from machines.rules.node_claims import quarantine_blocker
from machines.states import Outcome, Phase, Trigger
from rolloutd.engine.background.inventory_refresh import REMOVED_KEPT_S, InventoryRefresher
from rolloutd.engine.state import InvariantViolation
from rolloutd.errors import Refused, StoreFailed
from rolloutd.texts.reason_text import describe, lifted_by
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.engine.background.test_inventory_trust import (
    ADAM,
    ALL,
    Source,
    admitted,
    forget_as_a_restart_does,
)

WITHOUT_P1 = {name: labels for name, labels in ALL.items() if name != "p1"}


@asynccontextmanager
async def removed_in_flight(
    tmp_path: Path,
) -> AsyncIterator[tuple[ControlEnvironment, InventoryRefresher, Source, str]]:
    """Let a source cease to report p1 while its playbook runs."""
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL), {"p1": {"ansible_host": "10.0.0.1"}})
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        hosts.nodes = dict(WITHOUT_P1)
        await refresher.refresh()
        yield inside, refresher, hosts, rollout


async def end_attempt(inside: ControlEnvironment, rollout: str) -> None:
    await inside.run_playbook(rollout, "p1")
    await inside.transition(rollout, "p1", Trigger.MAINTAINED)
    undone = inside.step(rollout, "p1", "isolate.0.command", StepAction.REVERT)
    await inside.commit(StepRecorded(undone, isolated=False))
    await inside.transition(rollout, "p1", Trigger.VERIFIED, outcome=Outcome.CHANGED)


async def test_node_removed_in_flight_finishes_in_quarantine(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, refresher, hosts, rollout):
        assert inside.phase(rollout, "p1") is Phase.MAINTAINING
        assert "p2" not in admitted(inside), "its slot is taken"
        assert inside.state.host("p1").address == "10.0.0.1"
        await end_attempt(inside, rollout)
        await refresher.refresh()
        assert inside.state.index.target(rollout, "p1").outcome is Outcome.CHANGED
        (conflict,) = inside.state.index.nodes["p1"].conflicts
        assert (conflict.kind, conflict.values) == (ConflictKind.REMOVED_IN_FLIGHT, {"hosts": ""})
        assert inside.state.index.nodes["p1"].quarantined
        again = await inside.submit(again=True)
        why = quarantine_blocker(inside.state.index, inside.state.index.target(again, "p1"))
        assert why is not None
        assert "hosts reports it no longer, since it was in flight" in describe(why)
        assert "inventory pin p1" in lifted_by(why)
        hosts.nodes = dict(ALL)
        await refresher.refresh()
        assert not inside.state.index.nodes["p1"].conflicts


async def test_removal_of_node_in_flight_is_accepted_later(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, refresher, _, rollout):
        with pytest.raises(Refused, match="still in flight"):
            await refresher.pin_identity("p1", ADAM, "scrapped")
        await inside.fail(rollout, "p1")
        await refresher.pin_identity("p1", ADAM, "scrapped")
        target = inside.state.index.target(rollout, "p1")
        assert ("p1" in inside.state.index.nodes, target.outcome) == (False, Outcome.LEFT)


async def test_removal_whose_acceptance_is_not_written_waits(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, refresher, _, rollout):
        await inside.fail(rollout, "p1")
        commit = inside.state.store.commit

        async def fail(*_: Any, **__: Any) -> Any:
            raise StoreFailed("no space is left")

        inside.state.store.commit = fail  # type: ignore[method-assign]
        with pytest.raises(StoreFailed):
            await refresher.pin_identity("p1", ADAM, "scrapped")
        inside.state.store.commit = commit  # type: ignore[method-assign]
        await refresher.refresh()
        assert "p1" in inside.state.index.nodes


async def test_node_removed_in_flight_leaves_after_day(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, refresher, hosts, rollout):
        inside.clock.advance(REMOVED_KEPT_S)
        await refresher.refresh()
        assert "p1" in inside.state.index.nodes, "it is in flight"
        await end_attempt(inside, rollout)
        forget_as_a_restart_does(inside.state)
        await InventoryRefresher(inside.state, [hosts]).refresh()
        assert "p1" not in inside.state.index.nodes


async def test_node_of_removed_source_finishes_its_attempt(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, _, _, rollout):
        forget_as_a_restart_does(inside.state)
        await InventoryRefresher(inside.state, [Source("other", {"s1": ALL["s1"]})]).refresh()
        assert inside.phase(rollout, "p1") is Phase.MAINTAINING


async def test_removal_of_node_in_flight_is_violation(tmp_path: Path) -> None:
    async with removed_in_flight(tmp_path) as (inside, _, _, _):
        with pytest.raises(InvariantViolation, match="p1 cannot be removed: it is maintaining"):
            await inside.commit(NodesRemoved(("p1",)))


async def test_node_in_flight_moves_at_the_end_of_its_attempt(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", dict(ALL))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        moved = {"team": "payments", "rack": "r9"}
        hosts.nodes = ALL | {"p1": moved, "p2": moved, "a0": {"team": "search", "rack": "r3"}}
        for _ in range(2):
            await refresher.refresh()
            nodes = inside.state.index.nodes
            assert inside.state.sources["hosts"].held is None
            assert (nodes["p1"].labels["rack"], nodes["p2"].labels["rack"]) == ("r1", "r9")
            assert "a0" in nodes, "its own part alone is deferred"
            (warning,) = nodes["p1"].conflicts
            assert (warning.kind, warning.is_warning) == (ConflictKind.MOVE_DEFERRED, True)
            assert (warning.about, warning.values) == ("rack", {"now": "r1", "then": "r9"})
        written = len(await inside.state.store.read_audit(event="NodesDiscovered"))
        await refresher.refresh()
        assert len(await inside.state.store.read_audit(event="NodesDiscovered")) == written
        await refresher.apply_due_moves()
        assert inside.state.index.nodes["p1"].labels["rack"] == "r1"
        await end_attempt(inside, rollout)
        await refresher.apply_due_moves()
        assert inside.state.index.nodes["p1"].labels["rack"] == "r9"
        assert not inside.state.index.nodes["p1"].conflicts


async def test_node_in_flight_stays_in_pool_of_plan(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        nodes = {name: {**labels, "zone": "z1"} for name, labels in ALL.items()}
        hosts = Source("hosts", nodes)
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        rollout = await inside.start(text=PLAN.replace("spec:\n", "spec:\n  pools: {by: [zone]}\n"))
        await inside.isolate(rollout, "p1")
        hosts.nodes = nodes | {"p1": {**nodes["p1"], "zone": "z2"}}
        await refresher.refresh()
        assert inside.state.index.nodes["p1"].labels["zone"] == "z1"
        assert not admitted(inside), "its slot of zone z1 is taken"
        await end_attempt(inside, rollout)
        await refresher.apply_due_moves()
        assert inside.state.index.nodes["p1"].labels["zone"] == "z2"
