"""What the daemon makes of a watch that confirms its reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from machines.model.events import NodesDiscovered, NodesRemoved
from machines.model.node import NodeHealth, Observation
from rolloutd.engine.background.node_observations import run_watch
from tests.rolloutd.control_environment import ControlEnvironment, control_environment


class ConfirmingWatch:
    """A watch that reports node p1 of its source once, and then confirms it when a test says so."""

    source = "ams"

    def __init__(self, inside: ControlEnvironment) -> None:
        self._clock = inside.clock
        self.confirm: Callable[[], bool]
        self.has_reported = asyncio.Event()

    def confirm_to(self, on_confirmed: Callable[[], bool]) -> None:
        self.confirm = on_confirmed

    async def run(
        self,
        on_observed: Callable[[Sequence[Observation]], None],
        on_nodes_changed: Callable[[], None],
        on_tried: Callable[[str], None] = lambda error: None,
    ) -> None:
        on_observed([Observation("p1", NodeHealth.UP, self._clock.now())])
        self.has_reported.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def watched(directory: Path) -> AsyncIterator[tuple[ControlEnvironment, ConfirmingWatch]]:
    async with control_environment(directory) as inside:
        watch = ConfirmingWatch(inside)
        watching = asyncio.create_task(run_watch(inside.state, watch, lambda: None))
        await watch.has_reported.wait()
        try:
            yield inside, watch
        finally:
            watching.cancel()


async def test_confirmation_renews_all_reports(tmp_path: Path) -> None:
    async with watched(tmp_path) as (inside, watch):
        inside.clock.advance(50.0)
        assert watch.confirm()
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert (seen.at, seen.watch) == (inside.clock.now(), "ams")


async def test_node_that_is_back_must_be_reported(tmp_path: Path) -> None:
    async with watched(tmp_path) as (inside, watch):
        node = inside.state.index.nodes["p1"]
        await inside.state.commit([NodesRemoved(("p1",))], cause="test")
        await inside.state.commit([NodesDiscovered((node,))], cause="test")
        assert not watch.confirm()
        assert watch.confirm()  # the watch has been asked to report all, so it has


async def test_other_name_of_a_node_must_be_reported(tmp_path: Path) -> None:
    async with watched(tmp_path) as (inside, watch):
        inside.state.canonical_names = {("ams", "p1"): "p2"}
        assert not watch.confirm()
