"""Makes what the driver would hand to an isolator or a check."""

from __future__ import annotations

import time
from typing import Any

from machines.node import Kind
from rolloutd.adapters.kubernetes.clusters import CLUSTER, NODE
from rolloutd.ports import Host, StepContext

JSON = Any


def host(node: str, cluster: str = "test") -> Host:
    """Return a node as the fleet knows it."""
    return Host(node, Kind.KUBERNETES, connection={CLUSTER: cluster, NODE: node})


def context(
    node: str, *, rollout: str = "r-1", attempt: int = 1, prior: JSON = None, **params: JSON
) -> StepContext:
    """Return the context of a step on a node."""
    return StepContext(
        host=host(node),
        rollout=rollout,
        attempt=attempt,
        step="isolate.0.kubernetes",
        key=f"{rollout}.{node}.{attempt}.isolate.0.kubernetes",
        params=params,
        deadline=time.time() + 600,
        prior=prior,
    )
