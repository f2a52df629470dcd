"""What a seed makes of a simulation: its nodes, its settings, its plans and its faults."""

from __future__ import annotations

from machines.model.node import NodeKind
from tests.sim import plans
from tests.sim.fault_plan import SeededFaults
from tests.sim.random_specs import random_specs
from tests.sim.random_streams import RandomStreams
from tests.sim.scenario import Scenario, SimResult
from tests.sim.sim_node import SimNode
from tests.sim.simulation import Simulation
from tests.sim.workspace import temporary_state_dir
from tests.support.note_change import note_installed


def run_clusters(seed: int) -> SimResult:
    """Run the simulation of a seed whose nodes are whole clusters."""
    chances = RandomStreams.of(seed)
    clusters, count = chances.clusters, chances.clusters.randint(2, 4)
    machines = [SimNode(f"c{n}", plans.random_labels(clusters, n)) for n in range(1, count + 1)]
    for machine in machines:
        machine.kind, machine.endpoint = NodeKind.CLUSTER, f"{machine.name}-a"
        if machine is not machines[0] and clusters.random() < 0.4:  # new: its network comes with the change
            machine.initialized = machine.available = False
            machine.listed = clusters.random() < 0.5
    settings = plans.random_settings(clusters, count)
    # By the seed's number: a draw would give all later ones another meaning.
    scene = Scenario(
        machines=machines,
        settings=plans.with_workers(settings, 1) if seed % 5 == 4 else settings,
        specs=[plans.random_cluster_spec(clusters) for _ in range(clusters.choice((1, 1, 2)))],
        fault_period_s=clusters.choice((1800.0, 3600.0)),
        action_interval_s=clusters.choice((180.0, 600.0)),
        approve_probability=1.0,
        fault_probability=clusters.choice((0.1, 0.3)),
    )
    with note_installed(), temporary_state_dir() as state_dir:
        return Simulation(
            f"clusters {seed}",
            chances,
            lambda marks: SeededFaults(chances.faults, marks),
            scene,
            state_dir,
        ).run()


def run_seed(seed: int, *, is_train: bool = False) -> SimResult:
    """Run the simulation of a seed; `is_train`: over several rollouts in one train."""
    chances = RandomStreams.of(seed)
    shape = chances.shape
    count = shape.randint(2, 6)
    machines = [SimNode(f"n{number}", plans.random_labels(shape, number)) for number in range(1, count + 1)]
    for machine in machines:
        machine.version = "new" if chances.compliance.random() < 0.2 else "old"
    scene = Scenario(
        machines=machines,
        settings=plans.with_random_cleaning(chances.cleaning, plans.random_settings(shape, count)),
        specs=random_specs(chances, count, is_train=is_train),
        fault_period_s=shape.choice((1800.0, 3600.0, 7200.0)),
        action_interval_s=shape.choice((60.0, 180.0, 600.0)),
        approve_probability=max(shape.choice((0.3, 0.7, 1.0)), is_train),
        fault_probability=shape.choice((0.1, 0.3, 0.6)),
        maybe_current=shape.random() < 0.3 and not is_train,
        is_train=is_train,
    )
    with temporary_state_dir() as state_dir:
        return Simulation(
            f"{'train' if is_train else 'seed'} {seed}",
            chances,
            lambda marks: SeededFaults(chances.faults, marks),
            scene,
            state_dir,
        ).run()
