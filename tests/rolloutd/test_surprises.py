"""An adapter that raises what nobody foresaw costs the one question that it was asked, never the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.decision import Rehearse
from machines.node import Observation, Sight
from machines.plan import StepSpec
from rolloutd.driving.gear import Gear
from rolloutd.driving.probing import look_for_traffic
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.notifying import TRIES, Notifying
from rolloutd.ports import Busy, Found, Host, Ok, StepContext, Unknown
from rolloutd.ports.border import answering_for
from rolloutd.watching.keeping import AGAIN_S, Kept
from rolloutd.watching.observing import Observing
from rolloutd.watching.refreshing import Refreshing
from rolloutd.watching.rehearsing import Rehearsing
from rolloutd.watching.seeing import ANEW_AFTER_S, keep_watching
from rolloutd.watching.soaking import Soaking
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.rolloutd.control_house import PLAN, House, house

UNFORESEEN = KeyError("status")


class Surprised(FakeIsolator):
    """Every port that is asked beside the loop; each answer is a surprise."""

    source = "ams"
    name = "chat"

    def __init__(self, surprise: Exception = UNFORESEEN) -> None:
        super().__init__()
        self._surprise = surprise

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        raise self._surprise

    async def let_go(self, host: Host) -> Ok | Busy:
        raise self._surprise

    async def refresh(self) -> Sequence[Found]:
        raise KeyError("metadata")

    async def could(self, ctx: StepContext) -> Ok | Busy:
        raise KeyError("spec")

    async def check(self, ctx: StepContext) -> Ok | Unknown:
        raise PermissionError(13, "Permission denied", "/etc/key")

    async def send(self, title: str, text: str) -> None:
        raise KeyError("channel")


def gear(inside: House, surprise: Exception = UNFORESEEN) -> Gear:
    async def tree(rollout: str) -> Path:
        return Path("/tree")

    surprised = Surprised(surprise)
    return Gear(FakeRunner(inside.world), {"kubernetes": surprised}, {"reachable": surprised}, tree)


@pytest.mark.parametrize("surprise", [KeyError("status"), TimeoutError(), OSError("no route to host")])
async def test_an_observer(tmp_path: Path, surprise: Exception) -> None:
    async with house(tmp_path) as inside:
        await Observing(inside.state, [Surprised(surprise)]).look(["p1"])
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert seen.sight is Sight.UNKNOWN


async def test_an_inventory(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        known = set(inside.state.index.nodes)

        await Refreshing(inside.state, [Surprised()]).refresh()
        assert set(inside.state.index.nodes) == known
        assert inside.state.sources["ams"].error == "inventory ams: unexpected KeyError: 'metadata'"


async def test_a_rehearsal(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start(
            text=PLAN.replace(
                'isolate: [{command: {do: "true", undo: "true"}}]', "isolate: [{kubernetes: {}}]"
            )
        )
        async with asyncio.TaskGroup() as tasks:
            Rehearsing(inside.state, gear(inside)).ask(tasks, [Rehearse(rollout, "p1")])
        index = inside.state.index
        told = index.prospects.fresh(index.target(rollout, "p1"), inside.state.now())
        assert told is not None
        assert told.can is None
        assert "unexpected KeyError" in told.why


@pytest.mark.parametrize("surprise", [KeyError("metadata"), TimeoutError()])
async def test_letting_go_a_kept_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, surprise: Exception
) -> None:
    async with house(tmp_path) as inside:
        kept = Observation("p1", Sight.DOWN, inside.state.now(), kept="kubernetes")
        inside.state.index.observed([kept], inside.state.now())
        async with asyncio.TaskGroup() as tasks:
            Kept(inside.state, gear(inside, surprise)).ask(tasks)
            while "could not be put back after its hold" not in caplog.text:
                await asyncio.sleep(0)
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
            inside.clock.advance(AGAIN_S)


async def test_a_check_of_a_canary_that_soaks(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        spec = inside.state.index.rollout(rollout).plan.verify[0]
        said = await Soaking(inside.state, gear(inside)).judge((rollout, "p1"), spec)
        assert isinstance(said, Unknown)
        assert said.text.startswith("check reachable: [Errno 13]")


async def test_a_channel_gives_up_after_its_tries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with house(tmp_path) as inside:
        notifying = Notifying(inside.state, [Surprised()])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(notifying.run())
            await asyncio.sleep(0)
            await inside.submit()
            while "given up" not in caplog.text:
                await asyncio.sleep(0)
                inside.clock.advance(60.0)
            running.cancel()
    assert caplog.text.count("try ") >= TRIES


class Broken:
    """A watch that sees one node up and then meets a surprise."""

    source = "ams"

    def __init__(self) -> None:
        self.begun = 0

    async def run(self, seen: Callable[[Sequence[Observation]], None], changed: Callable[[], None]) -> None:
        self.begun += 1
        seen([Observation("p1", Sight.UP, 0.0)])
        raise KeyError("metadata")


async def test_a_watch_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with house(tmp_path) as inside:
        watch = Broken()
        keeping = asyncio.create_task(keep_watching(inside.state, watch, lambda: None))
        while watch.begun < 3:
            await asyncio.sleep(0)
            if inside.clock.sleepers:
                inside.clock.advance(ANEW_AFTER_S)
        keeping.cancel()
        assert "the watch of ams broke and is begun anew: watch ams: unexpected KeyError" in caplog.text


class Strange(Surprised):
    """Every port again; each answer is of another shape than its port names."""

    async def observe(self, hosts: Sequence[Host]) -> Any:
        return ["p1"]

    async def let_go(self, host: Host) -> Any:
        return None

    async def refresh(self) -> Any:
        return ["p1"]

    async def could(self, ctx: StepContext) -> Any:
        return False

    async def check(self, ctx: StepContext) -> Any:
        return True

    async def look(self, ctx: StepContext) -> Any:
        return "idle"


async def test_an_answer_of_another_shape_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with house(tmp_path) as inside:
        rollout = await inside.start()
        state, strange = inside.state, Strange()
        adapters = gear(inside)
        adapters = replace(
            adapters,
            isolators={"command": strange},
            checks={"reachable": strange},
            probes={"kubernetes": strange},
        )
        await Observing(state, [strange]).look(["p1"])
        assert (seen := state.index.observation("p1")) is not None
        assert seen.sight is Sight.UNKNOWN

        spec = state.index.rollout(rollout).plan.verify[0]
        said = await Soaking(state, adapters).judge((rollout, "p1"), spec)
        assert said == Unknown("check reachable: answered with True, which is no answer")

        probe = StepSpec("traffic.0.kubernetes", "kubernetes")
        assert isinstance(await look_for_traffic(state, adapters, rollout, "p1", probe), Unknown)

        async with asyncio.TaskGroup() as tasks:
            Rehearsing(state, adapters).ask(tasks, [Rehearse(rollout, "p1")])
        told = state.index.prospects.fresh(state.index.target(rollout, "p1"), state.now())
        assert told is not None
        assert told.can is None

        known = set(state.index.nodes)

        await Refreshing(state, [strange]).refresh()
        assert set(state.index.nodes) == known
        assert "which is no answer" in state.sources["ams"].error


class Talkative(Surprised):
    """An observer that also tells of nodes which nobody asked for."""

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        return [Observation(name, Sight.UP, 2e9) for name in ("p1", "moon")]


async def test_an_observer_that_tells_of_a_node_nobody_knows(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        await Observing(inside.state, [Talkative()]).look(["p1"])
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert seen.sight is Sight.UP
        assert inside.state.index.observation("moon") is None


@pytest.mark.parametrize("kind", ["command", "haproxy"])
async def test_a_kept_node_whose_isolator_keeps_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with house(tmp_path) as inside:
        inside.state.index.observed([Observation("p1", Sight.DOWN, inside.state.now(), kept=kind)], 0.0)
        adapters = replace(gear(inside), isolators={"command": FakeIsolator()})
        async with asyncio.TaskGroup() as tasks:
            Kept(inside.state, adapters).ask(tasks)
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
            inside.clock.advance(AGAIN_S)
        assert "could not be put back after its hold" in caplog.text


def test_what_is_raised_on_purpose_passes() -> None:
    for purposeful in (NodeUnreachable("n1 does not answer"), TimeoutError("late"), asyncio.CancelledError()):
        with pytest.raises(type(purposeful)) as raised, answering_for("probe x"):
            raise purposeful
        assert raised.value is purposeful
    with (
        pytest.raises(AdapterFailed, match="x: unexpected ZeroDivisionError"),
        answering_for("probe x"),
    ):
        raise ZeroDivisionError("by zero")
