"""The specs of a simulation's plans, as its seed has them."""

from __future__ import annotations

from typing import Any

from tests.sim import plans
from tests.sim.random_streams import RandomStreams

_DRIFT = frozenset({"keep", "every"})
"""The keys of a plan that change its nodes again."""


def random_specs(chances: RandomStreams, nodes: int, *, is_train: bool) -> list[dict[str, Any]]:
    """Return the specs; those of a train are several, mostly at one pace."""
    if not is_train:
        return [_random_spec(chances, nodes) for _ in range(chances.shape.choice((1, 1, 2)))]
    specs = [_random_spec(chances, nodes) for _ in range(chances.trains.choice((2, 2, 3)))]
    # Most of them at one pace, or they would hardly meet on a node.
    same = ("isolate", "windows", "soak", "waves", "max_parallel", "pilot", "canary", "gates")
    pace = {key: specs[0][key] for key in same if key in specs[0]}
    if chances.trains.random() < 0.7:
        pace = {"isolate": pace["isolate"], "canary": {"select": "role=none"}}
    if chances.trains.random() < 0.8:
        specs = [{key: each for key, each in spec.items() if key not in same} | pace for spec in specs]
        specs = [spec | {"skip_compliant": False} for spec in specs]
    # A node has one version for all its changes, so one that is rolled back would drift in the others.
    return [{key: value for key, value in spec.items() if key not in _DRIFT} for spec in specs]


def _random_spec(chances: RandomStreams, nodes: int) -> dict[str, Any]:
    spec = plans.with_random_probes(chances.traffic, plans.random_spec(chances.shape))
    spec = plans.with_random_pilot(chances.pilots, spec, nodes)
    spec = plans.with_random_check_options(chances.checks, spec)
    spec = plans.with_random_compliance(chances.compliance, spec)
    spec = plans.with_random_guard(chances.guards, spec)
    spec = plans.with_random_rollbacks(chances.rollbacks, spec)
    spec = plans.with_random_selection(chances.selections, spec)
    return plans.with_random_preparation(chances.preparation, spec)
