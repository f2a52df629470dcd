"""Makes what the driver would hand to an isolator or a check."""

from __future__ import annotations

import time
from typing import Any

from machines.model.node import NodeKind
from rolloutd.adapters.kubernetes.cluster_registry import CLUSTER_KEY, NODE_KEY
from rolloutd.ports import Host, StepContext

JSON = Any


def host(node: str, cluster: str = "test") -> Host:
    """Return a node as the fleet knows it."""
    return Host(node, NodeKind.KUBERNETES, connection={CLUSTER_KEY: cluster, NODE_KEY: node})


def step_context(
    node: str, *, rollout: str = "r-1", attempt: int = 1, prior: JSON = None, **params: JSON
) -> StepContext:
    """Return the context of a step on a node."""
    return StepContext(
        host=host(node),
        rollout=rollout,
        attempt=attempt,
        step="isolate.0.kubernetes",
        idempotency_key=f"{rollout}.{node}.{attempt}.isolate.0.kubernetes",
        params=params,
        deadline=time.time() + 600,
        prior=prior,
    )
