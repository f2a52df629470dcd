"""Every effect of small plans, each in every way, and every pair of effects of a two-node plan.

A quiet run is recorded first; it names the effects there are.  Then the same
run is made again and again, each time with one effect (or two) that goes
otherwise, and each must come to its end with nothing forbidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from machines.model.plan import GateName
from rolloutd.commands import holds_and_freezes
from tests.sim import plans
from tests.sim.fault_plan import EffectOutcome, RunFate, ScriptedFaults
from tests.sim.people import OLGA, SimUsers
from tests.sim.random_streams import RandomStreams
from tests.sim.random_user import vote_for_another_digest
from tests.sim.scenario import Scenario, SimResult
from tests.sim.sim_node import SimNode
from tests.sim.simulation import Simulation
from tests.sim.workspace import temporary_state_dir
from tests.support.note_change import note_installed

FAULT_PERIOD_S = 86_400.0
"""The time of trouble of a scripted run ends when all is done, or after a day."""

PAIRED_OUTCOMES = (EffectOutcome.CUT_BEFORE, EffectOutcome.CUT_AFTER)
"""The ways of which pairs are made: two power cuts at any two places."""


@dataclass(frozen=True, slots=True)
class SmallScenario:
    """A small plan over few nodes, and what becomes of its runs."""

    name: str
    nodes: int
    spec: Mapping[str, Any]
    fates: Mapping[int, RunFate]
    stuck_s: float = 0.0
    """Until when no isolation ends."""
    cordoned: bool = False
    away: bool = False
    busy: bool = False
    releases: tuple[str, ...] = ()
    rollouts: int = 1
    """Of this plan; several are in one train."""
    limit: int = 1
    """How many nodes of a team may be down."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The same from a line of the trace on."""
    run_s: float = 0.0
    """How long each run takes; 0: as in every simulation."""
    crash_at_s: float = 0.0
    """When the daemon is killed; 0: never."""
    is_forged: bool = False
    """Whether votes are forged before each start of the daemon but the first."""
    asks: Mapping[str, Callable[[SimUsers], Coroutine[Any, Any, object]]] = field(default_factory=dict)
    """The command of a user, at a line of the trace."""
    slow: str = ""
    """The effect whose answer is slow."""
    shows: str = ""
    """A line of the trace without which a quiet run proves nothing."""


async def _hold(users: SimUsers, node: str) -> None:
    await users.run_command(OLGA, "hold", lambda now: holds_and_freezes.hold(now, OLGA, node, "tests"))


def _small_spec(**more: Any) -> dict[str, Any]:
    return {**plans.SMALL, **more}


SMALL = (
    SmallScenario("one", 1, _small_spec(), {}),
    SmallScenario(
        "two isolators", 1, _small_spec(isolate=[plans.COMMAND, plans.PLAYBOOK], probation="30s"), {}
    ),
    SmallScenario("failing", 1, _small_spec(), {0: RunFate.FAILS}),
    SmallScenario("killed", 1, _small_spec(), {0: RunFate.KILLED}),
    SmallScenario("losing its node", 1, _small_spec(), {0: RunFate.LOSES_NODE}),
    SmallScenario(
        "orphaned",
        1,
        _small_spec(maintain={**plans.SMALL["maintain"], "on_unknown": "rerun"}),
        {0: RunFate.ORPHANED},
    ),
    SmallScenario(
        "signals ignored",
        1,
        _small_spec(maintain={**plans.SMALL["maintain"], "on_unknown": "rerun"}),
        {0: RunFate.ESCAPED},
    ),
    SmallScenario(
        "rolled back",
        3,
        _small_spec(
            canary={"select": "role=none"},
            rollback={"playbook": "undo.yml", "vars": {"version": "old"}},
            on_failure="rollback-wave",
        ),
        {2: RunFate.FAILS},
    ),
    SmallScenario("cordoned", 1, _small_spec(), {}, cordoned=True),
    SmallScenario("busy", 1, _small_spec(isolate=[plans.CORDON], traffic=[plans.JOBS]), {}, busy=True),
    SmallScenario("prepared", 1, _small_spec(prepare={"stages": plans.PREPARE["stages"][:2]}), {}),
    SmallScenario(
        "cleaned", 1, _small_spec(prepare={"stages": plans.PREPARE["stages"][:1]}), {}, releases=("B", "B")
    ),
    SmallScenario("guarded", 1, _small_spec(guard=plans.GUARD), {}),
    SmallScenario("guarded and failing", 1, _small_spec(guard=plans.GUARD), {0: RunFate.FAILS}),
    SmallScenario("guarded and away", 1, _small_spec(guard=plans.GUARD), {}, away=True),
    SmallScenario(
        "guarded and rolled back",
        2,
        _small_spec(
            guard=plans.GUARD,
            canary={"select": "role=none"},
            rollback={"playbook": "undo.yml", "vars": {"version": "old"}},
            on_failure="rollback-wave",
        ),
        {1: RunFate.FAILS},
    ),
    SmallScenario("train", 1, _small_spec(isolate=[plans.CORDON], probation="30s"), {}, rollouts=2),
    SmallScenario(
        "train and failing", 1, _small_spec(isolate=[plans.CORDON]), {1: RunFate.FAILS}, rollouts=2
    ),
    SmallScenario("changed", 1, _small_spec(maintain=plans.NOTE), {}),
    SmallScenario(
        "changed and rolled back",
        2,
        _small_spec(maintain=plans.NOTE, canary={"select": "role=none"}, on_failure="rollback-wave"),
        {1: RunFate.FAILS},
    ),
    SmallScenario("stuck", 1, _small_spec(limits={"isolate": "2m"}), {}, stuck_s=600.0),
    # One of two isolations gives way, and when it begins to its pool has room again.
    SmallScenario(
        "over budget",
        2,
        _small_spec(canary={"select": "role=none"}),
        {},
        stuck_s=60.0,
        limit=2,
        limits={
            "commit apply-busy:n2:isolate.0.command#1": 1,
            "commit revert-intended:n1:isolate.0.command#1": 2,
        },
        shows="commit isolation-aborted:n1",
    ),
    # An isolated node waits for the slot of another, and the daemon is killed meanwhile.
    SmallScenario(
        "waiting for a slot",
        2,
        _small_spec(canary={"select": "role=none"}),
        {},
        limit=2,
        limits={"commit apply-intended:n2:isolate.0.command#1": 1},
        run_s=300.0,
        crash_at_s=240.0,
    ),
    # A user holds a node during its isolation, and the answer to its release is slow.
    SmallScenario(
        "held",
        1,
        _small_spec(isolate=[plans.CORDON]),
        {},
        stuck_s=60.0,
        asks={"commit apply-busy:n1:isolate.0.kubernetes#1": lambda users: _hold(users, "n1")},
        slow="let go n1",
        shows="let go n1",
    ),
    SmallScenario(
        "voted for another digest",
        1,
        _small_spec(),
        {},
        asks={
            "commit RolloutOpened": lambda users: vote_for_another_digest(users, OLGA, "R1", GateName.START)
        },
    ),
    SmallScenario("forged", 1, _small_spec(), {}, crash_at_s=12.0, is_forged=True),
)
"""Each on its own: what fails in one place only must not hide behind another."""

PREPARED_TOGETHER = SmallScenario(
    "prepared together", 6, _small_spec(prepare={"stages": plans.PREPARE["stages"][:2]}), {}
)
"""More nodes than a stage prepares at once; run without faults."""

TWO_NODES = SmallScenario("two nodes", 2, _small_spec(), {})
"""The plan of which every pair of effects is tried."""


def run_scripted(small: SmallScenario, outcomes: Mapping[int, EffectOutcome]) -> SimResult:
    """Run a small plan with some effects that go otherwise."""
    streams = RandomStreams.of(0)
    machines = [
        SimNode(f"n{number}", {"team": "a", "rack": "r1"}, stuck=small.stuck_s > 0)
        for number in range(1, small.nodes + 1)
    ]
    scenario = Scenario(
        machines,
        plans.with_team_limit(plans.default_settings(), small.limit),
        [dict(small.spec) for _ in range(small.rollouts)],
        FAULT_PERIOD_S,
        releases=small.releases,
        is_train=small.rollouts > 1,
    )
    with note_installed(), temporary_state_dir() as state_dir:
        simulation = Simulation(
            name_of(small, outcomes),
            streams,
            lambda marks: ScriptedFaults(outcomes, marks, small.fates, small.slow),
            scenario,
            state_dir,
        )
        _prepare(simulation, small, machines)
        result = simulation.run()
    joined = result.coverage.counts.get("train:joined", 0)
    if small.rollouts > 1 and not outcomes and joined < small.nodes * (small.rollouts - 1):
        result.violations.append(f"only {joined} attempts have joined the outage of another")
    if small.shows and not outcomes and not any(line.endswith(small.shows) for line in result.trace):
        result.violations.append(f"nothing shows {small.shows}")
    is_killed_only = outcomes and set(outcomes.values()) <= set(PAIRED_OUTCOMES)
    if is_killed_only and not result.violations:
        result.violations += [
            f"{subject} ends as {result.end.get(subject)}, without the kill as {end}"
            for subject, end in quiet_run(small.name).end.items()
            if result.end.get(subject) != end
        ]
    return result


def _prepare(simulation: Simulation, small: SmallScenario, machines: Sequence[SimNode]) -> None:
    """Schedule the faults and commands of the small plan."""
    if small.cordoned:
        # Another user cordons the node between two probes, of the fleet and of the node.
        world = simulation.world
        world.triggers["commit admitted:n1"] = lambda: world.cordon(machines[0])
        world.triggers["commit RolloutEnded"] = lambda: world.uncordon(machines[0])
    if small.away:
        # After the run the daemon is gone for longer than the node waits.
        world = simulation.world
        world.triggers["commit run-ok:n1:run.configure#1"] = simulation.stop_daemon_for_minutes
    if small.busy:
        # A client connects between the probe and the isolation, and stays for a while.
        closed = f"do kubernetes R1.n1.1.{plans.FIRST_CORDON}.1"
        simulation.world.triggers[closed] = lambda: setattr(machines[0], "traffic", True)
        simulation.loop.call_from_world(120.0, lambda: setattr(machines[0], "traffic", False))
    if small.run_s:
        simulation.world.run_s = (small.run_s, small.run_s)
    for line, request in small.asks.items():
        simulation.world.job_faults = None  # they would keep the node from being isolated again
        ask = partial(simulation.loop.call_from_world, 0.0, partial(simulation.ask, request))
        simulation.world.triggers[line] = ask
    if small.is_forged:
        simulation.forgery_probability = 1.0
    if small.crash_at_s:
        simulation.loop.call_from_world(small.crash_at_s, simulation.crash_daemon)
    for line, limit in small.limits.items():
        simulation.world.triggers[line] = partial(simulation.change_team_limit, limit)
    for machine in machines if small.stuck_s else ():
        simulation.loop.call_from_world(small.stuck_s, partial(setattr, machine, "stuck", False))


@cache
def quiet_run(name: str) -> SimResult:
    """Return the run of a small plan without faults: the effects there are, and the end without a kill."""
    return run_scripted(by_name(name), {})


def single_faults() -> Iterator[tuple[SmallScenario, dict[int, EffectOutcome]]]:
    """Yield every effect of every small plan in every way."""
    for small in SMALL:
        for number in range(len(quiet_run(small.name).effects)):
            for way in EffectOutcome:
                if way is not EffectOutcome.SUCCEEDS:
                    yield small, {number: way}


def fault_pairs() -> Iterator[tuple[SmallScenario, dict[int, EffectOutcome]]]:
    """Yield every pair of effects of the plan of two nodes."""
    count = len(quiet_run(TWO_NODES.name).effects)
    for first, second in itertools.combinations(range(count), 2):
        # Which of the two sides of an effect the power goes at alternates: both are in the singles.
        yield TWO_NODES, {first: PAIRED_OUTCOMES[(first + second) % 2], second: PAIRED_OUTCOMES[second % 2]}


def name_of(small: SmallScenario, outcomes: Mapping[int, EffectOutcome]) -> str:
    """Return the name by which a run is made again."""
    listed = ",".join(f"{number}:{way}" for number, way in sorted(outcomes.items()))
    return f"small {small.name} {listed or 'quiet'}"


def by_name(name: str) -> SmallScenario:
    """Return a small plan; raises KeyError."""
    return {small.name: small for small in (*SMALL, PREPARED_TOGETHER, TWO_NODES)}[name]
