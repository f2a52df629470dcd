"""Every effect of small plans, each in every way, and every pair of effects of a two-node plan.

A quiet run is recorded first; it names the effects there are.  Then the same
run is made again and again, each time with one effect (or two) that goes
otherwise, and each must come to its end with nothing forbidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.sim import plans
from tests.sim.faults import Fate, Scripted, Way
from tests.sim.seeds import Chances
from tests.sim.simulation import Scene, Simulation, Verdict
from tests.sim.workplace import workplace
from tests.sim.world import Machine

TROUBLE_S = 86_400.0
"""The time of trouble of a scripted run ends when all is done, or after a day."""

PAIRED = (Way.CUT_BEFORE, Way.CUT_AFTER)
"""The ways of which pairs are made: two power cuts at any two places."""


@dataclass(frozen=True, slots=True)
class Small:
    """A small plan over few nodes, and what becomes of its runs."""

    name: str
    nodes: int
    spec: Mapping[str, Any]
    fates: Mapping[int, Fate]
    stuck: bool = False
    cordoned: bool = False
    busy: bool = False


def _small(**more: Any) -> dict[str, Any]:
    return {**plans.SMALL, **more}


SMALL = (
    Small("one", 1, _small(), {}),
    Small("two isolators", 1, _small(isolate=[plans.COMMAND, plans.PLAYBOOK], probation="30s"), {}),
    Small("failing", 1, _small(), {0: Fate.FAILS}),
    Small("killed", 1, _small(), {0: Fate.KILLED}),
    Small(
        "orphaned", 1, _small(maintain={**plans.SMALL["maintain"], "on_unknown": "rerun"}), {0: Fate.ORPHANED}
    ),
    Small("cordoned", 1, _small(), {}, cordoned=True),
    Small("busy", 1, _small(isolate=[plans.CORDON], traffic=[plans.JOBS]), {}, busy=True),
    Small("stuck", 1, _small(limits={"isolate": "2m"}), {}, stuck=True),
)
"""Each on its own: what fails in one place only must not hide behind another."""

TWO = Small("two nodes", 2, _small(), {})
"""The plan of which every pair of effects is tried."""


def scripted(small: Small, ways: Mapping[int, Way]) -> Verdict:
    """Run a small plan with some effects that go otherwise."""
    chances = Chances.of(0)
    machines = [
        Machine(f"n{number}", {"team": "a", "rack": "r1"}, stuck=small.stuck)
        for number in range(1, small.nodes + 1)
    ]
    scene = Scene(machines, plans.plain_settings(), [dict(small.spec)], TROUBLE_S)
    with workplace() as state_dir:
        simulation = Simulation(
            name_of(small, ways),
            chances,
            lambda marks: Scripted(ways, marks, small.fates),
            scene,
            state_dir,
        )
        if small.cordoned:
            # Between the look at the fleet and the look at the node somebody else takes it out of service.
            world = simulation.world
            world.upon["commit admitted:n1"] = lambda: world.cordon(machines[0])
            world.upon["commit RolloutEnded"] = lambda: world.uncordon(machines[0])
        if small.busy:
            # Between the look and the isolation a client comes, and stays for a while.
            closed = f"do kubernetes R1.n1.1.{plans.FIRST_CORDON}.1"
            simulation.world.upon[closed] = lambda: setattr(machines[0], "traffic", True)
            simulation.loop.apart(120.0, lambda: setattr(machines[0], "traffic", False))
        if small.stuck:
            simulation.loop.apart(600.0, lambda: setattr(machines[0], "stuck", False))
        return simulation.run()


def singles() -> Iterator[tuple[Small, dict[int, Way]]]:
    """Yield every effect of every small plan in every way."""
    for small in SMALL:
        for number in range(len(scripted(small, {}).effects)):
            for way in Way:
                if way is not Way.WELL:
                    yield small, {number: way}


def pairs() -> Iterator[tuple[Small, dict[int, Way]]]:
    """Yield every pair of effects of the plan of two nodes."""
    count = len(scripted(TWO, {}).effects)
    for first, second in itertools.combinations(range(count), 2):
        # Which of the two sides of an effect the power goes at alternates: both are in the singles.
        yield TWO, {first: PAIRED[(first + second) % 2], second: PAIRED[second % 2]}


def name_of(small: Small, ways: Mapping[int, Way]) -> str:
    """Return the name by which a run is made again."""
    told = ",".join(f"{number}:{way}" for number, way in sorted(ways.items()))
    return f"small {small.name} {told or 'quiet'}"


def by_name(name: str) -> Small:
    """Return a small plan; raises KeyError."""
    return {small.name: small for small in (*SMALL, TWO)}[name]
