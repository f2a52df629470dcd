"""One simulation, from its seed to its verdict.

First comes trouble: the daemon walks its rollouts while nodes, networks, disks,
people and the power do what the seed says.  Then peace: nothing goes wrong any
more, somebody tidies up, and within a bound every rollout must have ended with
nothing left isolated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines.states import BUSY
from rolloutd.chain import verify
from rolloutd.errors import AlreadyRunning, NotFound, StoreFailed
from rolloutd.settings import Settings
from rolloutd.state import State
from rolloutd.store import database
from tests.sim import advice, plans
from tests.sim.caretaker import Caretaker
from tests.sim.faults import Mischief, Seeded
from tests.sim.life import Life
from tests.sim.loop import CURRENT, SimLoop
from tests.sim.meddler import Meddler
from tests.sim.people import SAM, People
from tests.sim.seeds import Chances, Marks
from tests.sim.trouble import Trouble
from tests.sim.workplace import Ear, heard, workplace
from tests.sim.world import Machine, World

RESTART_S = 5.0
"""When the service manager starts a daemon again that has ended."""

PEACE_S = 4 * 86_400.0
"""Within so much virtual time of peace everything must have come to its end: a few windows' worth."""

TIDY_EVERY_S = 120.0
"""How often somebody tidies up, in virtual time."""

CLIENT_EVERY_S = 20.0
"""How often traffic comes to some node: often enough that it comes between a look and an isolation."""

MAX_STEPS = 400_000
"""Steps after which a simulation is not getting anywhere; a long one takes some 60,000."""


@dataclass(slots=True)
class Verdict:
    """What one simulation showed: sentences of what should never have happened, none if all is well."""

    name: str
    accusations: list[str]
    marks: Marks
    trace: list[str]
    steps: int = 0
    effects: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Scene:
    """What a simulation begins with."""

    machines: list[Machine]
    settings: Settings
    specs: list[dict[str, Any]]
    trouble_s: float
    pace_s: float = 0.0
    care: float = 0.0
    storm: float = 0.0
    looked: bool = False


class Simulation:
    """A world, its people and the lives of a daemon in it."""

    def __init__(
        self,
        name: str,
        chances: Chances,
        mischief: Callable[[Marks], Mischief],
        scene: Scene,
        state_dir: Path,
    ) -> None:
        self.marks = Marks()
        self.loop = SimLoop(chances.schedule)  # type: ignore[abstract]  # what it lacks must raise
        self._mischief = mischief(self.marks)
        self.world = World(self.loop, chances, self._mischief, self.marks)
        self.name = name
        self._scene = scene
        self.state_dir = state_dir
        self.settings = scene.settings
        self._lives: list[Life] = []
        self._people = People(self.world, self.newest)
        self._caretaker = Caretaker(self._people)
        self.crash_in = -1
        self.peace = False
        self._contents: dict[str, dict[str, Any]] = {}
        self.restart_at = 0.0
        for machine in scene.machines:
            self.world.machines[machine.name] = machine
        court = self.world.court
        court.machines = self.world.machines
        court.settings(scene.settings)

    # -- the whole of it

    def run(self) -> Verdict:
        """Run it to its end, or to the first accusation, and return what it showed."""
        accusations = self.world.court.accusations
        with self.loop.entered(), heard(Ear(self._logged)):
            script = self.loop.create_task(self._script())
            while not script.done() and not accusations and self.loop.steps < MAX_STEPS:
                self._on_step()
                if not self.loop.step():
                    break
        court = self.world.court
        if not script.done() and not accusations:
            court.accuse(
                "it never came to its end" if self.loop.steps >= MAX_STEPS else "nothing stirs any more"
            )
        elif script.done() and script.exception() is not None:
            court.accuse(f"the simulation itself failed: {script.exception()!r}")
        for failure in self.loop.failures:
            if "never retrieved" not in failure.get("message", ""):
                court.accuse(f"a callback failed: {failure}")
        effects = getattr(self._mischief, "labels", [])
        verdict = Verdict(
            self.name, list(court.accusations), self.marks, self.world.trace, self.loop.steps, effects
        )
        self.world.over = True
        with heard(Ear(lambda text: None)):
            self.loop.bury()
        for life in self._lives:
            life.release()
        return verdict

    def _logged(self, text: str) -> None:
        """Accuse the daemon that logs this; one that was deposed and has not noticed knows old facts."""
        logging_life = next((life for life in self._lives if life.process is CURRENT.get()), None)
        if logging_life is None or logging_life.epoch == self.world.epoch:
            self.world.court.accuse(text)

    def _on_step(self) -> None:
        if self.crash_in > 0:
            self.crash_in -= 1
        elif self.crash_in == 0:
            self.crash_in = -1
            life = self.newest()
            if life is not None:
                self.world.note(f"crash {life.process.name}")
                self.marks.hit("fault:crash")
                life.process.alive = False

    async def _script(self) -> None:
        nanny = self.loop.create_task(self._keep_alive())
        await self._submit()
        meddler = None
        if self._scene.pace_s:
            people = self.world.chances.people
            meddler = self.loop.create_task(Meddler(self._people).meddle(people, self._scene.pace_s))
        if any("traffic" in spec for spec in self._scene.specs) and self._scene.pace_s:
            self.loop.create_task(self._come_and_go())
        trouble = self.loop.create_task(self._trouble())
        tidier = self.loop.create_task(self._tidy())
        await trouble
        if meddler is not None:
            meddler.cancel()
        self.peace, self.crash_in = True, -1
        self.world.note("peace")
        self.world.make_peace()
        for life in self._lives:
            if life.epoch < self.world.epoch:
                life.process.alive = False  # whoever started two ends one of them
        bound = self.loop.time() + PEACE_S
        while self._unfinished() and self.loop.time() < bound:
            await asyncio.sleep(30.0)
        for text in self._unfinished():
            self.world.court.accuse(f"after {PEACE_S / 86_400:.0f} days of peace: {text}")
        tidier.cancel()
        nanny.cancel()
        await self._look_back()

    # -- lives

    def newest(self) -> Life | None:
        """Return the daemon that answers people now."""
        return next((life for life in reversed(self._lives) if life.alive), None)

    def begin_life(self) -> None:
        """Start the daemon."""
        number = len(self._lives) + 1
        self._lives.append(Life(self.world, number, self.state_dir, self.settings))

    async def _keep_alive(self) -> None:
        """Be the service manager: start the daemon whenever there is none."""
        while True:
            for life in self._lives:
                self._bury(life)
            if self.newest() is None and self.loop.time() >= self.restart_at:
                self.begin_life()
            await asyncio.sleep(RESTART_S)

    def _bury(self, life: Life) -> None:
        """Take note of how a life ended."""
        if life.alive or life.ended is not None:
            return
        life.ended = StoreFailed("cut off")
        if life.task.done() and not life.task.cancelled():
            error = life.task.exception()
            life.ended = error or life.ended
            for each in _leaves(error):
                if not isinstance(each, StoreFailed | AlreadyRunning):
                    self.world.court.accuse(f"{life.process.name} died of {each!r}")
            self.marks.hit("fault:life-ended-itself")
            life.process.alive = False
        life.release()

    # -- trouble

    async def _submit(self) -> None:
        for number, spec in enumerate(self._scene.specs, 1):
            name = f"R{number}"
            self._contents[name] = plans.content_of(f"plan{number}", spec)
            self.world.isolators[name] = tuple(kind for step in spec["isolate"] for kind in step)
            while not await self._submitted(name):
                await asyncio.sleep(10.0)

    async def _submitted(self, name: str) -> bool:
        life = self.newest()
        if life is None or life.state is None or not life.state.refreshed.is_set():
            return False
        if name in life.state.index.rollouts:
            return True
        if not life.state.index.nodes:
            return False
        plan = life.compile(self._contents[name])
        self.world.court.plans[name] = plan

        def submit(state: State) -> tuple[Any, ...]:
            return (
                plans.opening(
                    name,
                    self._contents[name],
                    plan,
                    state.index,
                    SAM.actor,
                    state.now(),
                    looked=self._scene.looked,
                ),
            )

        return await self._people.ask(SAM, "submit", submit)

    async def _trouble(self) -> None:
        """Let things happen until the time of trouble is over, or where nothing happens until all is done."""
        until = self.loop.time() + self._scene.trouble_s
        if self._scene.pace_s:
            await Trouble(self).happen(until, self._scene.storm)
        while self.loop.time() < until and self._unfinished():
            await asyncio.sleep(30.0)

    async def _come_and_go(self) -> None:
        """Be the clients: their traffic comes to nodes that are in service, and ends again."""
        traffic = self.world.chances.traffic
        while not self.peace:
            await asyncio.sleep(traffic.expovariate(1.0 / CLIENT_EVERY_S))
            machine = traffic.choice(list(self.world.machines.values()))
            blind, length_s = traffic.random() < 0.2, traffic.choice((5.0, 60.0, 600.0))
            if self.peace or (machine.ours and not blind):
                continue
            name = "blind" if blind else "traffic"
            setattr(machine, name, True)
            self.loop.apart(length_s, lambda m=machine, n=name: setattr(m, n, False))  # type: ignore[misc]

    # -- peace

    async def _tidy(self) -> None:
        """Tidy up: at once where nobody else asks for anything, else once there is peace."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S if self._scene.pace_s else 20.0)
            self._heed()
            if self.peace or not self._scene.pace_s:
                for machine in self.world.machines.values():
                    self.world.uncordon(machine)
                await self._caretaker.tidy()
            elif self.world.chances.people.random() < self._scene.care:
                await self._caretaker.care()

    def _heed(self) -> None:
        """Try what people are told to do."""
        life = self.newest()
        if life is not None and life.state is not None and life.epoch == self.world.epoch:
            for text in advice.refused(life.state):
                self.world.court.accuse(text)

    def _unfinished(self) -> list[str]:
        """Return what has not come to its end yet."""
        life = self.newest()
        if life is None or life.state is None or life.task.cancelling():
            return ["there is no daemon"]
        index = life.state.index
        found = [f"{name} has not ended" for name, rollout in index.rollouts.items() if not rollout.closed]
        for rollout in index.rollouts:
            found += [
                f"{target.node} of {rollout} is {target.phase}, isolated: {target.isolated}"
                for target in index.targets(rollout)
                if target.phase in BUSY or target.order is not None or target.isolated
            ]
        found += [
            f"{machine.name} is left isolated: {machine.bits}"
            for machine in self.world.machines.values()
            if any(bit.is_set for bit in machine.bits.values())
        ]
        if life.state.trouble and found:
            found.append(f"its trouble: {life.state.trouble}")
        return found

    async def _look_back(self) -> None:
        """Judge what is left when all is over."""
        life = self.newest()
        court = self.world.court
        if life is None or life.keeper is None:
            return
        life.keeper.judge()
        await life.ask(life.keeper.compare())
        verdict = verify(self.state_dir / database.FILE_NAME)
        if not verdict.ok:
            court.accuse(f"the audit is broken: {verdict.message}")
        for rollout, acknowledged in self._people.votes.items():
            try:
                kept = {vote.id for vote in (await life.keeper.rollout(rollout)).votes}
            except NotFound:
                continue  # deleted, by somebody who was asked whether they mean it
            for vote in acknowledged:
                if vote not in kept:
                    court.accuse(f"vote {vote} was acknowledged and lost")


def seeded(seed: int) -> Verdict:
    """Run the simulation of a seed."""
    chances = Chances.of(seed)
    shape = chances.shape
    count = shape.randint(2, 6)
    machines = [Machine(f"n{number}", plans.labels_of(shape, number)) for number in range(1, count + 1)]
    scene = Scene(
        machines=machines,
        settings=plans.settings_of(shape, count),
        specs=[plans.probed(chances.traffic, plans.shaped(shape)) for _ in range(shape.choice((1, 1, 2)))],
        trouble_s=shape.choice((1800.0, 3600.0, 7200.0)),
        pace_s=shape.choice((60.0, 180.0, 600.0)),
        care=shape.choice((0.3, 0.7, 1.0)),
        storm=shape.choice((0.1, 0.3, 0.6)),
        looked=shape.random() < 0.3,
    )
    with workplace() as state_dir:
        return Simulation(
            f"seed {seed}", chances, lambda marks: Seeded(chances.faults, marks), scene, state_dir
        ).run()


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors in a group of groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    elif error is not None:
        yield error
